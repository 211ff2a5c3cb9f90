"""benchmarks/gpu_tests.py: what it makes of a report that pytest wrote. Running the tests it is for needs a GPU."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_tests  # noqa: E402

pytestmark = pytest.mark.slow

TESTS = """
import pytest

def test_good(): pass

@pytest.fixture
def broken(): raise OSError("no device")

def test_error(broken): pass

def test_bad(): assert 1 == 2, "one is\\n not two"

@pytest.mark.skip(reason="it spills")
def test_skipped(): pass
"""


def test_it_counts_and_names_what_a_report_says(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "test_it.py"],
                   cwd=tmp_path, capture_output=True, check=False)
    rows, reasons = {"test_it.py": Counter(passed=2)}, {"skipped": {}, "failed": {}}
    gpu_tests.read(report, rows, reasons)
    assert rows == {"test_it.py": {"passed": 3, "skipped": 1, "failed": 2}}
    assert reasons["skipped"] == {"test_it.py::test_skipped": "it spills"}
    assert set(reasons["failed"]) == {"test_it.py::test_bad", "test_it.py::test_error"}
    assert "one is not two" in reasons["failed"]["test_it.py::test_bad"]


def test_the_files_that_run_alone_are_there():
    assert all((Path(__file__).parents[1] / f"{name}.py").is_file() for name in gpu_tests.ALONE)
