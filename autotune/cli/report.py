"""What is known of a GPU: coverage, times beside roofline and peers, how searches converged, which parameters matter, failures.

A table, or with --html one page that any browser shows without a server.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..core.gpu import resolve
from ..core.tables import microseconds, table
from .common import UsageError, add_gpu
from .why import add_trials

SUMMARY = "everything known of a GPU, as a table or an HTML page"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_gpu(parser)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page instead of a table")
    parser.add_argument("--bench", metavar="FILE", type=Path, action="append", default=[],
                        help="a result file of `autotune bench --out FILE`, for the peers' times; may stand several times")
    add_trials(parser)


def run(args: argparse.Namespace) -> int:
    gpu = resolve(args.gpu)
    from ..tuner.report import rows_of

    rows, notes = rows_of(gpu, args.trials, args.bench)
    if not rows:
        raise UsageError(f"nothing is recorded for {gpu.title}; `autotune tune` records")
    if args.html is None:
        cells = [(row.problem, microseconds(row.time_us), f"{row.roofline_us / row.time_us:.0%}", row.evidence) for row in rows]
        print(table(("problem", "us", "of roofline", "evidence"), cells))
        return 0
    from ..tuner.page import page

    try:
        args.html.write_text(page(f"autotune on {gpu.title}", rows, notes), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{args.html} cannot be written ({error.strerror}); name a file in a folder that can") from None
    print(f"{args.html}: {len(rows)} problems")
    return 0
