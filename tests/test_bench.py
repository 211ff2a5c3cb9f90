"""Comparisons with other libraries: which peers may take part, and what the report says. Timing itself needs a GPU and torch."""

from __future__ import annotations

import sys

import pytest
import yaml

from autotune import bench
from autotune.bench import BenchError, Report, Row, Timing, peers_of
from autotune.gpu import by_name
from autotune.kernels import default_config
from autotune.peers import PEERS
from autotune.problem import Problem

GPU = by_name("nvidia-h200")
CAUSAL = Problem.parse("forward-bf16-b1-h32x8-q8192-k8192-d128-causal")


def timing(time_us: float) -> Timing:
    return Timing(time_us, 0.001, 21, 1980, 0.4, "graph over 4 input sets")


def row(problem: Problem, ours: float, **peers: float) -> Row:
    return Row(problem, default_config(problem, GPU), "default, predicted", timing(ours),
               {name.replace("_", "-"): timing(time) for name, time in peers.items()})


def report(*rows: Row, skipped=()) -> Report:
    return Report("nvidia-h200", rows, tuple(skipped), {"driver": "580.1", "other_processes": 0}, {"torch": "2.9.0"},
                  "autotune bench ...", "2026-01-31 12:00:00 UTC")


def test_a_ratio_is_against_the_fastest_peer_of_the_row():
    one = row(CAUSAL, 1000.0, sdpa_flash=2000.0, sdpa_cudnn=1100.0)
    assert one.best_peer == "sdpa-cudnn" and one.ratio == pytest.approx(1.1)


def test_the_summary_is_the_geometric_mean_and_the_worst():
    both = report(row(CAUSAL, 100.0, sdpa_flash=200.0), row(CAUSAL, 100.0, sdpa_flash=50.0))
    assert both.geomean == pytest.approx(1.0) and both.worst == 0.5


def test_the_file_has_summary_versions_conditions_and_command(tmp_path):
    path = tmp_path / "result.yaml"
    bench.write(report(row(CAUSAL, 1000.0, sdpa_flash=1234.56789), skipped=[(CAUSAL, "sdpa-cudnn", "it fails")]), path)
    data = yaml.safe_load(path.read_text())
    assert data["summary"] == {"geomean": 1.235, "worst": 1.235}
    assert data["versions"]["torch"] == "2.9.0" and data["conditions"]["driver"] == "580.1"
    assert data["command"] == "autotune bench ..."
    entry = data["problems"][CAUSAL.text]
    assert entry["sdpa-flash"]["time_us"] == 1235.0 and entry["autotune"]["tflops"] == pytest.approx(549.8, abs=1)
    assert entry["config"]["kernel"] == "forward_mma" and isinstance(entry["autotune"]["spread"], float)
    assert data["left_out"] == [{"problem": CAUSAL.text, "peer": "sdpa-cudnn", "reason": "it fails"}]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(BenchError, match="cannot be written"):
        bench.write(report(row(CAUSAL, 1.0, sdpa_flash=1.0)), tmp_path / "missing" / "result.yaml")


def test_the_table_shows_what_was_left_out():
    text = bench.show(report(row(CAUSAL, 1000.0, sdpa_flash=1500.0), skipped=[(CAUSAL, "sdpa-cudnn", "it fails")]))
    assert "1.500" in text and "550" in text and "geomean 1.500, worst 1.500" in text
    assert f"not shown: {CAUSAL} against sdpa-cudnn: it fails" in text


@pytest.mark.parametrize("text, reason", [
    ("forward-bf16-b1-h32x8-q8192-k8192-d128-causal", None),
    ("forward-fp16-b2-h16x16-q512-k4096-d64", None),
    ("forward-bf16-b1-h32x8-q512-k8192-d128-causal", "top-left"),
    ("forward-bf16-b1-h64x8-q8192-k8192-d64-causal-left127", "no windows"),
    ("forward-bf16-b1-h64x8-q8192-k8192-d64-causal-sinks", "no sinks"),
    ("forward-fp32-b1-h8x8-q512-k512-d64", "no fp32"),
])
def test_what_sdpa_cannot_compute(text, reason):
    for name in ("sdpa-flash", "sdpa-cudnn"):
        said = PEERS[name].reject(Problem.parse(text))
        assert said is None if reason is None else reason in said


def test_unknown_and_missing_peers(monkeypatch):
    with pytest.raises(BenchError, match="no peer is called 'fa9'; known are sdpa-flash, sdpa-cudnn"):
        peers_of("sdpa-flash,fa9")
    with pytest.raises(BenchError, match="no peer is called"):
        peers_of(",")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BenchError, match="pip install torch"):
        bench.run([CAUSAL], peers_of("sdpa-flash"), GPU, print)


@pytest.mark.gpu
def test_a_comparison_on_the_gpu(tmp_path):
    pytest.importorskip("torch")
    from autotune.gpu import detect

    small = Problem.parse("forward-bf16-b2-h8x2-q1024-k1024-d128-causal")
    sinks = Problem.parse("forward-bf16-b2-h8x2-q1024-k1024-d128-causal-sinks")
    result = bench.run([small, sinks], peers_of("sdpa-flash"), detect(), print)
    assert [row.problem for row in result.rows] == [small] and result.skipped[0][2] == "it has no sinks"
    assert result.rows[0].ours.time_us > 0 and result.rows[0].ratio > 0.2
    bench.write(result, tmp_path / "result.yaml")
    assert yaml.safe_load((tmp_path / "result.yaml").read_text())["summary"]["worst"] > 0.2
