"""Looks into the tuning database: your own folder first, then the one that ships. Writes nothing.

list   one line for each record
show   everything about the records of one problem
check  whether every record and cover is legal and, as far as this NVRTC can tell, current;
       exit code 1 if one is stale, 2 if a file or an entry cannot be used
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Iterable

from ..core.gpu import catalogue
from ..core.problem import Problem
from ..core.reading import printable
from ..core.tables import microseconds, table, tflops
from .common import UsageError, add_problem

SUMMARY = "list, show or check tuning records"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    listing = actions.add_parser("list", help="one line for each record")
    listing.add_argument("--gpu", metavar="NAME", help="only records of this GPU")
    add_problem(actions.add_parser("show", help="everything about the records of one problem"))
    checking = actions.add_parser("check", help="whether every entry is legal and current")
    checking.add_argument("path", nargs="*", type=Path, help="database files or folders (default: the whole search path)")


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "show": _show, "check": _check}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from ..database import view

    rows = []
    for path, record in view.all_records():
        if args.gpu in (None, record.gpu.name):
            rows.append((record.problem, record.gpu.name, record.evidence, microseconds(record.time_us),
                         tflops(record.problem, record.time_us), record.config.kernel, _whose(path)))
    if rows:
        print(table(("problem", "gpu", "evidence", "us", "TFLOP/s", "kernel", "database"), rows))
    elif args.gpu is not None and args.gpu not in catalogue():
        names = sorted({record.gpu.name for _, record in view.all_records()} | set(catalogue()))
        raise UsageError(f"no record is of a GPU called {args.gpu!r}, and none is known; known are {', '.join(names)}")
    else:
        print("no records" + (f" of {args.gpu}" if args.gpu else "") + "; `autotune tune --model llama-3-8b` makes some")
    return _complain(view.check(_files([]), compiled=False))


def _show(args: argparse.Namespace) -> int:
    import yaml

    from ..database import view

    problem = Problem.parse(args.problem)
    found = [(path, record) for path, record in view.all_records() if record.problem == problem]
    for path, record in found:
        print(printable(f"# {path}"))
        print(yaml.safe_dump({problem.text: record.as_entry()}, sort_keys=False, default_flow_style=None, width=120))
    if not found:
        makes = f"`autotune tune --problem {problem}` makes one, " if problem.flops else ""
        raise UsageError(f"no record of {problem}; `autotune db list` shows what there is, {makes}"
                         f"`autotune lookup {problem}` says what serves it")
    return 0


def _check(args: argparse.Namespace) -> int:
    from ..database import cover, view
    from ..cuda.compile import CompilerMissing

    files, covers = _files(args.path), _covers(args.path)
    if unusable := view.check(files, compiled=False) + cover.check(covers, compiled=False):
        return _complain(unusable)
    count = sum(len(view.read(path).records) for path in files)
    try:
        stale, old, verdict = view.check(files), cover.check(covers), "all legal and current"
    except CompilerMissing as error:
        stale, old, verdict = [], [], f"all legal; whether they are current was not compared, because {error}"
    for sentence in (*stale, *old):
        print(printable(sentence))
    print(f"{count} records in {len(files)} files: " + (f"{len(stale)} need tuning again" if stale else verdict))
    if covers:
        print(f"{len(covers)} covers: " + (f"{len(old)} need measuring again" if old else verdict))
    return 1 if stale or old else 0


def _files(given: list[Path]) -> list[Path]:
    from ..database import view

    if not given:
        return [path for root in view.search_path() for path in view.paths(root)]
    for path in given:
        if not path.exists():
            raise UsageError(f"{path} does not exist; name a database file or a folder such as {view.shipped_root()}")
        if path.is_dir() and not view.paths(path):
            raise UsageError(f"{path} holds no database file (GPU/OP.yaml); name one, or a folder such as "
                             f"{view.shipped_root()}")
    return [file for path in given for file in (view.paths(path) if path.is_dir() else [path])]


def _covers(given: list[Path]) -> list[Path]:
    """Those of the folders that are given, or of the whole search path."""
    from ..database import cover, view

    folders = [path for path in given if path.is_dir()] if given else view.search_path()
    return [path for folder in folders for path in cover.paths(folder)]


def _complain(reasons: Iterable[str]) -> int:
    """Says on stderr what cannot be used; 2 if there is anything, else 0."""
    code = 0
    for reason in reasons:
        print(printable(f"autotune db: {reason}"), file=sys.stderr)
        code = 2
    return code


def _whose(path: Path) -> str:
    from ..database import view

    return "shipped" if path.is_relative_to(view.shipped_root()) else "user"
