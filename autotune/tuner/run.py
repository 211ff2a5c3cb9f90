"""What `tune` does: choose between measuring and predicting, lock the GPU, go through the problems, write the records."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Iterable

from filelock import FileLock, Timeout

from ..cuda import compile
from ..database import view
from ..core.gpu import Gpu, GpuError, detect, resolve
from ..kernels import as_called, default_config
from ..database.lookup import refresh
from ..core.problem import Problem, as_problems
from ..database.record import Record
from . import EVALUATOR, TuneError
from .builder import Builder
from .progress import Progress
from .session import EFFORTS, ProblemFailed, Session
from .worker import Worker

INTERRUPTED = "interrupted; what was measured is kept, and the same command goes on from there"


def parsed(problems: Problem | str | Iterable[Problem | str]) -> list[Problem]:
    """Each problem once, simplified. Raises `ProblemError`, and `TuneError` for one that computes nothing."""
    chosen = dict.fromkeys(problem.simplified() for problem in as_problems(problems))
    for problem in chosen:
        if problem.flops == 0:
            raise TuneError(f"{problem} computes nothing (it has no visible key), so there is nothing to tune")
    return list(chosen)


def tune(problems: list[Problem], gpu: Gpu | str | None, effort: str, root: Path | None, trials_root: Path | None,
         device: int, stream) -> list[Record]:
    """See `autotune.tuner.tune`."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise TuneError(f"effort is {effort!r}; allowed are {', '.join(EFFORTS)}")
    gpu, here = _resolve(gpu, device)
    problems = list(dict.fromkeys(as_called(problem, gpu) for problem in problems))
    for problem in problems:  # say what cannot be done before anything is written
        default_config(problem, gpu)
    compile.nvrtc_version()
    view.check_writable(root)
    found: dict[Problem, Record] = {}

    def keep(record: Record) -> None:
        view.write([record], root)
        found[record.problem] = record

    try:
        if here:
            progress = Progress(len(problems), EFFORTS[effort].seconds, stream)
            with lock_of(device, progress), Worker(EVALUATOR, {"device": device}) as worker:
                worker.start()
                session = Session(gpu, EFFORTS[effort], worker, Builder(gpu), progress, trials_root)
                _measure(session, problems, root, keep)
        else:
            from .executed import Executor
            from .predict import SECONDS_EACH, predict

            progress = Progress(len(problems), SECONDS_EACH, stream)
            predict(problems, gpu, Builder(gpu), progress, keep, Executor(progress))
    except KeyboardInterrupt:
        progress.say(f"  {INTERRUPTED}")
        raise
    finally:
        refresh()
    return [found[problem] for problem in problems if problem in found]


def _measure(session: Session, problems: list[Problem], root: Path | None, keep) -> None:
    """Problems that share a static part follow each other, the small ones first: binaries and winners carry over."""
    roots = view.search_path() if root is None else (root, *view.search_path())
    known = {op: list(view.open_view(session.gpu, op, roots).records) for op in {p.op for p in problems}}
    for problem in sorted(problems, key=lambda p: (p.static.text, p.flops, p.text)):
        try:
            record = session.tune(problem, known[problem.op])
        except ProblemFailed as error:
            session.progress.finished(str(error))
            continue
        keep(record)
        known[problem.op].append(record)


def _resolve(gpu: Gpu | str | None, device: int) -> tuple[Gpu, bool]:
    """(the GPU that is meant, whether it is the one at hand)"""
    if gpu is None:
        return detect(device), True
    gpu = resolve(gpu)
    try:
        return gpu, detect(device).identity == gpu.identity
    except GpuError:
        return gpu, False


class lock_of:
    """One tune at a time on a GPU: two would poison each other's timings. Waits, and says so."""

    def __init__(self, device: int, progress: Progress):
        from cupy.cuda import runtime  # needs no CUDA context

        bus = runtime.deviceGetPCIBusId(device).replace(":", "-")
        self._path = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}-gpu-{bus}.lock"
        self._progress = progress
        self._lock = FileLock(self._path)

    def __enter__(self):
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._progress.say(f"waiting for another tune on this GPU (it holds {self._path})")
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
