"""What `tune` does: choose between measuring and predicting, lock the GPU, go through the problems, write the records."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterable, Iterator, Mapping

from ..cuda import compile
from ..database import view
from ..core.gpu import Gpu, GpuError, detect, resolve
from ..kernels import as_called, default_config
from ..database.lookup import refresh
from ..core.problem import Problem, as_problems
from ..database.record import Record
from . import EVALUATOR, TuneError, many, spread
from .builder import Builder
from .executed import Executor
from .gpulock import gpu_lock
from .lead import dealt, lead
from .predict import SECONDS_EACH, predict
from .progress import Progress
from .session import EFFORTS, ProblemFailed, Session
from .signals import ending_as_interrupts
from .spread import Share
from .storages import trials_root
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
         device: int, stream, calls: Mapping[Problem, float]) -> list[Record]:
    """See `autotune.tuner.tune`."""
    gpu, here = _resolve(gpu, device)
    problems = _as_asked(problems, gpu, effort, root)
    progress = Progress(len(problems), EFFORTS[effort].seconds if here else SECONDS_EACH, stream)
    with _recording(root, progress) as (found, keep):
        if here:
            with gpu_lock(device, progress.say), Worker(EVALUATOR, {"device": device}) as worker:
                worker.start()
                session = Session(gpu, EFFORTS[effort], worker, Builder(gpu), progress, trials_root)
                _measure(session, problems, root, keep, _shares(problems, gpu, calls, progress))
        else:
            predict(problems, gpu, Builder(gpu), progress, keep, Executor(progress))
    return [found[problem] for problem in problems if problem in found]


def tune_shared(problems: list[Problem], gpu: Gpu | str | None, effort: str, root: Path | None, stream, storage: str | None,
                gpus: str | None, calls: Mapping[Problem, float]) -> list[Record]:
    """See `autotune.tuner.tune`: with workers on the GPUs of this machine, on other hosts, or both."""
    where = storage or str(trials_root())
    if gpus:
        from cupy.cuda import runtime

        gpu, devices, left_out = many.devices_of(gpus, resolve(gpu) if gpu is not None else None, runtime.getDeviceCount())
    else:
        gpu, devices, left_out = detect(0) if gpu is None else resolve(gpu), [], []
    problems = _as_asked(problems, gpu, effort, root)
    progress, make = Progress(len(problems), EFFORTS[effort].seconds, stream), Builder(gpu)
    for sentence in left_out:
        progress.say(sentence)
    shares = _shares(problems, gpu, calls, progress)
    with _recording(root, progress) as (found, keep):
        if devices:
            devices = many.agreeing(devices, gpu, dealt(problems)[0], make, progress.say)
            with many.workers(devices, where) as alive:
                lead(problems, gpu, effort, where, make, progress, keep,
                     alive if storage is None else lambda: alive() or True, shares=shares)  # others may come from elsewhere
        else:
            lead(problems, gpu, effort, where, make, progress, keep, shares=shares)
    return [found[problem] for problem in problems if problem in found]


@contextmanager
def _recording(root: Path | None, progress: Progress) -> Iterator[tuple[dict[Problem, Record], Callable[[Record], None]]]:
    """(records by problem, what writes one and puts it there), for as long as a tune runs. An interrupt is said; lookups read the
    database anew afterwards."""
    found: dict[Problem, Record] = {}

    def keep(record: Record) -> None:
        view.write([record], root)
        found[record.problem] = record

    try:
        with ending_as_interrupts():
            yield found, keep
    except KeyboardInterrupt:
        progress.say(f"  {INTERRUPTED}")
        raise
    finally:
        refresh()


def _as_asked(problems: list[Problem], gpu: Gpu, effort: str, root: Path | None) -> list[Problem]:
    """`problems` as calls compute them, after saying what cannot be done before anything is written."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise TuneError(f"effort is {effort!r}; allowed are {', '.join(EFFORTS)}")
    problems = list(dict.fromkeys(as_called(problem, gpu) for problem in problems))
    for problem in problems:
        default_config(problem, gpu)
    compile.nvrtc_version()
    view.check_writable(root)
    return problems


def _shares(problems: list[Problem], gpu: Gpu, calls: Mapping[Problem, float], progress: Progress) -> dict[Problem, Share]:
    """What each problem may use of the effort, which is said."""
    shares = spread.spread({problem: spread.expected_us(problem, gpu) for problem in problems}, calls)
    if len(problems) > 1:
        progress.say(spread.text(shares))
    return shares


def _measure(session: Session, problems: list[Problem], root: Path | None, keep, shares: Mapping[Problem, Share]) -> None:
    """Problems that share a static part follow each other, the small ones first: binaries and winners carry over."""
    roots = view.search_path() if root is None else (root, *view.search_path())
    known = {op: list(view.open_view(session.gpu, op, roots).records) for op in {p.op for p in problems}}
    for problem in sorted(problems, key=lambda p: (p.static.text, p.flops, p.text)):
        try:
            record = session.tune(problem, known[problem.op], shares[problem])
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
