"""The cache folder: a call is served whatever it is like, and what a stranger may have put there is not used
(F2, F6, F12, F16, C1 to C4)."""

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from strangers import NOBODY, TEAM, needs_root, run_as

from autotune.cuda import cache
from autotune.cuda import compile as compiler

pytestmark = pytest.mark.slow

SMALL = 'extern "C" __global__ void f(float* x) { *x = 1; }'
OTHER = 'extern "C" __global__ void g(float* x) { *x = 2; }'
SERVE = f"""
import os, warnings
from autotune.cuda import compile
compiled, plain = [], compile.compile_source
compile.compile_source = lambda *given: compiled.append(1) or plain(*given)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(2):
        assert compile.cached({SMALL!r}, "sm_80").image[:4] == b"\\x7fELF"
print(len(compiled), [str(w.message) for w in said])
"""


@pytest.fixture
def folder(monkeypatch):
    """A cache folder that other users can reach: pytest closes its own folders to them, at any time."""
    place = Path(tempfile.mkdtemp(prefix="autotune-tests-"))
    place.chmod(0o755)
    cache._told.clear()
    monkeypatch.setenv("AUTOTUNE_CACHE", str(place / "cache"))
    yield place / "cache"
    shutil.rmtree(place, ignore_errors=True)


def code_of(source: str) -> tuple:
    """What a call gets; the log differs, as it says how long the compile took."""
    binary = compiler.cached(source, "sm_80")
    return binary.source, binary.image, binary.entries, binary.advisories, binary.nvrtc


