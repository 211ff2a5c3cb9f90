"""A bench `Report` as text for people and as a YAML file that others can check."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

from .comparison import OURS, BenchError, Report, Row, Timing
from ..core.gpu import Gpu
from ..core.problem import Problem
from ..core.tables import microseconds, table, tflops

HEADER = """\
# Ratios are the fastest peer's time / ours: above 1, ours is faster. A time is in microseconds, the median of its runs' medians;
# all of a row ran by turns in one process on the same inputs. TFLOP/s do not count masked pairs; error_ratio is error / the
# error that the check allows; peak_mb is inputs, output and whatever else a call allocates. A row without a peer is not shown.
"""

DECODE_HEADER = """\
# Of decode steps, tb_per_s counts keys and values, tokens_per_s the queries of one layer. read is a kernel that only reads as
# many bytes, timed like the others; read_share is the share of its bandwidth that ours reaches, least_read_share the least of
# caches of 200 MB and more. e4m3_speed and paged_speed are our speed over a cache / over the same keys in 16 bits, or not paged.
"""


def show(report: Report, gpu: Gpu) -> str:
    """Our times with what they mean, each peer's time, a summary, which kernel ran and why, and who did not take part."""
    forward, decode = ([row for row in report.rows if (row.problem.op == "decode") == wanted] for wanted in (False, True))
    parts = []
    if forward:
        parts.append(table(("problem", "us", "TFLOP/s", "roofline", "GB/s", "tokens/s", "peak MB", "kernel", "match"),
                           [_our_cells(row, gpu) for row in forward]))
    if decode:
        parts.append(table(("problem", "us", "TB/s", "only reading: us", "share", "tokens/s", "peak MB", "kernel", "match"),
                           [_decode_cells(row) for row in decode]))
    names = list(dict.fromkeys(name for row in report.rows for name in row.peers))
    if names:
        parts.append(table(("us", OURS, *names, "best / ours"), [_peer_cells(row, names) for row in report.rows if row.peers]))
        summary = ", ".join(f"{name} {_text(value)}" for name, value in report.summary.items())
        compared = sum(bool(row.peers) for row in report.rows)
        parts.append(f"{summary}: fastest peer's time / ours on {compared} problems")
    parts.append("\n".join(f"{_PAIRS[name]}: {ratio:.3f} x for {problem}"
                           for name, ratios in report.pairs.items() for problem, ratio in ratios.items()))
    parts.append("\n".join(_reasons(report)))
    parts.append("\n".join(f"not shown: {problem} by {name}: {reason}" for problem, name, reason in report.skipped))
    return "\n\n".join(filter(None, parts))


def _our_cells(row: Row, gpu: Gpu) -> tuple:
    problem, time_us = row.problem, row.ours.time_us
    bound = gpu.roofline_us(problem.flops, problem.compulsory_bytes, problem.dtype != "fp32")
    return (problem, microseconds(time_us), tflops(problem, time_us), f"{100 * bound / time_us:.0f}%",
            f"{problem.compulsory_bytes / time_us * 1e-3:.0f}", f"{tokens_per_second(problem, time_us):.3g}",
            f"{row.ours.peak_bytes / 1e6:.0f}", row.config.kernel, row.match)


_PAIRS = {"e4m3_speed": "speed over a cache of 16 bits", "paged_speed": "speed over a contiguous cache"}


def _decode_cells(row: Row) -> tuple:
    problem, time_us, read = row.problem, row.ours.time_us, row.read
    return (problem, microseconds(time_us), f"{_tb_per_s(problem, time_us):.2f}", microseconds(read and read.time_us),
            f"{100 * row.read_share:.0f}%" if read else "-", f"{tokens_per_second(problem, time_us):.3g}",
            f"{row.ours.peak_bytes / 1e6:.0f}", row.config.kernel, row.match)


def _tb_per_s(problem: Problem, time_us: float) -> float:
    """Bandwidth of keys and values."""
    return problem.cache_bytes / time_us * 1e-6


