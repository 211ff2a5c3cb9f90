"""Whole runs of many workers, as processes, on simulated GPUs: over a folder, and over a real PostgreSQL on loopback."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import postgresql
import pytest
from tuner_fakes import FAKE, H200, SPACE, FakeBuilder, fails, synthetic_us

from autotune import kernels
from autotune.cli.main import main
from autotune.core.gpu import by_name
from autotune.core.measurement import Measurement
from autotune.core.problem import Problem
from autotune.tuner import insight
from autotune.tuner.lead import lead
from autotune.tuner.progress import Progress
from autotune.tuner.report import rows_of
from autotune.tuner.storages import DRIVERS, StoreError, open_storage
from autotune.tuner.store import Store

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
PROBLEMS = [Problem.parse(f"forward-bf16-b{n}-h4x4-q512-k512-d128-causal") for n in range(1, 6)]
SECONDS = 300.0  # at most, for a whole run: 10 to 20 s on an idle machine


@pytest.fixture
def start(monkeypatch):
    """start(where, linger, model) -> a worker process. All are ended."""
    for name in reversed(list(kernels.KERNELS)):
        monkeypatch.delitem(kernels.KERNELS, name)
    monkeypatch.setitem(kernels.KERNELS, FAKE.name, FAKE)
    workers = []

    def make(where, linger=1.0, model="nvidia-h200", skew=0.0):
        path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
        workers.append(subprocess.Popen([sys.executable, str(TESTS / "tuner_worker.py"), where, str(linger), model, str(skew)],
                                        env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL))
        return workers[-1]

    yield make
    for worker in workers:
        worker.kill()
        worker.wait()


def led(where, problems=PROBLEMS, meanwhile=lambda done: None, seconds=SECONDS):
    """What a leader without a GPU records. `meanwhile(count)` runs after each record."""
    records, output = {}, io.StringIO()
    deadline = time.monotonic() + seconds

    def keep(record):
        records[record.problem] = record
        meanwhile(len(records))

    lead(problems, H200, "quick", where, FakeBuilder(), Progress(len(problems), 1.0, output), keep,
         alive=lambda: time.monotonic() < deadline, sleep=lambda seconds: time.sleep(0.1))
    assert len(records) == len(problems), output.getvalue()
    return records


def measured(where, problem):
    return Store(problem, H200, storage=where).trials(FAKE)


def nothing_was_lost_or_blamed(where, records):
    for problem, record in records.items():
        trials = measured(where, problem)
        assert {t.measurement.outcome for t in trials} <= {"ok", "spilled"}, problem
        assert all(t.measurement.time_us == pytest.approx(synthetic_us(t.config)) for t in trials if t.measurement.ok)
        assert record.config in {t.config for t in trials}


def test_workers_one_killed_one_late_over_a_folder(tmp_path, start):
    where = str(tmp_path)
    workers = [start(where, 20.0) for _ in range(2)]

    def meanwhile(done):
        if done == 2:
            workers[0].send_signal(signal.SIGKILL)
            workers.append(start(where))

    nothing_or_crash = led(where, meanwhile=meanwhile)
    for problem in nothing_or_crash:  # a launch that was under way when its tuner was killed is the one thing that may be blamed
        crashed = [t for t in measured(where, problem) if t.measurement.outcome == "crashed"]
        assert len(crashed) <= 1 and all("the tuner died" in t.measurement.message for t in crashed)


def test_a_worker_that_is_told_to_end_gives_its_problem_back(tmp_path, start):
    where = str(tmp_path)
    first = start(where, 60.0)

    def meanwhile(done):
        if done == 1:
            first.terminate()
            first.wait()
            start(where)

    nothing_was_lost_or_blamed(where, led(where, PROBLEMS[:3], meanwhile))


def test_workers_of_another_gpu_model_take_nothing(tmp_path, start):
    other = start(str(tmp_path), 0.5, "nvidia-a100-sxm-80gb")
    start(str(tmp_path), 5.0)
    led(str(tmp_path), PROBLEMS[:1])
    assert other.wait(60) == 0
    assert not list(tmp_path.glob("nvidia-a100-sxm-80gb/forward-*"))


@pytest.fixture(scope="module")
def postgres():
    """(URL, restart) of a PostgreSQL on loopback of its own, which ends with the tests."""
    if not postgresql.programs() or not any(map(_importable, DRIVERS)):
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL or its driver is missing; .ci/run installs them")
        pytest.skip("PostgreSQL is not installed (apt install postgresql; pip install 'psycopg[binary]')")
    with postgresql.server() as known:
        yield known


def _importable(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def test_workers_over_postgresql_survive_a_kill_a_late_one_a_restart_skewed_clocks_and_two_leaders(postgres, start):
    where, restart = postgres
    workers = [start(where, 30.0, skew=skew) for skew in (0.0, 60.0, -60.0)]
    other = {}

    def second_leader():
        other.update(led(where, PROBLEMS[3:]))

    thread = threading.Thread(target=second_leader)
    thread.start()

    def meanwhile(done):
        if done == 1:
            workers[0].send_signal(signal.SIGKILL)
            start(where, 30.0)
        if done == 3:
            restart()

    records = led(where, PROBLEMS, meanwhile)
    thread.join(SECONDS)
    assert set(other) == set(PROBLEMS[3:]) and {p: r.config for p, r in other.items()}.items() <= \
        {p: r.config for p, r in records.items()}.items()
    for problem in records:
        outcomes = [t.measurement for t in measured(where, problem)]
        crashed = [m for m in outcomes if m.outcome == "crashed"]
        assert len(crashed) <= 1 and all("the tuner died" in m.message for m in crashed)
        assert sum(m.ok for m in outcomes) >= 8


def test_why_and_report_read_a_database(postgres, monkeypatch, capsys, tmp_path):
    where, _ = postgres
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path))
    monkeypatch.setitem(kernels.KERNELS, FAKE.name, FAKE)
    problem = Problem.parse("forward-bf16-b7-h4x4-q512-k512-d128-causal")
    store = Store(problem, H200, storage=where)
    for config in SPACE[::len(SPACE) // 20]:
        measured = Measurement("spilled", message="x") if fails(config) else Measurement("ok", time_us=synthetic_us(config))
        store.add(FAKE, config, "s", "c", measured)
    assert main(["why", problem.text, "--gpu", H200.name, "--trials", where]) == 0
    said = capsys.readouterr().out
    assert "best other" in said and "block_m" in said and "spilled" in said
    assert problem in set(insight.known_problems(H200, where))
    assert not set(insight.known_problems(by_name("nvidia-a100-sxm-80gb"), where))
    assert main(["why", problem.text.replace("b7", "b8"), "--gpu", H200.name, "--trials", where]) == 2
    assert "has no trial of" in capsys.readouterr().err
    rows, _ = rows_of(H200, where)
    assert rows and main(["report", "--gpu", H200.name, "--trials", where]) == 0


def test_a_database_that_is_not_there_is_one_sentence(monkeypatch):
    if not any(map(_importable, DRIVERS)):
        pytest.skip("no driver of PostgreSQL is installed (pip install 'psycopg[binary]')")
    monkeypatch.setattr("autotune.tuner.storages.FIRST_PATIENCE_SECONDS", 0.5)
    with pytest.raises(StoreError, match=r"postgresql://tune@127.0.0.1:9/x cannot be used: .*") as caught:
        open_storage("postgresql://tune:secret@127.0.0.1:9/x", "plan")
    assert "secret" not in str(caught.value)


def test_other_databases_are_refused():
    with pytest.raises(StoreError, match="a storage is a folder or postgresql://.*not mysql://"):
        open_storage("mysql://host/db", "plan")
