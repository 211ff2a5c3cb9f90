"""How fast are gradients beside other libraries'? The problems of backward-h200.yaml, through torch's autograd, in parts.

    python benchmarks/backward.py [--seconds S] [--part I/N] [--against PEER,...] [--out FILE]

A part adds its rows to the result file, whose summary is of all rows: geomean, worst and the groups of the workload are the best
peer's time / ours; deterministic_cost is our time with the same bits every time / without, at the worst. No row begins after
--seconds; the same command goes on with those that the file lacks. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import _result
import yaml

import autotune
from autotune.compare import comparison, report
from autotune.compare.peers import installed
from autotune.core.gpu import Gpu
from autotune.core.problem import Problem
from autotune.models.lists import Workload, read_workload

WORKLOAD = Path(__file__).parent / "backward-h200.yaml"
SECONDS = 540.0  # of one command on a lent GPU


def main() -> int:
    parser = _result.parser(__doc__, "backward-h200.yaml")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"begin no row after so long ({SECONDS:g})")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th row, beginning with the I-th")
    parser.add_argument("--against", metavar="PEER[,PEER]", help="these peers, instead of those that are installed")
    parser.add_argument("--dry-run", action="store_true", help="print the rows that would be measured, and with which config")
    options = parser.parse_args()
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    workload, known = read_workload(WORKLOAD), read_rows(options.out)
    todo = [problem for problem in rows_of(workload, options.part) if problem.text not in known]
    if options.dry_run:
        for problem in todo:
            print(problem, autotune.lookup(problem, "nvidia-h200").config.text)
        return 0
    return measure(todo, workload, known, _result.gpu_at_hand(), options)


def rows_of(workload: Workload, part: str) -> list[Problem]:
    first, count = map(int, part.split("/"))
    every = list(dict.fromkeys(problem for group in workload.groups.values() for problem in group))
    return every[first - 1::count]


def read_rows(path: Path) -> dict[str, dict]:
    """The rows of a result file, by the text of their problem."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))["problems"] if path.is_file() else {}


def measure(todo: list[Problem], workload: Workload, known: dict[str, dict], gpu: Gpu,
            options: argparse.Namespace) -> int:
    """Adds rows to the result file, one at a time, so that what is measured stays."""
    peers = comparison.peers_of(options.against) if options.against else installed()
    began, failed = time.monotonic(), 0
    for problem in todo:
        if time.monotonic() - began > options.seconds:
            break
        found = comparison.run([problem], peers, gpu, lambda text: print(text, flush=True), alone=True)
        data, failed = report.as_data(found), failed + len(found.failed)
        known |= data["problems"]
        data = {"summary": summary(known, workload), "gpu": data["gpu"], "date": data["date"], "command": _result.command(),
                "versions": data["versions"], "conditions": data["conditions"], "problems": known}
        options.out.write_text(report.HEADER + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=130))
    left = len([problem for problem in todo if problem.text not in known])
    print(f"{summary(known, workload)}; {left} rows left, {failed} of ours failed, in {options.out}")
    return 1 if failed else 0


def summary(rows: dict[str, dict], workload: Workload) -> dict[str, float]:
    ratios = {text: row["ratio"] for text, row in rows.items() if "ratio" in row}
    facts = {"geomean": _geomean(ratios.values()), "worst": min(ratios.values(), default=None), "rows": len(rows)}
    for name, problems in workload.summary.items():
        facts[name] = _geomean([ratios[problem.text] for problem in problems if problem.text in ratios])
    times = {text: row[comparison.OURS]["time_us"] for text, row in rows.items()}
    costs = [time_us / times[default] for text, time_us in times.items()
             if (default := replace(Problem.parse(text), deterministic=False).text) in times and default != text]
    facts["deterministic_cost"] = max(costs, default=None)
    return {name: value if value is None or name == "rows" else round(value, 4) for name, value in facts.items()}


def _geomean(ratios) -> float | None:
    ratios = list(ratios)
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


if __name__ == "__main__":
    sys.exit(main())
