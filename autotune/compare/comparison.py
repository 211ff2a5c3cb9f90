"""autotune beside other libraries: the same inputs in the same process, in alternating order, by the same timing code.

`run` measures (it needs a GPU; peers need torch), `benchreport` makes tables and files of what came out.
"""

from __future__ import annotations

import math
import shlex
import sys
import traceback
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import Callable, Mapping, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from .peers import PEERS, Peer
from ..core.problem import Problem

OURS = "autotune"
LARGE_CACHE_BYTES = 200e6  # from here on, launch and merging are a few percent of what reading takes


class BenchError(RuntimeError):
    """A comparison that cannot be made."""


@dataclass(frozen=True)
class Timing:
    """One library on one problem. `error_ratio` is its error / the error that our own check allows."""

    time_us: float  # median of the runs' medians
    spread: float  # of the samples of a run, relative; the largest of the runs
    samples: int
    sm_clock_mhz: int | None
    error_ratio: float
    policy: str
    runs_us: tuple[float, ...] = ()
    peak_bytes: int = 0  # device memory: inputs, output and what else a call allocates
    note: str = ""  # what it did not compute, such as "no sink"


@dataclass(frozen=True)
class Row:
    """One problem: our config and time, and each peer's time, if any."""

    problem: Problem
    config: Config
    match: str  # tier and evidence of the lookup
    ours: Timing
    peers: Mapping[str, Timing]
    why: str = ""  # the lookup's reason, in words
    read: Timing | None = None  # of a kernel that only reads the cache, where there is one

    @property
    def read_share(self) -> float | None:
        """The share of that kernel's bandwidth that ours reaches."""
        return self.read and self.read.time_us / self.ours.time_us

    @property
    def best_peer(self) -> str | None:
        return min(self.peers, key=lambda name: self.peers[name].time_us, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the fastest peer / ours: above 1, ours is faster. None without peers."""
        return self.peers[self.best_peer].time_us / self.ours.time_us if self.peers else None


@dataclass(frozen=True)
class Report:
    """What a run measured and under which conditions. `skipped` has (problem, who, why it did not take part); where that is
    autotune itself, something is wrong. `groups` has the problems that a name in the summary stands for."""

    gpu: str
    rows: tuple[Row, ...]
    skipped: tuple[tuple[Problem, str, str], ...]
    conditions: Mapping[str, object]
    versions: Mapping[str, str]
    command: str
    date: str
    groups: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[tuple[Problem, str, str], ...]:
        """Those of `skipped` in which autotune itself did not do what it should."""
        return tuple(entry for entry in self.skipped if entry[1] == OURS)

    @property
    def geomean(self) -> float | None:
        """Geometric mean of the rows' ratios. None if no row has a peer, as for `worst`."""
        return _geomean(self.rows)

    @property
    def worst(self) -> float | None:
        return min((row.ratio for row in self.rows if row.peers), default=None)

    @property
    def read_share(self) -> float | None:
        """The least share of reading bandwidth among rows whose cache is `LARGE_CACHE_BYTES` or more; None if there is none."""
        large = [row.read_share for row in self.rows if row.read and row.problem.cache_bytes >= LARGE_CACHE_BYTES]
        return min(large, default=None)

    @property
    def pairs(self) -> dict[str, dict[Problem, float]]:
        """Speed over a cache / speed over the same keys in another one, if that is among the rows too: "e4m3_speed" over one of
        the queries' dtype, "paged_speed" over one that is not paged."""
        times = {row.problem: row.ours.time_us for row in self.rows if row.problem.op == "decode"}
        found: dict[str, dict[Problem, float]] = {}
        for problem, time_us in times.items():
            for name, twin in (("e4m3_speed", replace(problem, kv_dtype=problem.dtype)),
                               ("paged_speed", replace(problem, kv="dense", page_size=0))):
                if twin != problem and twin in times:
                    found.setdefault(name, {})[problem] = times[twin] / time_us
        return found

    @property
    def summary(self) -> dict[str, float | None]:
        """geomean and worst of all rows, the geomean of each of `groups` (None where no row of it was measured), and where there
        are any, the least `read_share` and the least of each kind of `pairs`."""
        grouped = {name: _geomean([row for row in self.rows if row.problem in group]) for name, group in self.groups.items()}
        least = {"read_share": self.read_share, **{name: min(ratios.values()) for name, ratios in self.pairs.items()}}
        return {"geomean": self.geomean, "worst": self.worst, **grouped,
                **{f"least_{name}": value for name, value in least.items() if value is not None}}


def _geomean(rows: Sequence[Row]) -> float | None:
    logs = [math.log(row.ratio) for row in rows if row.peers]
    return math.exp(sum(logs) / len(logs)) if logs else None


def peers_of(text: str) -> list[Peer]:
    """The peers that a comma-separated list names. Raises `BenchError` for an unknown one."""
    names = list(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise BenchError(f"no peer is called {unknown[0] if unknown else text!r}; known are {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


def run(problems: Sequence[Problem], peers: Sequence[Peer], gpu: Gpu, progress: Callable[[str], None],
        groups: Mapping[str, tuple[Problem, ...]] | None = None, alone: bool = False,
        configs: Mapping[Problem, Config] | None = None) -> Report:
    """Times every problem that at least one peer can compute, decode steps and with `alone` all of them, on CUDA device 0, which
    is `gpu`; ours with the config that `configs` has for it, if it has one.

    Raises `BenchError` if a peer is not installed, or if nothing could be measured.
    """
    if missing := next(filter(None, (peer.missing() for peer in peers)), None):
        raise BenchError(missing)
    from . import run
    from ..timing.conditions import conditions

    rows, skipped, work = [], [], []
    for problem in dict.fromkeys(problem.simplified() for problem in problems):
        reasons = {peer.name: peer.reject(problem) for peer in peers}
        skipped += [(problem, name, reason) for name, reason in reasons.items() if reason]
        able = [peer for peer in peers if not reasons[peer.name]]
        if able or alone or problem.op == "decode":
            work.append((problem, able))
    if work:
        progress(f"compiling what {len(work)} problems need")
        run.get_ready([problem for problem, _ in work], peers)
    for problem, able in work:
        chosen = (configs or {}).get(problem)
        row, failed = _measured(run.measure_row if chosen is None else partial(run.measure_row, config=chosen), problem, able,
                                gpu)
        run.release()
        skipped += [(problem, name, reason) for name, reason in failed]
        if row and (row.peers or row.read or alone):
            rows.append(row)
            progress(f"{problem}: " + (f"{row.ratio:.3f} x {row.best_peer}" if row.peers else f"{row.ours.time_us:.1f} us")
                     + (f", {100 * row.read_share:.0f}% of reading" if row.read else ""))
    if not rows:
        reasons = "; ".join(f"{name} and {problem}: {why}" for problem, name, why in skipped[:3])
        raise BenchError(f"nothing could be measured: {reasons}")
    return Report(gpu.name, tuple(rows), tuple(skipped), conditions(), run.versions(peers), _command(),
                  datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"), groups or {})


def _measured(measure, problem: Problem, able: Sequence[Peer], gpu: Gpu):
    """`measure_row`, with an error as a reason like any other, so that the other rows are not lost. One that is not a sentence
    of this package, such as the GPU's, also shows its traceback."""
    try:
        return measure(problem, able, gpu)
    except Exception as error:
        text = " ".join(str(error).split())
        if not type(error).__module__.startswith(f"{__package__.partition('.')[0]}."):
            traceback.print_exc()
            text = f"{type(error).__name__}: {text}"
        return None, [(OURS, text)]


def _command() -> str:
    return shlex.join(["autotune", *sys.argv[1:]])
