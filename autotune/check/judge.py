"""Many cases judged: configs are compiled in threads ahead of their checks, which several judges do side by side.

`run` takes any judges. On a GPU each is to hold a `Judge` in a process of its own, so that one may hang or crash without harm.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, Iterable, NamedTuple, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem, Static
from ..cuda import compile
from ..kernels import kernel_of
from .cases import Case
from .gradverdict import GradientChecker
from .strides import GapWritten, gradients_laid_out, gradients_written_as, laid_out, written_as
from .verdict import Checker

POOL_BYTES = 8 << 30  # of freed device memory that a process keeps
KEPT_BINARIES = 1000
SAMPLED_ABOVE_FLOPS = 5e10  # beyond this, a float64 reference of every block of rows takes seconds for all kinds of inputs
SAMPLE = 256  # (batch, head, 64 rows) blocks that are compared then; all must have been written
AHEAD = 24  # units whose configs are compiled before their turn


class Verdict(NamedTuple):
    """Of all kinds of inputs: error / allowed of the worst, and what is wrong, or "" if nothing is."""

    ok: bool
    worst_ratio: float
    message: str


@dataclass(frozen=True)
class Unit:
    """A case, the configs to check it with, defaults first, and the kinds and seed of its inputs."""

    case: Case
    configs: tuple[Config, ...]
    defaults: int
    kinds: tuple[str, ...]
    seed: int


def checker_of(case: Case, problem: Problem, *more) -> Checker | GradientChecker:
    """A checker of `problem` on arrays of the case's form."""
    if problem.op == "backward":
        return GradientChecker(problem, *more, make=gradients_laid_out(case.form))
    return Checker(problem, *more, make=laid_out(case.form))


def written(case: Case, run: Callable) -> Callable:
    """`run`, whose results are of the case's form."""
    return (gradients_written_as if case.problem.op == "backward" else written_as)(case.form, run)


class Judge:
    """Lives in a worker process and owns CUDA device `device`. Inputs and references of the last case are kept."""

    def __init__(self, device: int = 0):
        import cupy

        self._cupy, self._device = cupy, device
        cupy.cuda.Device(device).use()
        cupy.cuda.runtime.free(0)
        self._key: tuple = ()
        self._checker: Checker | GradientChecker | None = None

    def check(self, case: Case, config: Config, binary, kinds: tuple[str, ...], seed: int) -> Verdict:
        """Errors of CUDA pass through: the process is then of no more use."""
        from ..device import launch
        from .verify import runner

        self._open(case, kinds, seed)
        try:
            verdict = self._checker(written(case, runner(case.problem, config, binary, self._device)))
        except GapWritten as error:
            return Verdict(False, float("inf"), str(error))
        launch.load(binary, self._device).unload()
        return Verdict(verdict.ok, verdict.worst_ratio, verdict.message)

    def _open(self, case: Case, kinds: tuple[str, ...], seed: int) -> None:
        if self._key == (case, kinds, seed):
            return
        self._checker = None
        pool = self._cupy.get_default_memory_pool()
        if pool.total_bytes() > POOL_BYTES:
            pool.free_all_blocks()
        sample = SAMPLE if case.problem.flops > SAMPLED_ABOVE_FLOPS else None
        self._checker = checker_of(case, case.problem, kinds, seed, self._cupy, sample)
        self._key = case, kinds, seed


class Binaries:
    """Binaries of configs for one GPU, compiled in `threads`; configs that are compiled alike share one."""

    def __init__(self, gpu: Gpu, threads: int):
        self._gpu = gpu
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="compile")
        self._kept: OrderedDict[tuple, Future] = OrderedDict()

    def submit(self, static: Static, config: Config) -> Future:
        """Of the `Binary`, or the CompileError."""
        key = static, config.kernel, kernel_of(config).compile_key(config)
        future = self._kept.get(key)
        if future is None:
            future = self._kept[key] = self._pool.submit(compile.build, static, config, self._gpu)
            if len(self._kept) > KEPT_BINARIES:
                self._kept.popitem(last=False)
        return future

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def run(units: Iterable[Unit], binaries: Binaries | None, judges: Sequence[Callable], add: Callable[..., None],
        end: Callable[[Unit], None], over: Callable[[], bool]) -> None:
    """Each judge takes the next unit and its configs' binaries as they are ready. `add(unit, config, verdict, flaw)` is called
    from many threads with a `Verdict`, or None if the config was not run because of its flaw: it does not compile, or it spills
    and is no default. `end` is called after a unit. Units whose turn comes when time is `over` are left out.

    Raises what a judge raised, after the others have finished their units.
    """
    todo: queue.Queue = queue.Queue(AHEAD)
    broken: list[BaseException] = []

    def work(judge: Callable) -> None:
        try:
            while (item := todo.get()) is not None:
                if not broken and not over():
                    try:
                        _judge(judge, *item, add)
                        end(item[0])
                    except BaseException as error:
                        broken.append(error)
        finally:
            judge.close()

    threads = [threading.Thread(target=work, args=(judge,)) for judge in judges]
    for thread in threads:
        thread.start()
    try:
        for unit in units:
            if broken:
                break
            futures = [binaries.submit(unit.case.problem.static, config) if binaries else None for config in unit.configs]
            todo.put((unit, futures))
    except BaseException as error:
        broken.insert(0, error)
    for _ in threads:
        todo.put(None)
    for thread in threads:
        thread.join()
    if binaries:
        binaries.close()
    if broken:
        raise broken[0]


def _judge(judge: Callable, unit: Unit, futures: Sequence[Future | None], add: Callable) -> None:
    for number, (config, future) in enumerate(zip(unit.configs, futures)):
        try:
            binary = future.result() if future else None
        except compile.CompileError as error:
            add(unit, config, None, str(error))
            continue
        flaw = compile.flaw(binary) if binary else None
        run_it = flaw is None or number < unit.defaults  # defaults serve calls although they spill
        add(unit, config, judge(unit, config, binary) if run_it else None, flaw[1] if flaw else "")
