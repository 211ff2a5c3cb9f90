"""A worker: takes problems from a plan, one after another, and tunes them on the GPU at hand. `autotune worker` runs it.

It may join and end at any time: trials and results are in the storage as they are made.
"""

from __future__ import annotations

import time
from typing import Callable

from ..core.gpu import Gpu, detect
from ..core.problem import Problem, ProblemError
from ..database.record import GpuKey, Record, RecordError
from ..kernels import ConfigError, default_config
from . import EVALUATOR
from .builder import Builder
from .gpulock import gpu_lock
from .plan import Claim, Item, Plan
from .progress import Progress
from .session import EFFORTS, ProblemFailed, Session
from .storages import shown
from .spread import Share
from .signals import ending_as_interrupts
from .worker import Worker

LOOK_SECONDS = 2.0  # between two looks at a plan that has nothing to do


def work(where: str, device: int = 0, linger: float = 60.0, threads: int | None = None, stream=None) -> int:
    """Tunes what the plan in the storage `where` has for GPUs like CUDA device `device`, and returns how many problems.

    Ends when there was nothing to do for `linger` seconds and nobody is at work whose problem may come back. `threads`: compile
    threads (None: as many as cores allow). Raises `StoreError`, `WorkerError`, `GpuError`, `LockError`, `CompilerMissing`.
    """
    gpu = detect(device)
    progress = Progress(1, EFFORTS["quick"].seconds, stream)
    plan = Plan(where, gpu)
    with ending_as_interrupts(), gpu_lock(device, progress.say), Worker(EVALUATOR, {"device": device}) as worker:
        session = Session(gpu, EFFORTS["quick"], worker, Builder(gpu), progress, storage=where, threads=threads)
        progress.say(f"worker on {gpu.title} (device {device}) at {shown(where)}")
        return _take_turns(plan, session, linger)


def _take_turns(plan: Plan, session: Session, linger: float, sleep: Callable[[float], None] = time.sleep) -> int:
    count, able = 0, _Able(session)
    idle_since = time.monotonic()
    while True:
        claim = plan.claim(able)
        if claim is not None:
            count += _tune(claim, plan, session)
            idle_since = time.monotonic()
            continue
        waiting = any(status.state == "running" for status in plan.statuses().values())
        if not waiting and time.monotonic() - idle_since >= linger:
            return count
        sleep(min(LOOK_SECONDS, max(linger, 0.1)))


def _tune(claim: Claim, plan: Plan, session: Session) -> bool:
    session.effort = EFFORTS[claim.item.effort]
    problem = Problem.parse(claim.item.problem)
    known = [record for status in plan.statuses().values() if (record := record_of(status, session.gpu, problem.op))]
    try:
        with claim.beating():
            record = session.tune(problem, known, Share(*claim.item.share))
    except ProblemFailed as error:
        claim.failed(str(error))
        session.progress.finished(str(error))
        return False
    except BaseException:
        claim.give_back()
        raise
    claim.done({"problem": problem.text, "entry": record.as_entry()}, record.time_us)
    return True


def record_of(status, gpu: Gpu, op: str | None = None) -> Record | None:
    """The record in a status of a plan, or None if there is none, it is of another op, or it cannot be true."""
    try:
        text = status.record["problem"]
        if op is None or text.startswith(f"{op}-"):
            return Record.from_entry(text, status.record["entry"], GpuKey.of(gpu))
    except (KeyError, TypeError, AttributeError, RecordError):
        pass
    return None


def source_of(problem: Problem, gpu: Gpu, make: Builder) -> str:
    """What a plan says of whose kernels are meant: the source hash of the default config. Raises `ConfigError`."""
    return make.source_sha256(problem.static, default_config(problem, gpu))


class _Able:
    """Whether an item can be tuned here: it parses, and this autotune makes the same kernels of it as the leader's."""

    def __init__(self, session: Session):
        self._session = session
        self._known: dict[Item, bool] = {}

    def __call__(self, item: Item) -> bool:
        if item not in self._known:
            self._known[item] = not (reason := self._reason(item))
            if reason:
                self._session.progress.say(f"  left to others: {item.problem}: {reason}")
        return self._known[item]

    def _reason(self, item: Item) -> str:
        if item.effort not in EFFORTS:
            return f"effort {item.effort} is not known here"
        try:
            source = source_of(Problem.parse(item.problem), self._session.gpu, self._session.make)
        except (ProblemError, ConfigError) as error:
            return str(error)
        if source != item.source:
            return "the leader's autotune or NVRTC makes other kernels; install the same versions"
        return ""
