"""benchmarks/varlen.py: what it draws, the dense problem beside it, and the file that it writes."""

import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("cupy")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import varlen  # noqa: E402

from autotune.compare import run  # noqa: E402
from autotune.compare.comparison import Row, Timing  # noqa: E402
from autotune.core.gpu import by_name  # noqa: E402
from autotune.kernels import default_config  # noqa: E402

GPU = by_name("nvidia-h200")


@pytest.mark.parametrize("seed", range(5))
def test_lengths_add_up_and_the_dense_problem_is_the_same_work(seed):
    lengths = varlen.drawn(seed)
    assert len(lengths) == varlen.SEQUENCES and sum(lengths) == varlen.TOKENS and min(lengths) > 0
    packed = varlen.Problem(kv="varlen", batch=len(lengths), seqlen_q=max(lengths), seqlen_k=max(lengths), **varlen.SHAPE)
    dense = varlen.equal_work(lengths)
    assert dense.flops == pytest.approx(packed.flops_of([(n, n) for n in lengths]), rel=0.01)
    assert dense.batch * dense.seqlen_q == pytest.approx(varlen.TOKENS, rel=0.03)


@pytest.mark.parametrize("with_fa3", [True, False])
def test_the_file_has_the_worst_of_the_draws(tmp_path, monkeypatch, with_fa3):
    calls = []

    def measure_row(problem, peers, gpu, sequences=None):
        calls.append((problem, sequences))
        time_us = 1000.0 + 100 * (problem.kv == "varlen") + 100 * (len(calls) > 3)
        timing = Timing(time_us, 0.01, 45, 1980, 0.5, "graph over 2 input sets", (time_us,))
        others = {peer.name: Timing(1320.0, 0.01, 45, 1980, 0.6, "queue") for peer in peers}
        return Row(problem, default_config(problem, gpu), "default, predicted", timing, others), []

    monkeypatch.setattr(run, "measure_row", measure_row)
    monkeypatch.setattr(run, "release", lambda: None)
    monkeypatch.setattr(run, "versions", lambda peers: {"autotune": "0"})
    monkeypatch.setattr(varlen._result, "detect", lambda: GPU)
    monkeypatch.setattr("autotune.timing.conditions.conditions", dict)
    monkeypatch.setattr(type(varlen.PEERS["fa3"]), "missing", lambda peer: None if with_fa3 else "fa3 needs a library")
    path = tmp_path / "out.yaml"
    monkeypatch.setattr(sys, "argv", ["benchmarks/varlen.py", "--draws", "2", "--out", str(path)])
    assert varlen.main() == 0
    data = yaml.safe_load(path.read_text())
    assert data["command"] == "python benchmarks/varlen.py --draws 2" and len(data["rows"]) == 2
    assert data["summary"]["vs_dense"] == pytest.approx(10 / 11, rel=0.01)
    assert data["summary"].get("vs_fa3") == (pytest.approx(1.1) if with_fa3 else None)
    assert ("fa3" in data) == (not with_fa3)
    for dense, (packed, sequences), _ in (calls[:3], calls[3:]):
        assert packed.kv == "varlen" and dense[0].kv == "dense" and sum(n for n, _ in sequences) == varlen.TOKENS


def test_a_wrong_result_ends_it(monkeypatch):
    monkeypatch.setattr(run, "measure_row", lambda *arguments: (None, [("autotune", "our result is wrong: out")]))
    with pytest.raises(SystemExit, match="our result is wrong"):
        varlen.measure(GPU, varlen.drawn(0), [])
