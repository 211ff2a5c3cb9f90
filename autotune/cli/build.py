"""Writes generated/: the source of every kind of problem in the database that ships. Needs no GPU.

With --check it writes nothing and says what differs from templates/ and tuning_db/; exit code 1 if anything does. With
--cubins DIR it compiles the shipped records into DIR instead.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import UsageError

SUMMARY = "write generated/ from templates/ and tuning_db/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    parser.add_argument("--cubins", type=Path, metavar="DIR", help="instead, compile the shipped records into DIR, the cache "
                        "folder of machines without a compiler (AUTOTUNE_CACHE=DIR)")


def run(args: argparse.Namespace) -> int:
    from . import generated
    from ..database import view

    root = view.shipped_root()
    if args.cubins is not None:
        from . import cubins

        print(f"{cubins.write(args.cubins, root)} cubins in {args.cubins}")
        return 0
    if root.name != "tuning_db":
        raise UsageError(f"build writes a checkout's generated/, but autotune is installed in {root.parent}; "
                         "run it from a checkout")
    folder = root.parent / "generated"
    if args.check:
        differences = generated.check(folder, root)
        for difference in differences:
            print(difference)
        print(f"{len(differences)} differences; `autotune build` mends them" if differences else "generated/ is up to date")
        return 1 if differences else 0
    written = generated.write(folder, root)
    for path in written:
        print(path)
    print(f"{len(written)} files written" if written else "generated/ is up to date, so nothing was written")
    return 0
