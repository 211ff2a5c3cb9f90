"""Times problems on the GPU: how fast, how near to the roofline, how much memory, which kernel ran; beside other libraries.

All run in one process on the same inputs by turns, timed by the same code, and each result is checked before it is timed.
Decode steps also stand beside a kernel that only reads their cache, which none can beat.
Peers: sdpa-flash and sdpa-cudnn (torch's scaled_dot_product_attention), fa3 and fa4 (FlashAttention-3 and -4). Without
--against, those that are installed take part; with it, a problem that none of the named can compute is left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .common import UsageError, add_backward, add_decode, add_problems, as_called, needed_gpu, problems_of, workload_of

SUMMARY = "time problems, beside other libraries"
PLOT_FORMATS = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problems(parser)
    add_decode(parser)
    add_backward(parser)
    parser.add_argument("--against", metavar="PEER[,PEER]", help="these of sdpa-flash, sdpa-cudnn, fa3, fa4; or none")
    parser.add_argument("--out", metavar="FILE", type=Path, help="also write the result to this YAML file, such as "
                        "benchmarks/results/forward-h200.yaml")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw the result; .png, .svg or .pdf (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    from ..compare import comparison, report
    from ..compare.peers import installed

    problems, workload = problems_of(args, args.decode, args.backward), workload_of(args)
    chosen = None if args.against in (None, "none") else comparison.peers_of(args.against)
    _check_files(args)
    gpu = needed_gpu("bench times kernels")
    problems = as_called(problems, gpu)
    peers = chosen if chosen is not None else [] if args.against else installed()
    found = comparison.run(problems, peers, gpu, lambda text: print(text, flush=True), workload and workload.summary,
                           alone=chosen is None)
    print(report.show(found, gpu))
    if not peers and not args.against:
        print("\nno peer is installed here, so ours stands alone; `pip install torch` brings sdpa-flash and sdpa-cudnn")
    if args.out:
        report.write(found, args.out)
        print(f"written to {args.out}")
    if args.plot:
        from ..compare.plot import bars_of, plot

        plot(bars_of(found), f"{gpu.title}, {found.date[:10]}", args.plot)
        print(f"drawn in {args.plot}")
    return 1 if found.failed else 0


def _check_files(args: argparse.Namespace) -> None:
    """Raises `UsageError` for files that could not be written after minutes of work."""
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: the folder {path.parent} does not exist")
    if args.plot:
        from ..compare.plot import require

        if args.plot.suffix not in PLOT_FORMATS:
            raise UsageError(f"--plot {args.plot}: its name must end in {', '.join(PLOT_FORMATS)}")
        require()
