import io
from pathlib import Path

import pytest
from tuner_fakes import FAKE, H200, PROBLEM, SPACE, FakeBuilder, fails, synthetic_us

from autotune import kernels
from autotune.core.problem import Problem
from autotune.tuner import owner, session as session_module
from autotune.tuner.explore import Budget
from autotune.tuner.progress import Progress
from autotune.tuner.session import Effort, ProblemFailed, Session
from autotune.tuner.store import Store
from autotune.tuner.worker import Worker, WorkerError

pytestmark = pytest.mark.slow

DEFAULT = FAKE.default(PROBLEM, H200)
REAL = dict(kernels.KERNELS)
OTHER = Problem.parse("forward-bf16-b2-h32x8-q4096-k4096-d128-causal")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """make(faults, trials) -> (session, output, log of the worker's calls)"""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    for name in reversed(list(kernels.KERNELS)):  # put back in reverse, and so in their order of preference
        monkeypatch.delitem(kernels.KERNELS, name)
    monkeypatch.setitem(kernels.KERNELS, FAKE.name, FAKE)
    workers = []

    def make(faults=(), trials=40, builder=None):
        log, output = tmp_path / "log", io.StringIO()
        worker = Worker("tuner_targets:FakeEvaluator", {"device": 0, "faults": tuple(dict(faults).items()), "log": str(log)})
        workers.append(worker)
        effort = Effort(Budget(trials, 30.0, 0.0), finalists=3, final_seconds=0.1)
        return Session(H200, effort, worker, builder or FakeBuilder(), Progress(1, 1.0, output), tmp_path / "store"), output, log

    yield make
    for worker in workers:
        worker.close()


def outcomes(session, problem=PROBLEM):
    return {trial.config: trial.measurement for trial in Store(problem, H200, session.store_root).trials(FAKE)}


def test_a_problem_becomes_a_record(bench):
    session, output, log = bench()
    record = session.tune(PROBLEM, [])
    stored = outcomes(session)
    assert 40 <= len(stored) < 160 and sum(m.ok for m in stored.values()) <= 40
    assert record.problem == PROBLEM and record.evidence == "measured" and record.trials == len(stored)
    assert record.time_us == pytest.approx(min(m.time_us for m in stored.values() if m.outcome == "ok"), rel=0.011)
    assert record.default_config == DEFAULT and record.default_time_us == pytest.approx(synthetic_us(DEFAULT), rel=1e-4)
    assert record.speedup > 1.05
    assert record.conditions["search"]["ok"] + record.conditions["search"]["spilled"] == len(stored)
    assert "TFLOP/s" in output.getvalue() and record.config.text in output.getvalue()
    lines = log.read_text().splitlines()
    assert lines[0] == f"open {PROBLEM}" and lines.count(lines[0]) == 1 and sum(line.startswith("final") for line in lines) == 1


@pytest.mark.parametrize("text", ["forward-bf16-b1-h8x2-q300-k300-d64-causal", "decode-bf16-b2-h8x2-q1-k300-d64-page16",
                                  "forward-bf16-b3-h8x2-q300-k300-d64-causal-varlen"])
def test_real_kernels_of_every_kind_can_be_tuned(bench, monkeypatch, text):
    session, _, _ = bench(trials=15)
    for name, kernel in REAL.items():
        monkeypatch.setitem(kernels.KERNELS, name, kernel)
    monkeypatch.delitem(kernels.KERNELS, FAKE.name)
    record = session.tune(Problem.parse(text), [])
    assert record.config.kernel in REAL and record.conditions["search"]["ok"] >= 15


def test_what_spills_is_never_launched(bench):
    session, _, log = bench()
    session.tune(PROBLEM, [])
    launched = {line.split(" ", 1)[1] for line in log.read_text().splitlines() if line.startswith("evaluate")}
    assert launched and not launched & {c.text for c in SPACE if fails(c)}


@pytest.mark.parametrize("fault, outcome", [("crash", "crashed"), ("hang", "timeout"), ("wrong", "wrong"),
                                            ("launch_failed", "launch_failed")])
def test_a_bad_kernel_is_an_outcome_and_the_tune_goes_on(bench, monkeypatch, fault, outcome):
    monkeypatch.setattr(session_module, "CALL_SECONDS", 0.5)
    session, _, log = bench({3: fault}, trials=30)
    record = session.tune(PROBLEM, [])
    bad = [m for config, m in outcomes(session).items() if config["stages"] == 3 and m.outcome != "spilled"]
    assert bad and {m.outcome for m in bad} == {outcome} and all(m.message for m in bad)
    assert record.config["stages"] != 3 and record.conditions["search"][outcome] == len(bad)
    restarts = len(bad) if fault != "wrong" else 0
    assert 1 <= log.read_text().count("open ") <= restarts + 1 and session.worker.starts <= restarts + 1


