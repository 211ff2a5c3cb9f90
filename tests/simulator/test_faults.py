"""What the machine cannot do is no verdict on a kernel, and the simulator's programs survive odd folders
(F10, F12, F18, F19, C6 to C9)."""

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile

import pytest
import simulator_probes
from strangers import NOBODY, needs_root

from autotune import simulator
from autotune.cli.main import main
from autotune.core.problem import Problem
from autotune.cuda import cache
from autotune.kernels import KERNELS
from autotune.simulator import compiler, job
from autotune.simulator.compiler import HostFault, NoPlace

pytestmark = pytest.mark.slow

TEXT = "forward-fp32-b1-h1x1-q20-k40-d16"
PROBLEM = Problem.parse(TEXT)
CONFIG = KERNELS["forward_simt"].default(PROBLEM, __import__("autotune.core.gpu", fromlist=["by_name"]).by_name("nvidia-h200"))


def right() -> bool:
    return simulator.verify(PROBLEM, CONFIG, (0,), ("random",)).ok


@pytest.fixture(scope="module", autouse=True)
def runtime_is_there():
    """Compiled once: the tests below copy it into their own cache folders."""
    assert right()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of this test's own, with the runtime in it."""
    ready = cache.cache_dir() / "simulator" / f"runtime-{compiler._runtime_key()}"
    place = tmp_path / "cache"
    shutil.copytree(ready, place / "simulator" / ready.name)
    monkeypatch.setenv("AUTOTUNE_CACHE", str(place))
    cache._told.clear()
    return place / "simulator"


@pytest.mark.parametrize("name", ["my tmp", "a\nb", "it's \"quoted\"", "größe", "\udcff", "a\tb",
                                  "-rf", "$HOME", "%s%n"], ids=ascii)
def test_c6_f10_f21_temporary_folders_of_any_name(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    assert right() and os.listdir(tmp_path / name) == []


@pytest.mark.parametrize("name", ["my cache", "a\nb", "it's", "größe", "\udcff"], ids=ascii)
def test_c6_cache_folders_of_any_name(tmp_path, monkeypatch, folder, name):
    os.rename(folder.parent, tmp_path / name)
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / name))
    assert right() and len(os.listdir(tmp_path / name / "simulator")) >= 2


def test_c9_a_program_that_lost_its_right_to_be_executed_is_made_again(folder):
    source = simulator_probes.source("p.out[0] = 1;")
    path = compiler.program(source, ("probe",))
    for mode in (0o644, 0o444):
        path.chmod(mode)
        assert compiler.program(source, ("probe",)) == path and path.stat().st_mode & stat.S_IXUSR


