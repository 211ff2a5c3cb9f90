"""Commands in homes, folders and terminals that lack something: they work, or say in one sentence what helps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROBLEM = "forward-bf16-b1-h32x8-q8192-k8192-d128-causal"
TINY = "forward-fp32-b1-h1x1-q20-k40-d16"


def command(words, tmp_path, redirection="", **environment):
    """`python -m autotune` with a database and a cache of this test's own; `environment` has the last word (None: unset)."""
    folders = {"AUTOTUNE_DB": str(tmp_path / "db"), "AUTOTUNE_CACHE": str(tmp_path / "cache")}
    given = {**os.environ, "PYTHONPATH": str(ROOT), **folders, **environment}
    return subprocess.run(f"{sys.executable} -m autotune {words} {redirection}", shell=True, cwd=ROOT, timeout=120,
                          capture_output=True, text=True, errors="surrogateescape",
                          env={name: value for name, value in given.items() if value is not None})


WITHOUT_COMPILER = {"PATH": "/nonexistent"}  # so that nothing is executed on the simulator, which takes seconds


def no_traceback(done):
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/home"])
def test_f3_c5_a_home_that_cannot_be_written(tmp_path, home):
    done = no_traceback(command(f"lookup {PROBLEM} --gpu nvidia-h200", tmp_path, HOME=home))
    assert done.returncode == 0 and "exact, measured" in done.stdout
    done = no_traceback(command(f"source {PROBLEM} --gpu nvidia-h200 --resources", tmp_path, HOME=home))
    assert done.returncode == 0 and "registers" in done.stdout


def test_f3_c5_without_a_folder_for_cupy_the_sentence_names_the_variable(tmp_path):
    bare = dict(HOME="/dev/null/home", AUTOTUNE_DB=None, AUTOTUNE_CACHE=None, CUPY_CACHE_DIR=None)
    assert no_traceback(command(f"lookup {PROBLEM} --gpu nvidia-h200", tmp_path, **bare)).returncode == 0  # needs no CuPy
    done = no_traceback(command(f"source {PROBLEM} --gpu nvidia-h200 --resources", tmp_path, **bare))
    assert done.returncode == 2 and "CUPY_CACHE_DIR" in done.stderr and len(done.stderr.splitlines()) == 1
    done = no_traceback(command("doctor", tmp_path, **bare))
    assert re.search("FAIL +nvrtc .*CUPY_CACHE_DIR", done.stdout) and "the check itself failed" not in done.stdout


@pytest.mark.parametrize("words", ["doctor", "db list"])
@pytest.mark.parametrize("terminal, folder", [("ascii", "größe"), ("latin-1", "größe-大"), ("utf-8", os.fsdecode(b"gr\xf6sse"))])
def test_f21_c14_a_terminal_that_lacks_letters(tmp_path, terminal, folder, words):
    done = no_traceback(command(words, tmp_path, PYTHONIOENCODING=terminal, AUTOTUNE_DB=str(tmp_path / folder)))
    assert done.returncode == 0
    if words == "doctor":
        assert re.search(r"gr(\\xf6|\\udcf6|\udcf6|ö)", done.stdout), "the folder is named"


def test_c15_a_current_folder_that_is_gone(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    tune = f"{sys.executable} -m autotune tune --problem {TINY} --gpu nvidia-h200"
    done = subprocess.run(f"/bin/rmdir {folder}; {tune}", shell=True, cwd=folder, timeout=120, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "AUTOTUNE_DB": str(tmp_path / "db"), **WITHOUT_COMPILER})
    assert no_traceback(done).returncode == 0
    assert TINY in done.stdout and "Try next:" in done.stdout
    assert (tmp_path / "db/nvidia-h200/forward.yaml").is_file()


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_f29_a_standard_error_that_takes_nothing(tmp_path, redirection):
    done = command(f"tune --problem {TINY} --gpu nvidia-h200", tmp_path, redirection, **WITHOUT_COMPILER)
    assert done.returncode == 0 and TINY in done.stdout
    assert (tmp_path / "db/nvidia-h200/forward.yaml").is_file()
    assert command("lookup x", tmp_path, redirection).returncode == 2


def test_f17_what_the_simulator_needs_for_bf16_is_a_dependency():
    project = (ROOT / "pyproject.toml").read_text()
    assert '"ml_dtypes' in project.partition("dependencies = [")[2].partition("]")[0]


HELD = """
import os
import signal

from autotune.core.imports import interrupts_held

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
try:
    with interrupts_held():
        signal.signal(signal.SIGINT, lambda *_: os._exit(4))  # as NVRTC does
        os.kill(os.getpid(), signal.SIGINT)
        print("the end of the block")
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("then the interrupt")
"""


def test_f24_an_interrupt_waits_for_the_first_compile():
    """NVRTC's front end installs a handler that ends the process with exit code 4, in the first 50 ms of its first compile."""
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["the end of the block", "then the interrupt"]), done.stderr


def test_f26_that_a_forked_child_may_hang_in_nvrtc_is_said():
    text = " ".join((ROOT / "docs/faq.md").read_text().split())
    assert "spawn" in text and "before the fork" in text
