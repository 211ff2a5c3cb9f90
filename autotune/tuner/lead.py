"""A leader: puts problems into a plan, waits for workers to tune them, and records what comes out. It needs no GPU itself.

Any number of leaders may share a storage. One that ends early loses nothing: workers go on, and the same command collects.
"""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import Callable, Mapping, Sequence

from ..core.gpu import Gpu
from ..core.problem import Problem
from ..database.record import Record
from . import owner
from .builder import Builder
from .plan import Item, Plan, Status
from .progress import Progress
from .spread import EVEN, Share
from .storages import shown
from .work import record_of, source_of

EMPTY: Mapping[Problem, Share] = MappingProxyType({})
LOOK_SECONDS = 1.0
ALONE_SECONDS = 60.0  # without a worker before the command that starts one is said, and said again


def lead(problems: Sequence[Problem], gpu: Gpu, effort: str, where: str, make: Builder, progress: Progress,
         keep: Callable[[Record], None], alive: Callable[[], bool] = lambda: True,
         sleep: Callable[[float], None] = time.sleep, shares: Mapping[Problem, Share] = EMPTY) -> None:
    """Gives `keep` the record of each of `problems` as some worker finishes it. Ends when all are done or failed, or when
    `alive` says that no worker will come any more. Raises `StoreError`."""
    plan = Plan(where, gpu)
    items = {}
    for problem in dealt(problems, shares):
        share = shares.get(problem, EVEN)
        items[Item(problem.text, effort, source_of(problem, gpu, make), (share.weight, share.trials))] = problem
    plan.put(items)
    progress.say(f"{len(items)} problems for {gpu.title}; `autotune worker --storage {shown(where)}` helps, on any host")
    alone_since = time.monotonic()
    while items:
        running = set()
        last = not alive()  # asked before looking: what a worker wrote as its last act is seen
        for item, status in plan.statuses().items():
            if status.state == "running":
                running.add(owner.shown(status.by))
            elif item in items and status.state != "free":
                _finished(items.pop(item), status, gpu, progress, keep)
        if not items:
            return
        if last:
            progress.say(f"  no worker is left; {len(items)} problems are not tuned")
            return
        if running:
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > ALONE_SECONDS:
            progress.say(f"  no worker is there; {len(items)} problems wait")
            alone_since = time.monotonic()
        sleep(LOOK_SECONDS)


def dealt(problems: Sequence[Problem], shares: Mapping[Problem, Share] = EMPTY) -> list[Problem]:
    """The order in which workers take problems: what takes longest first, so that none is left alone with one at the end."""
    return sorted(problems, key=lambda problem: (-shares.get(problem, EVEN).trials, -problem.flops, problem.text))


def _finished(problem: Problem, status: Status, gpu: Gpu, progress: Progress, keep: Callable[[Record], None]) -> None:
    progress.problem(problem.text)
    record = record_of(status, gpu)
    if record is None:
        progress.finished(status.message or "its result cannot be read")
        return
    keep(record)
    progress.finished(f"{record.time_us:.1f} us by {owner.shown(status.by)}: {record.config}")