def test_c8_the_key_holds_machine_and_compiler(monkeypatch):
    keys = set()
    for machine, version in (("x86_64", "12"), ("aarch64", "12"), ("x86_64", "13")):
        monkeypatch.setattr(compiler.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(compiler, "compiler_version", lambda version=version: version)
        compiler._runtime_key.cache_clear()
        keys.add(compiler._runtime_key())
    compiler._runtime_key.cache_clear()
    assert len(keys) == 3


def test_c7_a_folder_mounted_noexec_is_passed_over(folder, monkeypatch):
    """Programs go to a temporary folder; where that has the same fault, a sentence."""
    plain = os.access
    monkeypatch.setattr(compiler.os, "access",
                        lambda path, mode: mode != os.X_OK or str(folder) not in str(path) and plain(path, mode))
    with pytest.warns(cache.CacheWarning, match="temporary folder: .*cannot be executed"):
        assert right()
    monkeypatch.setattr(compiler.os, "access", lambda path, mode: mode != os.X_OK)
    with pytest.raises(NoPlace, match="cannot be executed.*AUTOTUNE_CACHE.*TMPDIR"):
        right()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_c7_on_a_real_mount(tmp_path, monkeypatch):
    place = tmp_path / "noexec"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "noexec,size=20m,mode=755", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        cache._told.clear()
        monkeypatch.setenv("AUTOTUNE_CACHE", str(place))
        with pytest.warns(cache.CacheWarning, match="mounted noexec"):
            assert right()
    finally:
        subprocess.run(["umount", "-l", str(place)])


@pytest.mark.parametrize("place", ["/proc/cache", "/dev/null/cache"])
def test_a_cache_that_cannot_be_written_is_passed_over(monkeypatch, place):
    cache._told.clear()
    monkeypatch.setenv("AUTOTUNE_CACHE", place)
    with pytest.warns(cache.CacheWarning):
        assert right()


@needs_root
@pytest.mark.parametrize("spoil", ["world", "owner", "entry"])
def test_f12_what_a_stranger_planted_is_not_executed(folder, tmp_path, monkeypatch, spoil):
    source = simulator_probes.source("p.out[0] = 1;")
    path = compiler.program(source, ("probe",))
    mark = tmp_path / "executed"
    files = {"kernel": f"#!/bin/sh\ntouch {mark}\n".encode(), "kernel.cpp": (path.parent / "kernel.cpp").read_bytes()}
    for name, data in files.items():
        (path.parent / name).write_bytes(data)
    (path.parent / cache.SUM).write_bytes(cache._sum(path.parent.name, files))  # whoever can write can also sum up
    if spoil == "world":
        folder.parent.chmod(0o777)
    elif spoil == "owner":
        os.chown(folder, NOBODY, NOBODY)
    else:
        os.chown(path.parent, NOBODY, NOBODY)
    with pytest.warns(cache.CacheWarning, match="everybody may write|another user"):
        executable = compiler.program(source, ("probe",))
    subprocess.run([executable], stdin=subprocess.DEVNULL)
    assert not mark.exists() and executable.read_bytes()[:4] == b"\x7fELF"


def test_f18_a_full_temporary_folder_is_one_sentence(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostFault, match=r"no place for the arrays .*No space left.*TMPDIR"):
        right()
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(HostFault, match=r"no place for the arrays"):
        right()


@pytest.mark.parametrize("text, words", [("#!/nonexistent/interpreter\n", "cannot be executed"), ("\x7fELF", "cannot be "
                                                                                                             "executed"),
                                         ("#!/bin/sh\nkill -9 $$\n", "failed"), ("#!/bin/sh\nexit 1\n", "failed"),
                                         ("#!/bin/sh\necho 'cc1plus: error: \x1b[31m no memory' >&2; exit 1\n", "failed|refused"),
                                         ("#!/bin/sh\necho 'kernel.cpp:1:2: fatal error: error writing to /tmp/x: No space "
                                          "left on device' >&2; exit 1\n",
                                          "cannot write into")])
def test_f10_f19_a_compiler_that_fails_is_no_wrong_kernel(tmp_path, monkeypatch, capsys, text, words):
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "g++"
    fake.write_text(text)
    fake.chmod(0o755)
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compiler", lambda: (str(fake),))
    for cached in (compiler._runtime_key, compiler.compiler_version):
        cached.cache_clear()
    try:
        with pytest.raises((HostFault, compiler.CompileError), match=words) as caught:
            right()
        assert str(caught.value).isprintable()
        assert main(["verify", "--simulate", TEXT, "--gpu", "nvidia-h200"]) == 2
        said = capsys.readouterr()
        assert "WRONG" not in said.out and len(said.err.strip().splitlines()) <= 3
    finally:
        for cached in (compiler._runtime_key, compiler.compiler_version):
            cached.cache_clear()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU, signal.SIGHUP])
def test_f10_a_simulation_that_is_stopped_is_no_wrong_kernel(tmp_path, number):
    program = tmp_path / "kernel"
    program.write_text(f"#!/bin/sh\necho ready\nkill -{int(number)} $$\n")
    program.chmod(0o755)
    with pytest.raises(HostFault, match=f"ended by signal {int(number)}"):
        job._run(program, tmp_path, "", 30)


@pytest.mark.parametrize("body", ["exit 3", "kill -11 $$", "echo nonsense; exit 1", "printf 'machine\\t0\\t0\\tblock 0: no "
                                                                                    "memory\\ndone\\n'"])
def test_f10_a_crash_before_the_kernel_began_is_no_wrong_kernel(tmp_path, body):
    program = tmp_path / "kernel"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    with pytest.raises(HostFault, match="could not be run"):
        job._run(program, tmp_path, "", 30)


def test_a_crash_of_the_kernel_stays_a_finding(tmp_path):
    program = tmp_path / "kernel"
    program.write_text("#!/bin/sh\necho ready\nkill -11 $$\n")
    program.chmod(0o755)
    (finding,), _ = job._run(program, tmp_path, "", 30)
    assert finding.kind == "crash" and "signal 11" in finding.message


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_NOFILE", "RLIMIT_FSIZE"])
def test_f10_f25_low_limits_are_sentences(limit):
    low = {"RLIMIT_AS": 64 << 20, "RLIMIT_NOFILE": 4, "RLIMIT_FSIZE": 4096}[limit]
    code = (f"import resource, signal, sys\nfrom test_faults import right, HostFault\nright()\nsignal.signal(signal.SIGXFSZ, "
            f"signal.SIG_IGN)\n"
            "from autotune.simulator import job\nplain = job.subprocess.run\n"
            f"limit = lambda: resource.setrlimit(resource.{limit}, ({low}, {low}))\n"
            + ("job.subprocess.run = lambda *given, **named: plain(*given, **named, "
               "preexec_fn=limit)\n" if limit == "RLIMIT_AS" else "limit()\n")
            + "try: print('right', right())\nexcept HostFault as fault: print('sentence', fault)\n")
    here = os.path.dirname(__file__)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((os.path.dirname(os.path.dirname(here)), here, os.path.dirname(here)))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.stdout.startswith("sentence") and len(done.stdout.splitlines()) == 1, done.stdout + done.stderr
    assert resource.getrlimit(getattr(resource, limit))[0] != low
