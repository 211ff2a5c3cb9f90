"""What tests/conftest.py makes of marks, on tests of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOME = """
import pytest

def test_plain(): pass

def test_that_compiles():
    from autotune.cuda import compile
    compile.compile_source("", "sm_90")

def test_that_simulates():
    from autotune.simulator import compiler
    compiler.program("", ())

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.gpu
def test_gpu(): pass
"""


def outcomes(folder: Path, ring: str) -> dict[str, str]:
    """Outcome of each test that runs in `ring`, by name."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-c", TESTS.parent / "pyproject.toml", "-p", "no:cacheprovider",
                           "-p", "conftest", "-m", ring, "-rA", folder], cwd=folder, capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {words[1].rpartition("::")[2]: words[0] for words in lines if words and words[0] in ("PASSED", "FAILED", "ERROR")}
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.slow
def test_where_only_fast_tests_run_nothing_is_compiled(tmp_path):
    (tmp_path / "test_some.py").write_text(SOME)
    (tmp_path / "test_heavy.py").write_text("import pytest\npytestmark = pytest.mark.slow\nassert False, 'imported'\n")
    assert outcomes(tmp_path, "fast") == {"test_plain": "PASSED", "test_that_compiles": "FAILED", "test_that_simulates": "FAILED"}
    (tmp_path / "test_heavy.py").unlink()
    assert outcomes(tmp_path, "slow and not gpu") == {"test_slow": "PASSED"}
