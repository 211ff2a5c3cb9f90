"""The scripts that check kernels on a GPU, as far as they run without one: what they choose, how they run it, what they write."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from autotune.core.gpu import by_name
from autotune.kernels import KERNELS, kernel_of
from autotune.core.problem import Problem
from autotune.check import cases as cover
from autotune.check import judge
from autotune.check.reported import REPORTED
from autotune.check.strides import FORMS, unreadable

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _result  # noqa: E402
import _judges  # noqa: E402
import correctness  # noqa: E402
import repeatability  # noqa: E402

pytestmark = pytest.mark.slow

H200 = by_name("nvidia-h200")


@pytest.fixture(scope="module")
def covered():
    """(cases, what each kernel does not serve), once for all tests."""
    return cover.cover(H200, 0)


# What is chosen


FACTORS = cover.FACTORS["forward"]


def features(case: cover.Case) -> dict:
    """The values of factors that a case has."""
    p = case.problem
    values = {"dtype": p.dtype, "head_dims": (p.head_dim, p.head_dim_v), "mask": p.mask, "softcap": p.softcap, "alibi": p.alibi,
              "kv": p.kv, "heads": (p.heads_q, p.heads_kv), "sinks": p.sinks, "batch": p.batch, "form": case.form,
              "lengths": (p.seqlen_q, p.seqlen_k)}
    return values | ({"window": (p.window_left, p.window_right)} if p.mask == "window" else {})


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("forward")])
def test_each_kernel_gets_every_pair_of_values_that_it_serves(covered, name):
    kernel, (cases, refused) = KERNELS[name], covered
    seen = {pair for case in cases if cover.serves(kernel, case, H200)
            for pair in itertools.combinations(features(case).items(), 2)}
    excused = {tuple(text.split(" with ")) for text in refused[name]}
    lacking = []
    for a, b in itertools.combinations(FACTORS, 2):
        if "page_size" in (a, b):
            continue
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            texts = f"{a} {x}", f"{b} {y}"
            meant = "window" not in (a, b) or {a: x, b: y}.get("mask", "window") == "window"
            known = ((a, x), (b, y)) in seen or ((b, y), (a, x)) in seen
            if meant and not known and not ({texts[:1], texts[1:], texts} & excused):
                lacking.append(texts)
    assert not lacking and len(cases) < 900


def test_every_head_dim_is_there_and_reported_cases_are(covered):
    cases, refused = covered
    for name in ("forward_wgmma", "forward_mma", "forward_simt"):
        dims = {(c.problem.head_dim, c.problem.head_dim_v) for c in cases if cover.serves(KERNELS[name], c, H200)}
        assert dims >= {(d, d) for d in range(16, 257, 8)} | {(192, 128)}
        assert len({d for d, of_values in dims if d != of_values}) > 25
    left_out = "\n".join(cover.unserved(refused, H200))
    texts = {str(case) for case in cases}
    for what, (text, form) in REPORTED.items():
        assert str(cover.Case(Problem.parse(text), form)) in texts or what in left_out


def test_the_cover_is_made_of_its_seed(covered):
    assert cover.cover(H200, 0) == covered and cover.cover(H200, 1)[0] != covered[0]


def test_what_no_kernel_serves_is_named(covered, monkeypatch):
    cases, refused = covered
    served = {case.problem.kv for case in cases}
    assert {"kv " + kv for kv in ("varlen", "paged") if kv not in served} == \
        {text for text in cover.unserved(refused, H200) if text.startswith("kv ")}
    for name in KERNELS:  # a feature that goes away is named; one that comes is drawn, as this shows backwards
        reject = KERNELS[name].reject
        monkeypatch.setattr(KERNELS[name], "reject",
                            lambda problem, gpu, reject=reject: "no soft cap" if problem.softcap else reject(problem, gpu))
    cases, refused = cover.cover(H200, 0)
    assert not any(case.problem.softcap for case in cases)
    left_out = cover.unserved(refused, H200)
    assert "softcap 30.0" in left_out and any(text.startswith("softcap, large logits: forward") for text in left_out)


def test_random_cases_are_served_and_share_statics():
    groups = list(itertools.islice(cover.random_cases(H200, random.Random(3)), 60))
    assert all(cover.serving(case, H200) for group in groups for case in group)
    assert all(len({case.problem.static for case in group}) <= 2 for group in groups)  # two: caches of 8 bits too
    problems = [case.problem for group in groups for case in group]
    assert {p.op for p in problems} == {"forward", "decode"} and {"paged", "dense"} <= {p.kv for p in problems}
    assert {case.form for group in groups for case in group} == set(FORMS)
    assert max(p.flops for p in problems) < 3e10


def test_drawn_configs_are_legal_distinct_and_shared_by_a_static_part():
    case = cover.Case(Problem.parse("forward-bf16-b1-h4x2-q64-k64-d128-causal"), "packed")
    other = cover.Case(Problem.parse("forward-bf16-b2-h8x8-q700-k900-d128-causal"), "slices")
    for name in ("forward_wgmma", "forward_mma", "forward_simt"):
        drawn = cover.drawn_configs(KERNELS[name], case, H200, 6, 0)
        assert len(set(drawn)) == 6 and drawn == cover.drawn_configs(KERNELS[name], other, H200, 6, 0)
        assert not [config for config in drawn if KERNELS[name].illegal(case.problem.static, config, H200)]


def test_large_problems_are_checked_with_fewer_kinds():
    kinds = [correctness.kinds_of(cover.Case(Problem.parse(REPORTED[what][0]), "packed"))
             for what in ("no key", "heads before rows, D 256", "offsets beyond 32 bits")]
    assert [len(each) for each in kinds] == [6, 1, 1] and kinds[2] == ("random",)


# How it runs

BASE = "forward-fp16-b1-h2x2-q64-k64-d64"


def main_with(monkeypatch, cases, *arguments, target="correctness_fakes:FakeJudge"):
    monkeypatch.setattr(sys, "argv", ["benchmarks/correctness.py", *arguments])
    monkeypatch.setattr(_result, "detect", lambda: H200)
    monkeypatch.setattr(correctness, "OnGpu", lambda: _judges.OnGpu(target=target))
    monkeypatch.setattr(correctness, "cover", lambda gpu, seed, op: (cases, {"forward_simt": ["kv varlen"]}))
    monkeypatch.setattr("autotune.timing.conditions.conditions", lambda: {"driver": "none"})
    return correctness.main()


def cases_of(*batches) -> list[cover.Case]:
    return [cover.Case(Problem.parse(BASE.replace("-b1-", f"-b{batch}-")), form)
            for batch, form in zip(batches, itertools.cycle(("packed", "odd")))]


def test_the_cover_runs_and_is_written(monkeypatch, tmp_path, capsys):
    out = tmp_path / "result.yaml"
    code = main_with(monkeypatch, cases_of(1, 2, 3), "--configs", "1", "--seed", "7", "--out", str(out))
    result = yaml.safe_load(out.read_text())
    assert code == 0 and result["summary"]["failed"] == 0 and result["summary"]["worst_ratio"] == 0.25
    # 3 kernels for the first and third, one for the odd strides of the second; a random config of each where it compiles
    refused = result["random_configs_that_spill_or_do_not_compile"]
    assert result["summary"]["cases"] == 14 - sum(refused.values()) and result["problems"] == 3
    assert result["not_served"][0] == "kv varlen" and result["failures"] == []
    assert result["command"] == "python benchmarks/correctness.py --configs 1 --seed 7"
    rows = result["nearest_to_the_allowed_error"]
    assert set(rows) == {f"{BASE}", f"{BASE.replace('-b1-', '-b2-')} odd", BASE.replace("-b1-", "-b3-")}
    assert {digest for row in rows.values() for digest in row} == set(result["config"])
    assert "cases" in capsys.readouterr().out


def test_wrong_results_crashes_and_errors_are_failures_and_the_rest_goes_on(monkeypatch, tmp_path, capsys):
    out = tmp_path / "result.yaml"
    assert main_with(monkeypatch, cases_of(4, 2, 5, 1, 6), "--configs", "0", "--seed", "7", "--out", str(out)) == 1
    result = yaml.safe_load(out.read_text())
    said = "\n".join(result["failures"])
    assert result["summary"]["cases"] == 11 and result["summary"]["failed"] == 9 and result["summary"]["worst_ratio"] == 0.25
    assert said.count(": off") == 3 and said.count("crashed: ") == 3 and said.count("RuntimeError: an illegal address") == 3
    assert "WRONG" in capsys.readouterr().err


def test_defaults_that_spill_are_run_and_named_and_other_configs_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr("autotune.cuda.compile.flaw", lambda binary: ("spilled", "it spills 8 bytes"))
    out = tmp_path / "result.yaml"
    assert main_with(monkeypatch, cases_of(1), "--configs", "1", "--seed", "7", "--out", str(out)) == 0
    result = yaml.safe_load(out.read_text())
    assert result["summary"]["cases"] == 3 and sum(result["random_configs_that_spill_or_do_not_compile"].values()) == 3
    assert set(result["defaults_that_spill"].values()) == {"it spills 8 bytes"} and len(result["defaults_that_spill"]) == 3


def test_random_configs_stop_when_their_time_is_over(monkeypatch, tmp_path):
    out = tmp_path / "result.yaml"
    assert main_with(monkeypatch, cases_of(1, 2, 3), "--configs", "1", "--seconds", "1e-9", "--seed", "7", "--out", str(out)) == 0
    result = yaml.safe_load(out.read_text())
    assert result["problems"] == 3 and result["problems_with_default_configs_only"] == 2


def test_random_mode_ends_with_its_time_and_writes_counts(monkeypatch, tmp_path):
    out = tmp_path / "result.yaml"
    monkeypatch.setattr(correctness.Report, "clock", lambda self: 3.0 * self.ended)  # a problem takes 3 seconds
    monkeypatch.setattr(judge, "AHEAD", 1)
    code = main_with(monkeypatch, [], "--random", "5", "--seed", "7", "--out", str(out))
    result = yaml.safe_load(out.read_text())
    assert code == 0 and result["summary"]["cases"] > 0 and result["problems"] == 2
    assert 0 < len(result["config"]) <= correctness.LISTED and result["failures"] == []


def test_a_judge_that_cannot_start_ends_it_all(monkeypatch, tmp_path):
    from autotune.tuner.worker import WorkerError

    with pytest.raises(WorkerError, match="cannot start"):
        main_with(monkeypatch, cases_of(1, 1, 1, 1), "--out", str(tmp_path / "x"), target="no_such_module:Judge")
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_is_one_sentence(monkeypatch, capsys):
    from autotune.core.gpu import GpuError

    def detect():
        raise GpuError("no GPU can be used: there is no driver")

    monkeypatch.setattr(_result, "detect", detect)
    for script in (correctness, repeatability):
        monkeypatch.setattr(sys, "argv", ["x"])
        with pytest.raises(SystemExit, match="2"):
            script.main()
        assert capsys.readouterr().err.startswith("no GPU can be used: there is no driver")


def test_a_judge_checks_what_the_runner_launches_and_keeps_inputs_of_a_case(monkeypatch):
    from autotune.check.verdict import Checker
    from autotune.cuda.compile import CompilerMissing
    from autotune.simulator import simulate

    unloaded, writes = [], []

    def runner(problem, config, binary, device):
        def run(inputs, out, lse):
            assert out.strides[1] < out.strides[2]  # heads first, as q is
            assert inputs.q.strides[1] < inputs.q.strides[2] and simulate(problem, config, inputs, out, lse).ok
            if writes:
                np.lib.stride_tricks.as_strided(out, (out.shape[1] + 1,), (out.strides[1],))[-1] = 0
        return run

    monkeypatch.setattr("autotune.check.verify.runner", runner)
    monkeypatch.setattr("autotune.device.launch.load",
                        lambda binary, device: SimpleNamespace(unload=lambda: unloaded.append(binary)))
    monkeypatch.setattr(np, "get_default_memory_pool", lambda: SimpleNamespace(total_bytes=lambda: 0), raising=False)
    inspector = object.__new__(judge.Judge)  # numpy stands for CuPy
    inspector._cupy, inspector._device, inspector._key, inspector._checker = np, 0, (), None
    case = cover.Case(Problem.parse("forward-fp16-b2-h2x1-q30-k40-d16-causal"), "heads_first")
    config = KERNELS["forward_simt"].default(case.problem, H200)
    try:
        verdict = inspector.check(case, config, "binary", ("random", "masked_nan"), 0)
    except CompilerMissing as error:
        pytest.skip(str(error))
    kept = inspector._checker
    assert verdict.ok and 0 < verdict.worst_ratio < 1 and unloaded == ["binary"] and isinstance(kept, Checker)
    assert inspector.check(case, config, "binary", ("random", "masked_nan"), 0) == verdict and inspector._checker is kept
    writes.append(True)
    verdict = inspector.check(case, config, "binary", ("random",), 0)
    assert not verdict.ok and "between the elements of out" in verdict.message and inspector._checker is not kept


def test_simulated_cases_are_right_and_findings_are_failures(monkeypatch):
    from autotune.cuda.compile import CompilerMissing
    from autotune.simulator import compiler

    try:
        compiler.compiler()
    except CompilerMissing as error:
        pytest.skip(str(error))
    case = cover.Case(Problem.parse("forward-bf16-b3-h4x2-q300-k700-d32-causal-left60-sinks"), "heads_first")
    unit = correctness.unit(case, cover.serving(case, H200), H200, 0, 0, correctness.FEW_KINDS)
    verdicts = {config.kernel: _judges.Simulated()(unit, config, None) for config in unit.configs}
    assert set(verdicts) == {"forward_wgmma", "forward_mma", "forward_simt"}
    assert all(verdict.ok and 0 < verdict.worst_ratio < 1 for verdict in verdicts.values()), verdicts

    monkeypatch.setattr("autotune.simulator.simulate", lambda *_: SimpleNamespace(ok=False, findings=["race: two writers"]))
    verdict = _judges.Simulated()(unit, unit.configs[0], None)
    assert not verdict.ok and "race: two writers" in verdict.message and "-b2-" in verdict.message


# Repeatability


class FakeCupy:
    """numpy, with streams that do nothing."""

    def __init__(self):
        stream = SimpleNamespace(synchronize=lambda: None)
        self.cuda = SimpleNamespace(Stream=lambda non_blocking: _Entered(), Device=lambda: stream)

    def __getattr__(self, name):
        return getattr(np, name)


class _Entered(contextlib.nullcontext):
    def synchronize(self):
        pass


@pytest.mark.parametrize("wrong", [0, 3])
def test_launches_that_differ_are_counted(wrong):
    from autotune.check.inputs import make_inputs

    inputs = make_inputs(Problem.parse("forward-bf16-b2-h4x2-q7-k9-d16"), "mixed")
    launches = []

    def launch(inputs, out, lse):
        launches.append(out.shape)
        out[...], lse[...] = 1, 2
        if 1 < len(launches) <= 1 + wrong:  # a last bit of either
            (out.view(np.uint16) if len(launches) % 2 else lse.view(np.uint32))[-1, 0, 0] ^= 1

    assert repeatability.repeat(FakeCupy(), inputs, launch, 20) == wrong
    assert launches == [(2, 7, 4, 16)] * 20


def test_what_is_repeated_is_served_legal_and_compiles_for_each_kernel():
    kernels = set()
    for text in repeatability.PROBLEMS:
        case = cover.Case(Problem.parse(text), "packed")
        for kernel in cover.serving(case, H200):
            kernels.add(kernel.name)
            drawn = cover.drawn_configs(kernel, case, H200, 2, 0)
            assert len(drawn) == 2
            for config in (kernel.default(case.problem, H200), *drawn):
                assert kernel_of(config).illegal(case.problem.static, config, H200) is None
    assert kernels >= {"forward_wgmma", "forward_mma", "decode_mma"}


def test_forms_are_those_of_the_cover():
    assert cover.RUNTIME["form"] == tuple(FORMS) and not unreadable("packed", Problem(), KERNELS["forward_wgmma"])
