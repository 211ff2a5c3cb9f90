"""Checks kernels on the GPU against float64, block by block, on random and hostile inputs. Exit code 1 if a result is wrong.

For each problem: the configuration that lookup chooses, and the default of every kernel that can serve it.
"""

from __future__ import annotations

import argparse

from .common import add_problems, needed_gpu, problems_of
from .source import chosen_config

SUMMARY = "check a problem's kernels on the GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problems(parser)
    parser.add_argument("--config", metavar="TEXT", help="check only this configuration")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")


def run(args: argparse.Namespace) -> int:
    problems = [problem.simplified() for problem in problems_of(args)]
    gpu = needed_gpu("verify launches kernels")
    from .. import verify

    work = [(problem, [chosen_config(problem, gpu, args.config)] if args.config else verify.configs(problem, gpu))
            for problem in problems]
    wrong = 0
    for problem, configs in work:
        print(problem)
        for config in configs:
            result = verify.verify(problem, config, gpu, args.seed)
            wrong += not result.ok
            print(f"  ok     {result.worst_ratio:.2f} of the allowed error  {config}" if result.ok else
                  f"  WRONG  {config}\n         {result.message}", flush=True)
    print(f"{wrong} of {sum(len(configs) for _, configs in work)} are wrong" if wrong else "all are correct")
    return 1 if wrong else 0
