"""The tests that need a GPU, and what became of each: among them every wrapper of templates/lib/ptx/ against its twin, and the
simulator's problems, configs and seeds against the simulator.

    python benchmarks/gpu_tests.py [--workers N] [--out FILE]

Takes two minutes with 6 workers (pytest-xdist). Exit code 1 if a test fails or none ran.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

import _result


ROOT = Path(__file__).parent.parent
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
ALONE = ("compare/test_bench", "cli/test_cli", "repository/test_docs", "device/test_runtime_gpu", "timing/test_timing",
         "tuner/test_tuner_gpu")  # they time, tune or count


def main() -> int:
    parser = _result.parser(__doc__, "gpu-tests-h200.yaml")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side (1); more need pytest-xdist")
    options = parser.parse_args()
    gpu = _result.gpu_at_hand()
    alone = [f"tests/{name}.py" for name in ALONE]
    rows: dict[str, Counter] = {}
    reasons: dict[str, dict[str, str]] = {SKIPPED: {}, FAILED: {}}
    codes = []
    for arguments in (["tests", *(f"--ignore={file}" for file in alone), *side_by_side(options.workers)], alone):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            codes.append(subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider",
                                         f"--junitxml={report}", *arguments], cwd=ROOT).returncode)
            if report.exists():
                read(report, rows, reasons)
    total = sum(rows.values(), Counter())
    summary = {"tests": total.total(), **{name: total[name] for name in (PASSED, SKIPPED, FAILED)}}
    facts = {"files": {name: dict(row) for name, row in sorted(rows.items())}, **reasons}
    _result.write(options.out, gpu, summary, facts, default_flow_style=False)
    return 0 if not any(codes) and total[PASSED] else 1


def side_by_side(workers: int) -> list[str]:
    """What makes pytest run tests in that many processes."""
    return ["-n", str(workers)] if workers > 1 else []


def read(report: Path, rows: dict[str, Counter], reasons: dict[str, dict[str, str]]) -> None:
    """Counts the passed, skipped and failed tests of each file of a report into `rows`, with reasons of the last two kinds."""
    for case in xml.parse(report).iter("testcase"):
        said = next((child for child in case if child.tag in ("skipped", "failure", "error")), None)
        outcome = PASSED if said is None else SKIPPED if said.tag == "skipped" else FAILED
        file = (case.get("classname") or case.get("name", "")).replace(".", "/") + ".py"
        rows.setdefault(file, Counter())[outcome] += 1
        if said is not None:
            reasons[outcome][f"{file}::{case.get('name')}"] = re.sub(r"\s+", " ", said.get("message") or "")[:200]


if __name__ == "__main__":
    sys.exit(main())