def tokens_per_second(problem: Problem, time_us: float) -> float:
    """Query tokens that one layer takes through attention in a second."""
    queries = sum(queries for queries, _ in problem.sequences) / max(len(problem.sequences), 1)
    return problem.batch * queries / time_us * 1e6


def _peer_cells(row: Row, names: list[str]) -> tuple:
    times = [_peer_time(row.peers[name]) if name in row.peers else "-" for name in names]
    return (row.problem, microseconds(row.ours.time_us), *times, f"{row.ratio:.3f}")


def _peer_time(timing: Timing) -> str:
    return microseconds(timing.time_us) + (f" ({timing.note})" if timing.note else "")


def _reasons(report: Report) -> Iterator[str]:
    """One sentence for each row that no exact, measured record serves."""
    for row in report.rows:
        if row.why and row.match != "exact, measured":
            yield f"{row.problem} ran {row.config.kernel}: {row.why}"


def write(report: Report, path: Path) -> None:
    """Writes the rows that have something beside them as YAML. Raises `BenchError` if there is none, or if the file cannot be
    written."""
    import yaml

    if not any(row.peers or row.read for row in report.rows):
        raise BenchError(f"{path} is not written: no row has a peer, and a time without a peer's beside it says little")
    text = yaml.safe_dump(as_data(report), sort_keys=False, default_flow_style=None, width=130)
    try:
        path.write_text(HEADER + (DECODE_HEADER if any(row.read for row in report.rows) else "") + text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from None


def as_data(report: Report) -> dict:
    """The report as plain values, without the rows that have nothing beside them."""
    entries = {row.problem.text: {
        **({"ratio": _round(row.ratio), "best_peer": row.best_peer} if row.peers else {}),
        **({"read_share": _round(row.read_share)} if row.read else {}),
        **{name: _round(ratios[row.problem]) for name, ratios in report.pairs.items() if row.problem in ratios},
        "config": row.config.as_dict(), "match": row.match, OURS: _entry(row.problem, row.ours),
        **{name: _entry(row.problem, timing) for name, timing in row.peers.items()},
        **({"read": _read_entry(row.problem, row.read)} if row.read else {}),
    } for row in report.rows if row.peers or row.read}
    data = {"summary": {name: value and _round(value) for name, value in report.summary.items()}, "gpu": report.gpu,
            "date": report.date, "command": report.command, "versions": dict(report.versions),
            "conditions": dict(report.conditions), "problems": entries}
    if report.failed:
        data["summary"]["failed"] = len(report.failed)
    if report.skipped:
        data["left_out"] = [{"problem": problem.text, "who": name, "reason": reason} for problem, name, reason in report.skipped]
    return data


def _entry(problem: Problem, timing: Timing) -> dict:
    entry = {"time_us": _round(timing.time_us), "tflops": _round(problem.flops / timing.time_us * 1e-6),
             **_decode_speeds(problem, timing.time_us),
             "runs_us": [_round(time) for time in timing.runs_us], "spread": _round(timing.spread), "samples": timing.samples,
             "sm_clock_mhz": timing.sm_clock_mhz, "policy": timing.policy, "error_ratio": _round(timing.error_ratio),
             "peak_mb": _round(timing.peak_bytes / 1e6), "note": timing.note}
    return {name: value for name, value in entry.items() if value not in ("", [])}


def _decode_speeds(problem: Problem, time_us: float) -> dict:
    if problem.op != "decode":
        return {}
    return {"tb_per_s": _round(_tb_per_s(problem, time_us)), "tokens_per_s": _round(tokens_per_second(problem, time_us))}


def _read_entry(problem: Problem, read: Timing) -> dict:
    return {"time_us": _round(read.time_us), "tb_per_s": _round(_tb_per_s(problem, read.time_us)),
            "runs_us": [_round(time) for time in read.runs_us], "spread": _round(read.spread), "policy": read.policy}


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
