"""autotune beside other libraries: the same inputs in the same process, in alternating order, by the same timing code.

`run` measures (it needs a GPU and torch), the rest makes tables and files of what came out. A row without a peer is no row.
"""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Mapping, Sequence

from .config import Config
from .gpu import Gpu
from .peers import PEERS, Peer
from .problem import Problem
from .tables import table, tflops

OURS = "autotune"


class BenchError(RuntimeError):
    """A comparison that cannot be made, or one that must not be because our result is wrong."""


@dataclass(frozen=True)
class Timing:
    """One library on one problem. `error_ratio` is its error / the error that our own check allows."""

    time_us: float  # median
    spread: float  # of the samples, relative
    samples: int
    sm_clock_mhz: int | None
    error_ratio: float
    policy: str


@dataclass(frozen=True)
class Row:
    """One problem: our config and time, and each peer's time."""

    problem: Problem
    config: Config
    match: str  # tier and evidence of the lookup
    ours: Timing
    peers: Mapping[str, Timing]

    @property
    def best_peer(self) -> str:
        return min(self.peers, key=lambda name: self.peers[name].time_us)

    @property
    def ratio(self) -> float:
        """Time of the fastest peer / ours: above 1, ours is faster."""
        return self.peers[self.best_peer].time_us / self.ours.time_us


@dataclass(frozen=True)
class Report:
    """What a run measured and under which conditions. `skipped` has (problem, peer, why it did not take part)."""

    gpu: str
    rows: tuple[Row, ...]
    skipped: tuple[tuple[Problem, str, str], ...]
    conditions: Mapping[str, object]
    versions: Mapping[str, str]
    command: str
    date: str

    @property
    def geomean(self) -> float:
        return math.exp(sum(math.log(row.ratio) for row in self.rows) / len(self.rows))

    @property
    def worst(self) -> float:
        return min(row.ratio for row in self.rows)


def peers_of(text: str) -> list[Peer]:
    """The peers that a comma-separated list names. Raises `BenchError` for an unknown one."""
    names = list(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise BenchError(f"no peer is called {unknown[0] if unknown else text!r}; known are {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


def run(problems: Sequence[Problem], peers: Sequence[Peer], gpu: Gpu, progress: Callable[[str], None]) -> Report:
    """Times every problem that at least one peer can compute, on CUDA device 0, which is `gpu`.

    Raises `BenchError` if a peer is not installed, if our result for a problem is wrong, or if no problem has a peer.
    """
    if missing := next(filter(None, (peer.missing() for peer in peers)), None):
        raise BenchError(missing)
    from . import benchrun, timing

    rows, skipped = [], []
    for problem in problems:
        able = []
        for peer in peers:
            if reason := peer.reject(problem):
                skipped.append((problem, peer.name, reason))
            else:
                able.append(peer)
        if not able:
            continue
        row, failed = benchrun.measure_row(problem, able, gpu)
        benchrun.release()
        skipped += [(problem, name, reason) for name, reason in failed]
        if row:
            rows.append(row)
            progress(f"{problem}: {row.ratio:.3f} x {row.best_peer}")
    if not rows:
        reasons = "; ".join(f"{name} cannot compute {problem}: {why}" for problem, name, why in skipped[:3])
        raise BenchError(f"nothing to compare: {reasons}")
    return Report(gpu.name, tuple(rows), tuple(skipped), timing.conditions(), benchrun.versions(), _command(),
                  datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"))


def show(report: Report) -> str:
    """The report as a table in TFLOP/s, with the summary below it."""
    names = list(dict.fromkeys(name for row in report.rows for name in row.peers))
    lines = []
    for row in report.rows:
        times = [timing and timing.time_us for timing in (row.ours, *map(row.peers.get, names))]
        lines.append((row.problem, f"{row.ours.time_us:.1f}", *(tflops(row.problem, time) for time in times), f"{row.ratio:.3f}"))
    header = ("problem", "us", *(f"{name} TFLOP/s" for name in (OURS, *names)), "peer time / ours")
    notes = [f"not shown: {problem} against {name}: {reason}" for problem, name, reason in report.skipped]
    summary = f"geomean {report.geomean:.3f}, worst {report.worst:.3f}, {len(report.rows)} problems on {report.gpu}"
    return "\n".join([table(header, lines), summary, *notes])


def write(report: Report, path: Path) -> None:
    """Writes the report as YAML. Raises `BenchError` if the file cannot be written."""
    import yaml

    entries = {row.problem.text: {
        "ratio": _round(row.ratio), "config": row.config.as_dict(), "match": row.match, OURS: _entry(row.problem, row.ours),
        **{name: _entry(row.problem, timing) for name, timing in row.peers.items()}} for row in report.rows}
    data = {"summary": {"geomean": _round(report.geomean), "worst": _round(report.worst)}, "gpu": report.gpu,
            "date": report.date, "command": report.command, "versions": dict(report.versions),
            "conditions": dict(report.conditions), "problems": entries}
    if report.skipped:
        data["left_out"] = [{"problem": problem.text, "peer": name, "reason": reason} for problem, name, reason in report.skipped]
    header = ("# Peer time / ours: above 1, ours is faster. Ratios are against the fastest peer of the row. Times are medians\n"
              "# in microseconds; TFLOP/s do not count masked pairs; error_ratio is error / the error that the check allows.\n")
    try:
        path.write_text(header + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=130))
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from None


def _entry(problem: Problem, timing: Timing) -> dict:
    return {"time_us": _round(timing.time_us), "tflops": _round(problem.flops / timing.time_us * 1e-6),
            "spread": _round(timing.spread), "samples": timing.samples, "sm_clock_mhz": timing.sm_clock_mhz,
            "policy": timing.policy, "error_ratio": _round(timing.error_ratio)}


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _command() -> str:
    return shlex.join(["autotune", *sys.argv[1:]])
