import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autotune.tuner import gpulock
from autotune.tuner.gpulock import LockError, held_file, lock_folder
from autotune.tuner.signals import ending_as_interrupts

ROOT = str(Path(__file__).parents[2])


def held_by_a_child(path, seconds=60):
    code = (f"from pathlib import Path; from autotune.tuner.gpulock import held_file; import time\n"
            f"with held_file(Path({str(path)!r}), print): print('held', flush=True); time.sleep({seconds})")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": ROOT})
    assert child.stdout.readline() == "held\n"
    return child


def test_f13_two_tunes_exclude_each_other_and_a_killed_one_lets_go(tmp_path):
    path, said = tmp_path / "new" / "gpu-1.lock", []
    child = held_by_a_child(path, 1.0)
    began = time.monotonic()
    with held_file(path, said.append):
        assert time.monotonic() - began > 0.3 and said == [f"waiting for another tune on this GPU (it holds {path})"]
    child.wait()
    child = held_by_a_child(path)
    child.kill()
    child.wait()
    with held_file(path, pytest.fail):
        assert path.stat().st_mode & 0o077 == 0
    with held_file(tmp_path / "new" / "gpu-2.lock", pytest.fail), held_file(path, pytest.fail):
        pass  # another GPU is another lock


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "below a file"])
def test_f13_what_lies_in_its_place_is_one_sentence_and_stays(tmp_path, kind):
    path, precious = tmp_path / "gpu.lock", tmp_path / "precious"
    precious.write_text("keep")
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = precious / "gpu.lock"
    with pytest.raises(LockError, match="cannot be used .* move it away"):
        with held_file(path, pytest.fail):
            pytest.fail("held")
    assert precious.read_text() == "keep"


def test_f13_the_lock_is_in_a_folder_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "db"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert lock_folder() == tmp_path / "autotune"
    tmp_path.chmod(0o777)  # anybody could put something there first
    assert lock_folder() == tmp_path / "db" / "locks"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert lock_folder() == tmp_path / "db" / "locks"


def test_f13_the_device_node_is_shared_by_users_and_let_be_if_it_cannot_be_opened(tmp_path, monkeypatch):
    runtime = pytest.importorskip("cupy.cuda").runtime
    monkeypatch.setattr(runtime, "deviceGetPCIBusId", lambda device: "0000:3B:00.0", raising=False)
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    assert gpulock.device_node(0, tmp_path) is None
    (folder / "information").write_text("Model: \t NVIDIA H200\nDevice Minor: \t 7\n")
    assert gpulock.device_node(0, tmp_path) == Path("/dev/nvidia7")
    with held_file(tmp_path / "absent", pytest.fail, ours=False):
        assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("uuid, name", [(b"\x01" * 16, "01" * 16), (b"\x00" * 16, "0000-3B-00-0"), ("GPU-12/../3", "GPU-123")])
def test_f13_the_lock_is_named_by_the_gpu(tmp_path, monkeypatch, uuid, name):
    runtime = pytest.importorskip("cupy.cuda").runtime
    monkeypatch.setattr(runtime, "deviceGetPCIBusId", lambda device: "0000:3B:00.0", raising=False)
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda device: {"uuid": uuid}, raising=False)
    assert gpulock.lock_path(0).name == f"gpu-{name}.lock"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_f15_a_closed_terminal_ends_a_tune_as_ctrl_c_does(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ending_as_interrupts():
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert signal.getsignal(number) == before


def test_f15_nohup_stays_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_as_interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
