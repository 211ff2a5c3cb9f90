"""The tuner on a real GPU: a whole tune, and kernels that hang, trespass or write nothing."""

import io
import re

import pytest

from autotune.cuda import compile
from autotune import kernels, tune
from autotune.core.gpu import detect
from autotune.database.lookup import lookup
from autotune.core.problem import Problem
from autotune.cuda.render import render
from autotune.tuner import EVALUATOR, session
from autotune.tuner.explore import Budget
from autotune.tuner.worker import Worker

pytestmark = pytest.mark.gpu
PROBLEM = Problem.parse("forward-bf16-b1-h4x2-q512-k512-d64-causal")
PATIENCE = 120.0  # seconds for calls that must not time out: CuPy compiles its own kernels on first use


@pytest.fixture(scope="module")
def worker():
    with Worker(EVALUATOR, {"device": 0}) as worker:
        yield worker


def sabotaged(statement):
    """(config, binary) of the default with `statement` at the kernel's begin."""
    gpu = detect()
    config = kernels.default_config(PROBLEM, gpu)
    target = kernels.kernel_of(config).target(gpu)
    source = render(PROBLEM.static, config, target)
    changed, count = re.subn(r"(__global__[^{]*\{)", rf"\1 {statement}", source)
    assert count >= 1
    return config, compile.compile_source(changed, target)


def evaluated(worker, statement, timeout=PATIENCE):
    opened = worker.call("open", PROBLEM, timeout=PATIENCE)
    assert opened.status == "done", opened.message
    return worker.call("evaluate", PROBLEM, *sabotaged(statement), None, timeout=timeout)


def test_an_intact_kernel_is_timed(worker):
    reply = evaluated(worker, "")
    assert reply.status == "done" and reply.value.ok, reply
    assert 1 < reply.value.time_us < 1000 and reply.value.error_ratio <= 1 and len(reply.value.samples_us) >= 3


def test_a_kernel_that_writes_nothing_is_wrong(worker):
    reply = evaluated(worker, "return;")
    assert reply.value.outcome == "wrong" and "never written" in reply.value.message
    assert worker.call("healthy", timeout=PATIENCE).value is True


def test_a_kernel_that_trespasses_is_a_failed_launch_and_poisons_the_process(worker):
    reply = evaluated(worker, "*(volatile int*)16 = 1;")
    assert reply.value.outcome == "launch_failed" and "llegal" in reply.value.message
    assert worker.call("healthy", timeout=PATIENCE).value is not True
    worker.kill()


def test_a_kernel_that_hangs_is_killed_and_the_next_one_runs(worker):
    assert evaluated(worker, "while (*(volatile unsigned*)p.lse != 12345u) {}", timeout=5.0).status == "timeout"
    assert evaluated(worker, "").value.ok


def test_a_whole_tune(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path))
    monkeypatch.setitem(session.EFFORTS, "quick", session.Effort(Budget(12, 60.0, 0.0), finalists=2, final_seconds=0.5))
    output = io.StringIO()
    record, = tune(PROBLEM, stream=output)
    assert record.evidence == "measured" and record.time_us <= record.default_time_us, output.getvalue()
    assert record.conditions["search"]["ok"] >= 5, output.getvalue()
    match = lookup(PROBLEM)
    assert (match.tier, match.config) == ("exact", record.config)
    again = io.StringIO()
    tune(PROBLEM, stream=again)
    assert "known from an earlier run" in again.getvalue()