def served(expected_warnings: int) -> list[str]:
    """Two calls for the same source; the messages of all warnings, of which there are so many."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert compiler.cached(SMALL, "sm_80").image[:4] == b"\x7fELF"
    assert len(said) == expected_warnings and all(w.category is cache.CacheWarning for w in said)
    return [str(w.message) for w in said]


@pytest.mark.parametrize("place", ["/proc/cache", "/dev/null/cache", "{}/file/cache", "{}/file", "/proc/1/cache", "{}/\udcff\n"])
def test_c2_a_cache_that_cannot_be_made_is_one_warning(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    cache._told.clear()
    monkeypatch.setenv("AUTOTUNE_CACHE", place.format(tmp_path))
    for message in served(0 if "udcff" in ascii(place) else 1):
        assert "cannot be written" in message and "AUTOTUNE_CACHE" in message and message.isprintable()


def test_c2_a_full_disk_is_one_warning(folder):
    """RLIMIT_FSIZE stands for the full disk: what is written is cut, and nothing half written stays."""
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" \
           "from autotune.cuda.compile import nvrtc_version; nvrtc_version()\n" \
           "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n" + SERVE
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, timeout=120)
    assert done.stdout.startswith("2 [") and done.stdout.count("cannot be written") == 1, done.stderr
    assert list(folder.iterdir()) == []


def test_c2_where_warnings_are_errors_the_call_is_served(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cache._told.clear()
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.cached(SMALL, "sm_80").entries.keys() == {"f"}


def test_c13_without_a_home_folder_a_call_is_served(monkeypatch):
    import platformdirs

    def nowhere(*_, **__):
        raise RuntimeError("could not determine the home directory")

    cache._told.clear()
    monkeypatch.delenv("AUTOTUNE_CACHE")
    monkeypatch.setattr(platformdirs, "user_cache_path", nowhere)
    message, = served(1)
    assert "no home folder" in message and "AUTOTUNE_CACHE" in message


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o555, 0o700])
def test_c1_a_cache_that_root_baked_is_read_or_at_least_survived(folder, mode):
    compiler.cached(SMALL, "sm_80")
    folder.chmod(mode)
    done = run_as(NOBODY, SERVE, AUTOTUNE_CACHE=str(folder))
    expected = "0 []\n" if mode & 0o5 else "2 ["
    assert done.stdout.startswith(expected), (done.stdout, done.stderr)
    assert mode & 0o5 or done.stdout.count("cannot be written") == 1


@needs_root
@pytest.mark.parametrize("umask", [0o002, 0o022, 0o007])
def test_c4_a_folder_that_is_set_up_for_a_team_is_shared(folder, umask):
    folder.mkdir()
    os.chown(folder, 0, TEAM)
    folder.chmod(0o2770)
    first = run_as(1001, SERVE, (TEAM,), umask, AUTOTUNE_CACHE=str(folder))
    assert first.stdout == "1 []\n", (first.stdout, first.stderr)
    for _ in range(2):
        assert run_as(1002, SERVE, (TEAM,), umask, AUTOTUNE_CACHE=str(folder)).stdout == "0 []\n"
    shutil.rmtree(next(folder.iterdir()) / "log.txt", ignore_errors=True)
    next(folder.iterdir()).joinpath("kernel.cubin").write_bytes(b"damaged")
    again = run_as(1002, SERVE, (TEAM,), umask, AUTOTUNE_CACHE=str(folder))
    assert again.stdout.startswith("1 []" if umask == 0o002 else ("1 []", "2 [")), (again.stdout, again.stderr)


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o2777])
def test_f12_what_another_user_put_there_is_not_used(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, 0, TEAM)
    assert run_as(NOBODY, SERVE, (TEAM,), AUTOTUNE_CACHE=str(folder)).stdout == "1 []\n"
    entry, = folder.iterdir()
    assert entry.stat().st_uid == NOBODY
    done = run_as(1001, SERVE, (), AUTOTUNE_CACHE=str(folder))
    count, said = int(done.stdout[0]), done.stdout[2:]
    assert count >= 1 and "another user (uid 65534)" in said and "AUTOTUNE_CACHE" in said, (done.stdout, done.stderr)
    if mode & 0o1002 == 0o0002:  # it could be moved away, so this user's own entry is there now
        assert entry.stat().st_uid == 1001 and run_as(1001, SERVE, AUTOTUNE_CACHE=str(folder)).stdout == "0 []\n"


@pytest.mark.parametrize("name", [None, "kernel.cubin", "kernel.cu", "log.txt", "sum.txt"])
def test_f12_what_others_may_write_is_not_used(folder, name):
    compiler.cached(SMALL, "sm_80")
    entry, = folder.iterdir()
    path = entry / name if name else entry
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    message, = served(1)
    assert "everybody may write it" in message
    assert not (entry / (name or ".")).stat().st_mode & stat.S_IWOTH and served(0) == []


def test_f12_files_of_two_entries_cannot_be_exchanged(folder):
    binaries = {source: code_of(source) for source in (SMALL, OTHER)}
    first, second = folder.iterdir()
    for name in ("kernel.cubin", "kernel.cu", "log.txt", "binary.json", "sum.txt"):
        a, b = (first / name).read_bytes(), (second / name).read_bytes()
        (first / name).write_bytes(b), (second / name).write_bytes(a)
        assert {source: code_of(source) for source in (SMALL, OTHER)} == binaries
    first.rename(folder / "x"), second.rename(first), (folder / "x").rename(second)
    assert {source: code_of(source) for source in (SMALL, OTHER)} == binaries


@pytest.mark.parametrize("facts", [{"entries": None}, {"nvrtc": "\x1b[31m"},
                                   {"entries": {"f": {"registers": 1, "spill_bytes": 0}}},
                                   {"advisories": ["\x1b[2J"]}, [], None])
def test_f12_nothing_is_believed_that_the_cubin_does_not_say(folder, facts):
    """Also with a sum that fits: binary.json is for people only."""
    first = code_of(SMALL)
    entry, = folder.iterdir()
    (entry / "binary.json").write_text(json.dumps(facts))
    assert code_of(SMALL) == first
    (entry / "binary.json").write_text(json.dumps(facts))
    files = {name: (entry / name).read_bytes() for name in compiler.FILES}
    (entry / cache.SUM).write_bytes(cache._sum(entry.name, files))
    assert code_of(SMALL) == first


@pytest.mark.parametrize("name", ["kernel.cubin", "binary.json", "log.txt", "sum.txt", "."])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir,
                                  lambda path: os.symlink("/etc/passwd", path)],
                         ids=["fifo", "zero", "folder", "link"])
def test_f6_what_is_no_file_is_made_anew_without_waiting(folder, name, make):
    first = code_of(SMALL)
    entry, = folder.iterdir()
    path = entry / name
    if name == ".":
        shutil.rmtree(entry)
        path = entry
    else:
        path.unlink()
    make(path)
    began = time.monotonic()
    assert code_of(SMALL) == first and time.monotonic() - began < 30
    assert sorted(p.name for p in folder.iterdir()) == [entry.name] and (entry / "kernel.cubin").read_bytes() == first[1]
    assert os.path.getsize("/etc/passwd") > 0


def _race(task):
    place, files, gate, tries = task
    os.environ["AUTOTUNE_CACHE"] = str(place)
    warnings.simplefilter("error")
    kept, cache.tell = [], lambda *said: kept.append(said)
    for turn in range(tries):
        while time.time() < gate + turn * 0.03:
            pass
        cache.keep(place / f"{turn:032x}", files, cache.Trust(None))
    return kept


@pytest.mark.parametrize("damaged", [False, True])
def test_f2_c3_many_processes_that_write_one_entry_all_succeed(folder, damaged):
    """8 processes end a compile of one key at the same moment, 60 times; with and without a damaged entry in the way."""
    tries, files = 60, {"kernel.cu": b"x" * 1000, "kernel.cubin": b"y" * 5000}
    folder.mkdir()
    for turn in range(tries if damaged else 0):
        (folder / f"{turn:032x}").mkdir()
        (folder / f"{turn:032x}" / "kernel.cu").write_text("torn")
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        list(pool.map(abs, range(64)))
        said = list(pool.map(_race, [(folder, files, time.time() + 1, tries)] * 8))
    assert said == [[]] * 8
    for turn in range(tries):
        assert cache.read_entry(folder / f"{turn:032x}", files, cache.Trust(None)) == files
    assert len(list(folder.iterdir())) == tries


def test_f16_what_killed_processes_left_is_removed_a_day_later(folder):
    folder.mkdir()
    for name in (".new-1-old", ".old-1-old", ".new-2-young", "somebody's"):
        (folder / name / "part").mkdir(parents=True)
    (folder / ".new-link").symlink_to(folder / "somebody's")
    yesterday = time.time() - 2 * 86400
    for name in (".new-1-old", ".old-1-old", "somebody's"):
        os.utime(folder / name, (yesterday, yesterday))
    os.utime(folder / ".new-link", (yesterday, yesterday), follow_symlinks=False)
    compiler.cached(SMALL, "sm_80")
    assert {p.name for p in folder.iterdir() if len(p.name) < 32} == {".new-2-young", "somebody's"}
    assert (folder / "somebody's" / "part").is_dir()


def test_modes_follow_the_umask(folder):
    old = os.umask(0o022)
    try:
        compiler.cached(SMALL, "sm_80")
    finally:
        os.umask(old)
    entry, = folder.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o755 and {stat.S_IMODE(p.stat().st_mode) for p in entry.iterdir()} == {0o644}


def test_f23_c11_compile_errors_cross_process_borders():
    with pytest.raises(compiler.CompileError) as caught:
        compiler.compile_source("nonsense", "sm_80")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.log == caught.value.log and type(again) is compiler.CompileError


@pytest.mark.parametrize("target, hint", [("sm_130", "newer"), ("sm_199a", "newer"), ("sm_50", "older")])
def test_c17_an_unknown_target_says_which_nvrtc_is_needed(target, hint):
    with pytest.raises(compiler.CompileError, match=f"does not know {target} .*an? {hint} one does"):
        compiler.compile_source(SMALL, target)
