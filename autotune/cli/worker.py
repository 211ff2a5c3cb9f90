"""Tunes what a plan holds for the GPU at hand, beside any number of other workers on any number of hosts.

`autotune tune --storage STORAGE` makes the plan. Workers join and end at any time: Ctrl-C gives the problem back.
"""

from __future__ import annotations

import argparse

from .common import UsageError

SUMMARY = "help with a tune that is shared by many GPUs and hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_storage(parser, required=True)
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA index of the GPU to work on (default 0)")
    parser.add_argument("--linger", type=float, default=60.0, metavar="SECONDS",
                        help="how long to wait for work before ending (default 60)")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="compile threads (default: a core each but one)")
    parser.add_argument("--parent", type=int, default=None, help=argparse.SUPPRESS)  # ends with this process


def add_storage(parser: argparse.ArgumentParser, required: bool = False) -> None:
    parser.add_argument("--storage", metavar="STORAGE", required=required,
                        help="what the workers of a tune share: a folder on a disk that all of them see, or "
                             "postgresql://USER@HOST/DATABASE")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.linger < float("inf"):
        raise UsageError(f"--linger is {args.linger:g}; it must be a number of seconds of at least 0")
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"--threads is {args.threads}; it must be at least 1")
    from ..tuner.work import work
    from ..tuner.worker import end_with

    if args.parent is not None:
        end_with(args.parent)
    count = work(args.storage, args.device, args.linger, args.threads)
    print(f"{count} {'problem' if count == 1 else 'problems'} tuned")
    return 0
