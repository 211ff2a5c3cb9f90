"""Checks kernels against float64, block by block, on random and hostile inputs. Exit code 1 if a result is wrong.

For each problem: the configuration that lookup chooses, and the default of every kernel that can serve it. On the GPU, or with
--simulate on the CPU, which also finds races, deadlocks and accesses out of bounds, on a small problem of the same kind.
"""

from __future__ import annotations

import argparse

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem
from .common import UsageError, add_gpu, add_problems, as_called, gpu_or_stand_in, needed_gpu, problems_of
from .source import chosen_config

SUMMARY = "check a problem's kernels on the GPU, or on the CPU"
SEEDS = 3  # of a simulation: copies that land at once, at the last moment, and in between


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problems(parser)
    parser.add_argument("--config", metavar="TEXT", help="check only this configuration")
    parser.add_argument("--seed", type=_seed, default=0, help="of the inputs (default 0)")
    parser.add_argument("--simulate", action="store_true",
                        help="run the kernels on the CPU, on small problems of the same kind; needs a C++ compiler, no GPU")
    add_gpu(parser)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an int of at least 0")
    return int(text)


def run(args: argparse.Namespace) -> int:
    problems = [problem.simplified() for problem in problems_of(args)]
    if args.gpu is not None and not args.simulate:
        raise UsageError("--gpu says whose kernels to simulate; without --simulate kernels run on the GPU at hand")
    gpu = gpu_or_stand_in(args.gpu)[0] if args.simulate else \
        needed_gpu("verify launches kernels (with --simulate it runs them on the CPU)")
    from ..check import verify

    problems = as_called(problems, gpu)
    work = [(problem, verify.configs(problem, gpu) if args.config is None else [chosen_config(problem, gpu, args.config)])
            for problem in problems]
    check = _simulated if args.simulate else verify.verify
    wrong = 0
    for problem, configs in work:
        print(problem)
        for config in configs:
            result = check(problem, config, gpu, args.seed)
            wrong += not result.ok
            print(f"  ok     {result.worst_ratio:.2f} of the allowed error  {config}" if result.ok else
                  f"  WRONG  {config}\n         {result.message}", flush=True)
    print(f"{wrong} of {sum(len(configs) for _, configs in work)} are wrong" if wrong else "all are correct")
    return 1 if wrong else 0


def _simulated(problem: Problem, config: Config, gpu: Gpu, seed: int):
    """`verify.verify` on the CPU. What the machine or its C++ compiler cannot do is an error, and no verdict on the kernel."""
    from .. import simulator
    from ..check.verify import Result

    small = simulator.shrunk(problem, config)
    verdict = simulator.verify(small, config, range(seed, seed + SEEDS))
    return Result(config, verdict.ok, verdict.worst_ratio, f"{small}: {verdict.message}")
