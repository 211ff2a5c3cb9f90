import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.tuner.worker import Worker, WorkerError

TARGET = "tuner_targets:Faulty"
TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.syspath_prepend(TESTS)
    with Worker(TARGET) as worker:
        yield worker


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_calls_share_one_process(worker):
    first, second = (worker.call("echo", {"a": 1}, timeout=5) for _ in range(2))
    assert first.status == second.status == "done"
    assert first.value == ({"a": 1}, 1, worker.pid) and second.value[1] == 2
    assert worker.starts == 1 and worker.pid != os.getpid()


def test_large_messages_pass(worker):
    assert len(worker.call("big", 5_000_000, timeout=10).value) == 5_000_000


def test_a_hang_is_killed_and_the_next_call_works(worker):
    pid = worker.call("echo", 1, timeout=5).value[2]
    began = time.monotonic()
    reply = worker.call("hang", timeout=0.3)
    assert reply.status == "timeout" and "0.3 s" in reply.message
    assert time.monotonic() - began < 3 and not alive(pid)
    assert worker.call("echo", 2, timeout=5).value[:2] == (2, 1)


@pytest.mark.parametrize("method, said", [("crash", "SIGSEGV"), ("leave", "exit code 7"), ("leave", "Xid 31")])
def test_a_crash_is_reported_with_its_cause(worker, method, said):
    reply = worker.call(method, timeout=10)
    assert reply.status == "crashed" and said in reply.message
    assert worker.call("echo", 3, timeout=5).status == "done" and worker.starts == 2


def test_an_exception_keeps_the_process(worker):
    reply = worker.call("fail", timeout=5)
    assert (reply.status, reply.message) == ("raised", "ValueError: illegal address")
    assert worker.call("echo", 4, timeout=5).status == "done" and worker.starts == 1


def test_death_between_calls_is_a_crash_of_the_next(worker):
    os.kill(worker.call("echo", 1, timeout=5).value[2], signal.SIGKILL)
    time.sleep(0.1)
    reply = worker.call("echo", 2, timeout=5)
    assert reply.status == "crashed" and "SIGKILL" in reply.message
    assert worker.call("echo", 3, timeout=5).status == "done"


@pytest.mark.parametrize("start, said", [("raise", "RuntimeError: no device here"), ("exit", "libcuda is broken")])
def test_a_worker_that_cannot_start_says_why(monkeypatch, start, said):
    monkeypatch.syspath_prepend(TESTS)
    with Worker(TARGET, {"start": start}) as worker, pytest.raises(WorkerError, match=said):
        worker.call("echo", 1, timeout=5)


def test_a_call_may_be_submitted_before_the_process_is_up(worker):
    began = time.monotonic()
    worker.submit("echo", 1)
    assert time.monotonic() - began < 0.1
    assert worker.result(timeout=5).value[0] == 1
    assert worker.call("echo", 2, timeout=5).value[:2] == (2, 2)


def test_an_abandoned_call_cannot_answer_a_later_one(worker):
    worker.submit("echo", "first")
    assert worker.call("echo", "second", timeout=5).value[:2] == ("second", 1) and worker.starts == 2


def test_close_ends_the_process(worker):
    pid = worker.call("echo", 1, timeout=5).value[2]
    worker.close()
    assert not alive(pid)


def test_the_child_dies_with_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(f"import sys; sys.path[:0] = [{TESTS!r}, {str(Path(TESTS).parent)!r}]\n"
                      "from autotune.tuner.worker import Worker\n"
                      f"worker = Worker({TARGET!r}); print(worker.call('echo', 1, timeout=20).value[2], flush=True)\n"
                      "worker.call('hang', timeout=100)\n")
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
