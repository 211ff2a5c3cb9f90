"""Says which configuration serves a problem on a GPU, where it comes from, and how sure that is. Needs no GPU with --gpu."""

from __future__ import annotations

import argparse

from ..core.gpu import resolve
from ..core.problem import Problem
from ..core.tables import microseconds, tflops
from .common import add_gpu, add_problem

SUMMARY = "which configuration serves a problem, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    add_gpu(parser)
    parser.add_argument("--why", action="store_true", help="also say what the tier and the evidence mean, how far the record is, "
                        "which faster kernels were refused and why, and what came next")


def run(args: argparse.Namespace) -> int:
    problem = Problem.parse(args.problem)
    gpu = resolve(args.gpu)
    from ..database.lookup import lookup

    match = _confirmed(lookup(problem, gpu))
    rows = [("problem", problem), ("gpu", f"{gpu.title} (sm_{gpu.arch}, {gpu.sms} SMs)"), ("config", match.config),
            ("match", f"{match.tier}, {match.evidence}")]
    if match.record:
        rows += _record_rows(match)
    rows.append(("why", match.why))
    if args.why:
        from ..database.why import lines

        rows += lines(match, problem)
    for name, value in rows:
        print(f"{name:<9}{value}")
    return 0


def _confirmed(match):
    """`match` with its evidence checked against what its config compiles to here, where that can be compiled."""
    from ..cuda import compile

    if match.record is None or match.record.evidence != "measured":
        return match
    try:
        return match.confirmed(compile.build(match.problem.static, match.config, match.gpu))
    except compile.CompilerMissing:
        return match


def _record_rows(match) -> list[tuple[str, str]]:
    record = match.record
    whose = record.evidence if record.problem == match.problem else f"{record.evidence}, of the record's problem"
    rows = [("record", record.problem.text),
            ("time", f"{microseconds(record.time_us)} us, {tflops(record.problem, record.time_us)} TFLOP/s ({whose})")]
    if record.default_time_us:
        rows.append(("default", f"{microseconds(record.default_time_us)} us with {record.default_config}"))
    return rows + [("tie", f"{microseconds(time_us)} us with {config}") for config, time_us in record.ties]