def test_a_launch_that_the_driver_refuses_costs_no_restart(bench):
    session, _, log = bench({3: "launch_failed", "refused": True}, trials=20)
    session.tune(PROBLEM, [])
    assert session.worker.starts == 1 and log.read_text().count("healthy") >= 1


def test_a_fault_of_the_worker_itself_ends_the_tune_and_blames_no_config(bench):
    session, _, _ = bench({2: "raise"})
    with pytest.raises(WorkerError, match="evaluate failed in the process that measures kernels: RuntimeError: an illegal"):
        session.tune(PROBLEM, [])
    assert all(config["stages"] != 2 or m.outcome == "spilled" for config, m in outcomes(session).items())


def test_a_second_run_measures_nothing_twice_and_finds_the_same(bench):
    first, _, log = bench()
    record = first.tune(PROBLEM, [])
    before = log.read_text().count("evaluate")
    again, output, _ = bench()
    second = again.tune(PROBLEM, [record])
    assert second.config == record.config and second.trials == record.trials
    assert log.read_text().count("evaluate") - before <= 4  # the finalists
    assert f"{record.trials} configs known from an earlier run" in output.getvalue()
    more, _, _ = bench(trials=60)
    assert more.tune(PROBLEM, [record]).trials >= record.trials + 20


def test_a_changed_source_forgets_what_was_measured(bench):
    first, _, _ = bench(trials=15)
    first.tune(PROBLEM, [])
    changed, output, _ = bench(trials=15, builder=FakeBuilder(version="2"))
    changed.tune(PROBLEM, [])
    assert "known from an earlier run" not in output.getvalue()


def test_an_interrupt_keeps_what_was_measured_and_blames_nobody(bench, monkeypatch):
    session, _, _ = bench()
    call, calls = session.worker.call, []

    def interrupted(method, *arguments, timeout):
        calls.append(arguments[1])
        if len(calls) == 10:
            raise KeyboardInterrupt
        return call(method, *arguments, timeout=timeout)

    monkeypatch.setattr(session.worker, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.tune(PROBLEM, [])
    assert session.worker.pid is None
    stored = outcomes(session)
    assert sum(m.outcome == "ok" for m in stored.values()) == 9 and calls[9] not in stored
    monkeypatch.setattr(session.worker, "call", call)
    resumed, output, log = bench()
    resumed.tune(PROBLEM, [])
    assert f"{len(stored)} configs known" in output.getvalue()
    assert len(outcomes(resumed)) >= 40


def test_a_tuner_that_dies_blames_the_kernel_that_was_running(bench, monkeypatch):
    session, _, _ = bench()
    store = Store(PROBLEM, H200, session.store_root)
    with monkeypatch.context() as patch:
        dead = {**owner.me(), "started": "1"}
        patch.setattr(owner, "me", lambda: dead)
        store.begin(FAKE, DEFAULT, FakeBuilder().source_sha256(PROBLEM.static, DEFAULT), "0" * 64)
    record = session.tune(PROBLEM, [])
    assert outcomes(session)[DEFAULT].outcome == "crashed" and "died" in outcomes(session)[DEFAULT].message
    assert record.default_config is None and record.config != DEFAULT


def test_the_same_launch_is_measured_once(bench):
    builder = FakeBuilder(same=lambda config: (config["block_m"], config["block_n"], config["warps"]))
    session, _, log = bench(builder=builder, trials=60)
    session.tune(PROBLEM, [])
    launched = [line for line in log.read_text().splitlines() if line.startswith("evaluate")]
    tried = [c for c, m in outcomes(session).items() if m.outcome == "ok"]
    assert len(launched) < len(tried) + 4


def test_a_crash_in_the_final_falls_back_to_one_at_a_time(bench):
    session, _, _ = bench({"final": "crash"})
    record = session.tune(PROBLEM, [])
    assert record.evidence == "measured" and record.default_time_us


def test_neighbours_winners_are_tried_first(bench):
    session, _, log = bench()
    winner = session.tune(OTHER, [])
    log.write_text("")
    session.tune(PROBLEM, [winner])
    first = next(line for line in log.read_text().splitlines() if line.startswith("evaluate"))
    assert first == f"evaluate {winner.config.text}" and session.worker.starts == 1


def test_inputs_that_do_not_fit_fail_the_problem_only(bench):
    session, _, _ = bench()
    with pytest.raises(ProblemFailed, match="inputs cannot be prepared on the GPU: MemoryError: out of memory"):
        session.tune(Problem.parse("forward-bf16-b13-h32x8-q8192-k8192-d128-causal"), [])
    assert session.tune(PROBLEM, []).evidence == "measured"


def test_when_nothing_works_the_reason_is_given(bench):
    session, _, _ = bench({stages: "wrong" for stages in (1, 2, 3, 4)}, trials=20)
    with pytest.raises(ProblemFailed, match="no config works .*wrong.*at row 3"):
        session.tune(PROBLEM, [])
