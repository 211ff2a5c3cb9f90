"""Measuring covers: for each static part a few configs on a grid of problems, so that a lookup between them rests on times.

    covers = tune_covers(problems, gpu=gpu, seconds=600)

For one static part: candidates are compiled and checked on one problem, raced on a few anchors, and those few that leave every
anchor with one near its best are timed on the whole grid. What was written is skipped when the same command runs again.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Iterable, Iterator, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem, Static
from ..cuda import compile
from ..database import cover as covers
from ..database import view
from ..database.cover import Cover
from ..database.lookup import refresh
from ..database.record import GpuKey, Record
from ..kernels import KERNELS
from . import builder
from .builder import Builder, Built
from .grid import COUNT, anchors, grid, in_bf16
from .progress import Progress
from .gpulock import gpu_lock
from .portfolio import CHOSEN, candidates_of, choose
from .survey import TARGET
from .worker import Worker

ANCHORS = 10
RACE_ROUNDS, GRID_ROUNDS = 2, 3
CHECK_S, TIMES_S = 60.0, 60.0  # of the worker, before it is given up
OWN_FLOPS, OWN_BYTES = 2.5e12, 3e9  # of a problem with a record, to stand on a grid
MOST_OWN = 12  # problems with records that stand on a grid, beside those that are drawn


def tune_covers(problems: Sequence[Problem], gpu: Gpu, device: int = 0, root: Path | None = None,
                part_of: tuple[int, int] = (1, 1), seconds: float = math.inf, stream=None) -> list[Cover]:
    """Measures the cover of each static part of `problems`, over each source of keys that a call may have, and of each that
    `root` has a cover of: of every `part_of[1]`-th beginning with `part_of[0]`, for about `seconds`. Writes them to the database
    folder `root` (the user's if None). What is there, whole and current is left as it is, so that the same call goes on from
    where it was. `gpu` must be the one at CUDA index `device`."""
    root = view.user_root() if root is None else root
    view.check_writable(root)
    asked, there = [other for problem in problems for other in over_each_source(problem)], _of_covers(root, gpu, problems)
    problems = [*asked, *there]
    progress = Progress(1, 0.0, stream)
    records = [record for op in sorted({problem.op for problem in problems}) for record in view.open_view(gpu, op).records]
    everything = [*statics(asked), *statics(there)]
    wanted = everything[part_of[0] - 1::part_of[1]]

    def small(problem: Problem) -> bool:
        return problem.flops < OWN_FLOPS and problem.compulsory_bytes < OWN_BYTES

    before = {static: covers.read(covers.file_of(root, gpu.name, static)) for static in wanted}
    missing = (part(static, problems, records, gpu, small, before[static].configs if isinstance(before[static], Cover) else ())
               for static in wanted if not current(before[static], gpu))
    try:
        with gpu_lock(device, progress.say):
            return measure(missing, gpu, device, root, time.monotonic() + seconds, progress.say)
    finally:
        refresh()


def over_each_source(problem: Problem) -> list[Problem]:
    """`problem`, and the same over the other sources that its keys may come from in a call."""
    others = {"forward": ("dense", "varlen", "paged"), "decode": ("dense", "paged")}.get(problem.op, (problem.kv,))
    return [problem, *(replace(problem, kv=kv, page_size=16 if kv == "paged" else 0) for kv in others if kv != problem.kv)]


def _of_covers(root: Path, gpu: Gpu, problems: Sequence[Problem]) -> list[Problem]:
    """Problems of the covers of `gpu` in `root` whose static part is none of `problems`."""
    wanted = {in_bf16(other).static for problem in problems for other in over_each_source(problem)}
    found = [cover for path in covers.paths(root) if isinstance(cover := covers.read(path), Cover)]
    others = [cover for cover in found if cover.gpu == GpuKey.of(gpu) and cover.static not in wanted]
    return [problem for cover in others for problem in cover.problems]


def current(cover: Cover | str | None, gpu: Gpu) -> bool:
    """Whether `cover` is whole, says from how many configs it was chosen (before, they were few), and is of today's NVRTC and
    sources. Needs no GPU and compiles nothing."""
    whole = isinstance(cover, Cover) and len(cover.problems) >= COUNT and cover.raced > 0
    return whole and cover.nvrtc == compile.nvrtc_version() and not covers.stale_configs(cover, gpu)


@dataclass(frozen=True)
class Part:
    """A static part (in bf16), the problems of its grid, and the configs that may be chosen for it."""

    static: Static
    problems: tuple[Problem, ...]
    anchors: tuple[Problem, ...]
    candidates: tuple[Config, ...]


def statics(problems: Iterable[Problem]) -> dict[Static, list[Problem]]:
    """Problems by static part in bf16, that with most of them first."""
    found = defaultdict(list)
    for problem in problems:
        found[in_bf16(problem).static].append(in_bf16(problem))
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0].text)))


def part(static: Static, like: Sequence[Problem], records: Sequence[Record], gpu: Gpu, small: Callable[[Problem], bool],
         before: Sequence[Config] = ()) -> Part:
    """What to measure for `static`. `like` are problems whose heads and windows are typical; `small` says which problems of
    records are cheap enough to stand on the grid; `before` are the configs of its cover before."""
    drawn = grid(static, like)
    own = dict.fromkeys(in_bf16(r.problem) for r in records if in_bf16(r.problem).static == static and small(r.problem))
    first = tuple(anchors(drawn, ANCHORS))
    rest = [problem for problem in dict.fromkeys([*drawn, *list(own)[:MOST_OWN]]) if problem not in first]
    return Part(static, (*first, *rest), first, tuple(candidates_of(static, drawn, records, gpu, before)))


def measure(parts: Iterator[Part], gpu: Gpu, device: int, folder: Path, deadline: float,
            say: Callable[[str], None]) -> list[Cover]:
    """Measures `parts` one after another and writes each to `folder`; begins none after `deadline` (of `time.monotonic`). The
    next part is compiled meanwhile."""
    done = []
    with builder.pool() as pool, ThreadPoolExecutor(1) as planner, Worker(TARGET, {"device": device}) as worker:
        worker.start()
        make = Builder(gpu)
        ahead: list[Future] = [planner.submit(_submitted, parts, make, pool) for _ in range(3)]
        try:
            while ahead and time.monotonic() < deadline:
                submitted = ahead.pop(0).result()
                if submitted is None:
                    break
                ahead.append(planner.submit(_submitted, parts, make, pool))
                found = Surveying(*submitted, gpu, worker, say).cover()
                if found is not None:
                    covers.write(found, folder)
                    done.append(found)
        finally:
            for future in ahead:
                future.cancel()
            pool.shutdown(wait=False, cancel_futures=True)
    return done


def _submitted(parts: Iterator[Part], make: Builder, pool: ThreadPoolExecutor) -> tuple[Part, dict[Config, Future]] | None:
    part = next(parts, None)
    if part is None:
        return None
    return part, {config: pool.submit(make.build, part.static, config) for config in part.candidates}


class Surveying:
    """One part on its way to a cover."""

    def __init__(self, part: Part, building: dict[Config, Future], gpu: Gpu, worker: Worker, say: Callable[[str], None]):
        self.part, self.gpu, self.worker, self.say = part, gpu, worker, say
        self._building = building

    def cover(self) -> Cover | None:
        """None if nothing works."""
        began = time.monotonic()
        built = {config: made for config, future in self._building.items() if isinstance(made := future.result(), Built)}
        compiled = time.monotonic()
        right = self._right(built)
        raced = {problem: self._times(problem, right, RACE_ROUNDS) for problem in self.part.anchors}
        if not right or not any(any(row.values()) for row in raced.values()):
            self.say(f"{self.part.static.text}: nothing was measured")
            return None
        rows = {config: [raced[problem].get(config) for problem in raced] for config in right}
        chosen = choose(rows, CHOSEN)
        table = dict(raced)
        captures = GRID_ROUNDS if self.part.static.op == "decode" else 1  # blocks come to stand differently: up to a fifth
        for problem in self.part.problems:
            if problem not in table:
                table[problem] = self._times(problem, {config: right[config] for config in chosen}, GRID_ROUNDS, captures)
        self.worker.call("unload", [made.binary for made in right.values()], timeout=TIMES_S)
        self.say(f"{self.part.static.text}: {len(built)} of {len(self.part.candidates)} compiled, {len(right)} right, "
                 f"{len(chosen)} chosen, {len(table)} problems, waited {compiled - began:.1f} s, took "
                 f"{time.monotonic() - began:.1f} s")
        timed = {problem: row for problem, row in table.items() if any(row.get(config) for config in chosen)}
        sources = (right[config].binary.source_sha256[:covers.DIGITS] for config in chosen)
        times = (tuple(row.get(config) for config in chosen) for row in timed.values())
        return Cover(GpuKey.of(self.gpu), self.part.static, tuple(chosen), tuple(sources), tuple(timed), tuple(times),
                     compile.nvrtc_version(), _now(), len(right))

    def _right(self, built: dict[Config, Built]) -> dict[Config, Built]:
        """Those that are right on the cheapest anchor, one after another: what hangs or crashes takes only itself along."""
        problem = min(self.part.anchors, key=lambda p: (p.flops + 100 * p.compulsory_bytes, p.text))
        right = {}
        for config, made in built.items():
            reply = self.worker.call("check", problem, self._fitted(problem, config), made.binary, timeout=CHECK_S)
            if reply.status == "done" and not reply.value:
                right[config] = made
            else:
                self.worker.kill()  # its context may be broken; the next call has another
                self.say(f"  {self.part.static.text}: {reply.value or reply.message}: {config}")
        return right

    def _times(self, problem: Problem, right: dict[Config, Built], rounds: int, captures: int = 1) -> dict[Config, float | None]:
        entries = [(self._fitted(problem, config), made.binary) for config, made in right.items()]
        reply = self.worker.call("times", problem, entries, rounds, captures, timeout=TIMES_S)
        if reply.status != "done":
            self.worker.kill()
            self.say(f"  {problem}: {reply.status}: {reply.message}")
            return {}
        return dict(zip(right, reply.value))

    def _fitted(self, problem: Problem, config: Config) -> Config:
        return KERNELS[config.kernel].fitted(problem, config, self.gpu)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
