"""Predicted configs on the simulator: the wrong are left out, each is run once, and no compiler is no obstacle."""

import io
from types import SimpleNamespace

import pytest

from autotune.cuda import compile
from autotune import kernels, simulator
from autotune.check.verdict import Verdict
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.tuner import executed
from autotune.tuner.executed import EXECUTED, Executor
from autotune.tuner.progress import Progress

GPU = by_name("nvidia-h200")
PROBLEM = Problem.parse("forward-bf16-b2-h8x2-q4096-k4096-d64-causal")


def ranking(count):
    kernel = kernels.KERNELS["forward_simt"]
    values = kernel.default(PROBLEM, GPU).values
    configs = [kernel.config(PROBLEM.static, {**values, "num_warps": warps, "rows_per_warp": rows})
               for warps in (4, 2, 1) for rows in (4, 2, 1)]
    return [(float(i), SimpleNamespace(config=config)) for i, config in enumerate(configs[:count])]


@pytest.fixture
def verdicts(monkeypatch):
    """config -> message of what a simulation of it finds; every one that is run is noted."""
    wrong, ran = {}, []

    def verify(problem, config, seeds, kinds):
        ran.append((problem, config))
        message = wrong.get(config, "")
        if isinstance(message, Exception):
            raise message
        return Verdict(not message, 0.5, message)

    monkeypatch.setattr(simulator, "verify", verify)
    return SimpleNamespace(wrong=wrong, ran=ran)


def executor():
    stream = io.StringIO()
    return Executor(Progress(1, 1.0, stream)), stream


def test_the_best_are_run_on_small_problems(verdicts):
    run, _ = executor()
    ranked = ranking(5)
    assert run(PROBLEM, ranked) == ranked
    assert [config for _, config in verdicts.ran] == [built.config for _, built in ranked[:EXECUTED]]
    assert all(problem.seqlen_q < 100 and problem.static == PROBLEM.static for problem, _ in verdicts.ran)


def test_what_is_wrong_is_left_out_and_the_next_one_is_run(verdicts):
    run, stream = executor()
    ranked = ranking(6)
    verdicts.wrong[ranked[0][1].config] = "race at line 7"
    verdicts.wrong[ranked[2][1].config] = compile.CompileError("g++ refused", "")
    assert run(PROBLEM, ranked) == [ranked[1], *ranked[3:]]
    assert "race at line 7" in stream.getvalue() and "g++ refused" in stream.getvalue()
    assert len(verdicts.ran) == 4


def test_a_config_is_run_once_for_a_static_part(verdicts):
    run, _ = executor()
    run(PROBLEM, ranking(3))
    run(Problem.parse("forward-bf16-b1-h4x4-q512-k512-d64-causal"), ranking(3))
    assert len(verdicts.ran) == EXECUTED
    run(Problem.parse("forward-bf16-b1-h4x4-q512-k512-d64"), ranking(3))
    assert len(verdicts.ran) == 2 * EXECUTED


def test_without_a_compiler_it_says_so_once_and_goes_on(verdicts):
    run, stream = executor()
    for _, built in ranking(9):
        verdicts.wrong[built.config] = compile.CompilerMissing("install g++")
    assert run(PROBLEM, ranking(4)) == ranking(4)
    assert run(PROBLEM, ranking(4)) == ranking(4)
    assert stream.getvalue().count("install g++") == 1 and len(verdicts.ran) == 1


def test_when_time_is_up_nothing_more_is_run(verdicts, monkeypatch):
    monkeypatch.setattr(executed, "SECONDS_ALL", 0.0)
    run, _ = executor()
    assert run(PROBLEM, ranking(4)) == ranking(4) and not verdicts.ran


@pytest.mark.slow
def test_a_real_config_is_run_for_real():
    run, stream = executor()
    ranked = ranking(1)
    assert run(PROBLEM, ranked) == ranked and stream.getvalue() == ""
