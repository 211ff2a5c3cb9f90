"""Times autotune beside other libraries: one process, the same inputs, alternating order, the same timing code.

Prints TFLOP/s and how many times as fast autotune is as the fastest of them. Every result is checked before it is timed.
Peers: sdpa-flash and sdpa-cudnn (torch's scaled_dot_product_attention). A problem that no peer can compute is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import UsageError, add_problems, needed_gpu, problems_of

SUMMARY = "time problems beside other libraries"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problems(parser)
    parser.add_argument("--against", metavar="PEER[,PEER]", required=True, help="sdpa-flash, sdpa-cudnn or both")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the result to this YAML file, such as "
                        "benchmarks/results/forward-mma-h200.yaml")


def run(args: argparse.Namespace) -> int:
    from .. import bench

    problems = problems_of(args.problem, args.model)
    peers = bench.peers_of(args.against)
    if args.out and not args.out.parent.is_dir():
        raise UsageError(f"--out {args.out}: the folder {args.out.parent} does not exist")
    gpu = needed_gpu("bench times kernels")
    report = bench.run(problems, peers, gpu, progress=lambda text: print(text, flush=True))
    print(bench.show(report))
    if args.out:
        bench.write(report, args.out)
        print(f"written to {args.out}")
    return 0
