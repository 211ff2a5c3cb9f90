"""Finds the fastest correct configuration for each problem and records it. What was measured before is not measured again.

Without a GPU it compiles and ranks the legal configurations for a GPU of the catalogue by an estimate and records them as
predicted. Ctrl-C keeps what was measured; the same command goes on from there. With --gpus or --storage many GPUs and hosts
share the work (`autotune worker`).
"""

from __future__ import annotations

import argparse
import math
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

from ..core.gpu import Gpu
from ..core.imports import interrupts_held
from ..core.problem import EXAMPLE
from ..core.tables import microseconds, table, tflops
from . import derived
from .common import (UsageError, add_backward, add_decode, add_gpu, add_lists, as_called, gpu_or_stand_in, models_of, problems_of,
                     workload_of)
from .worker import add_storage

SUMMARY = "find and record the best configuration of problems or of a whole model"
EFFORTS = ("instant", "quick", "full")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    add_lists(what)
    what.add_argument("--problem", metavar="TEXT", action="append",
                      help=f"one problem, such as {EXAMPLE}; may stand several times")
    add_decode(parser)
    add_backward(parser)
    add_gpu(parser)
    parser.add_argument("--dry-run", action="store_true",
                        help="print the layers that a model comes down to, what is left out, and the problems; tune nothing")
    parser.add_argument("--effort", choices=EFFORTS, default="quick",
                        help="instant: a final between the few that should be fastest, half a second each; quick: at most a "
                        "minute for "
                             "each problem; full: up to a quarter of an hour")
    parser.add_argument("--cover", action="store_true",
                        help="not these problems but covers of what they need, a model's decode steps with its prompts: for each "
                        "head dim, mask and source of keys a few configs on a grid of problems, so that lookups of any sizes "
                        "rest on times; ten seconds each. Covers that the database has are measured again where sources have "
                        "changed")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="with --cover: every N-th cover, beginning with the I-th "
                        "(1/1)")
    parser.add_argument("--seconds", type=float, default=math.inf,
                        help="with --cover: begin no cover after so long; the same command goes on from there")
    parser.add_argument("--gpus", metavar="LIST",
                        help="GPUs of this machine to use, a worker each: all, or CUDA indices such as 0,1")
    add_storage(parser)
    parser.add_argument("--db", choices=("user", "checkout"), default="user",
                        help="where winners are recorded: your own database, or this checkout's tuning_db/ (for maintainers)")


def run(args: argparse.Namespace) -> int:
    models = models_of(args)
    problems = list(dict.fromkeys(problem.simplified() for problem in problems_of(args, args.decode, args.backward, models)))
    if args.cover and not (args.decode or args.backward):
        problems += [problem for model in models for problem in model.decode_problems]
    for model in models:
        print(derived.model_text(model), end="\n\n")
    if args.dry_run:
        if args.workload:
            print(derived.workload_text(workload_of(args)), end="\n\n")
        print(derived.problems_text(problems))
        return 0
    with interrupts_held():  # numpy's threads must not take a Ctrl-C that NVRTC's first compile would make a crash
        import numpy  # noqa: F401
    shared = bool(args.storage or args.gpus)
    gpu, at_hand = gpu_or_stand_in(args.gpu)
    if shared and args.gpu is None and not at_hand:
        raise UsageError("no GPU is here, so say for which one the workers are to tune: --gpu NAME (`autotune gpus` lists them)")
    problems = as_called(problems, gpu)
    from ..database import view
    from .. import tuner

    root = view.user_root() if args.db == "user" else checkout_root()
    if args.cover:
        return cover(problems, gpu, at_hand, root, args)
    records = tuner.tune(problems, gpu=gpu, effort=args.effort, root=root, storage=args.storage, gpus=args.gpus,
                         calls=calls_of(models, workload_of(args)))
    print(report(records))
    if count := passed_over(records, gpu):
        print(f"\nA lookup takes what was measured before what was predicted, so for {count} of these it goes on taking measured "
              "records, of the same problem or one near it")
    print(next_steps(records[0].problem if records else problems[0], gpu, at_hand, args.db))
    return 0 if len(records) == len(problems) else 1


def cover(problems, gpu: Gpu, at_hand: bool, root: Path, args: argparse.Namespace) -> int:
    """`tune --cover`."""
    if not at_hand:
        raise UsageError("--cover measures, and the GPU that it is for is not here; run it where the GPU is, without --gpu")
    first, slash, count = args.part.partition("/")
    if not (slash and first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count) <= 1000):
        raise UsageError(f"--part is {args.part!r}; it must be I/N with 1 <= I <= N, such as 2/4")
    from ..database.known import left_out
    from ..tuner.cover import tune_covers

    found = tune_covers(problems, gpu, root=root, part_of=(int(first), int(count)), seconds=args.seconds)
    rows = [(one.static.text, len(one.configs), len(one.problems), f"{mean(losses):.3f}", f"{max(losses):.3f}")
            for one in found if (losses := left_out(one, gpu))]
    print(table(("static part", "configs", "problems", "loss", "worst"), rows))
    return 0


def calls_of(models, workload) -> dict:
    """Problem -> how often one pass over each model calls it, a call a layer; of a workload what its file says."""
    counts: dict = dict(workload.calls) if workload else {}
    for layers in (layers for model in models for layers in model.attention):
        for problem in (*layers.problems, *layers.decode):
            for called in (problem, replace(problem, op="backward")) if problem.op == "forward" else (problem,):
                counts[called.simplified()] = counts.get(called.simplified(), 0) + layers.layers
    return counts


def checkout_root() -> Path:
    """The tuning_db/ folder of the checkout that this package runs from. Raises `UsageError` for an installed package."""
    from ..database import view

    root = view.shipped_root()
    if root.name != "tuning_db":
        raise UsageError(f"--db checkout writes to a checkout's tuning_db/, but autotune is installed in {root.parent}; "
                         "run it from a checkout, or leave --db out")
    return root


def report(records) -> str:
    """A table of what was found: one row for each record."""
    rows = [(r.problem, microseconds(r.time_us), tflops(r.problem, r.time_us), _gain(r), r.evidence, r.config.kernel)
            for r in records]
    return table(("problem", "us", "TFLOP/s", "over default", "evidence", "kernel"), rows)


def passed_over(records, gpu: Gpu) -> int:
    """How many of `records` are predictions that no lookup takes, because something measured can serve their problem."""
    from ..database.lookup import lookup

    return sum(record.evidence == "predicted" and lookup(record.problem, gpu).evidence != "predicted" for record in records)


def next_steps(problem, gpu: Gpu, at_hand: bool, db: str) -> str:
    """The commands to try next."""
    suffix = "" if at_hand else f" --gpu {gpu.name}"
    steps = [f"lookup {problem}{suffix}", f"source {problem}{suffix}", f"source {problem}{suffix} --resources"]
    if db == "checkout":
        steps.append("build          # brings generated/ up to date with tuning_db/")
    return "\nTry next:\n" + "\n".join(f"  {_program()} {step}" for step in steps)


def _program() -> str:
    """How this shell starts autotune: as it did now, shorter where PATH or the current folder allow."""
    path = Path(sys.argv[0])
    if path.name != "autotune":
        return "python -m autotune"
    if shutil.which("autotune") == str(path):
        return "autotune"
    try:
        here = Path.cwd()
    except OSError:  # the folder is gone
        return shlex.quote(str(path))
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _gain(record) -> str:
    return f"{record.speedup:.2f}x" if record.speedup else "-"
