"""Writes generated/: the source of every kind of problem in the database that ships. Needs no GPU.

With --check it writes nothing and says what differs from templates/ and tuning_db/; exit code 1 if anything does.
"""

from __future__ import annotations

import argparse

from .common import UsageError

SUMMARY = "write generated/ from templates/ and tuning_db/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")


def run(args: argparse.Namespace) -> int:
    from . import generated
    from ..database import view

    root = view.shipped_root()
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
