"""Compiles configs in threads ahead of checks in other processes: what `correctness` and `repeatability` run on.

On the GPU each `Worker` holds a `Judge`, which may hang or crash without harm; without one, `simulate` does the check.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Callable, Iterable, NamedTuple, Sequence

from cover import Case

from autotune.cuda import compile
from autotune.check.verdict import Checker
from autotune.core.config import Config
from autotune.core.gpu import Gpu
from autotune.kernels import kernel_of
from autotune.core.problem import Static
from autotune.check.strides import GapWritten, laid_out, written_as
from autotune.tuner.worker import Worker

TARGET = "judge:Judge"
TIMEOUT_S = 180.0  # of one config: the first of all also compiles CuPy's own kernels
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


class Judge:
    """Lives in a worker process and owns CUDA device `device`. Inputs and references of the last case are kept."""

    def __init__(self, device: int = 0):
        import cupy

        self._cupy, self._device = cupy, device
        cupy.cuda.Device(device).use()
        cupy.cuda.runtime.free(0)
        self._key: tuple = ()
        self._checker: Checker | None = None

    def check(self, case: Case, config: Config, binary, kinds: tuple[str, ...], seed: int) -> Verdict:
        """Errors of CUDA pass through: the process is then of no more use."""
        from autotune.device import launch
        from autotune.check.verify import runner

        self._open(case, kinds, seed)
        try:
            verdict = self._checker(written_as(case.form, runner(case.problem, config, binary, self._device)))
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
        self._checker = Checker(case.problem, kinds, seed, self._cupy, sample, laid_out(case.form))
        self._key = case, kinds, seed


class OnGpu:
    """`Judge` in a process of its own, which is replaced when it hangs or crashes."""

    def __init__(self, device: int = 0, target: str = TARGET):
        self._worker = Worker(target, {"device": device})

    def __call__(self, unit: Unit, config: Config, binary) -> Verdict:
        reply = self._worker.call("check", unit.case, config, binary, unit.kinds, unit.seed, timeout=TIMEOUT_S)
        if reply.status == "done":
            return reply.value
        self._worker.kill()
        return Verdict(False, float("inf"), f"{reply.status}: {reply.message}")

    def close(self) -> None:
        self._worker.close()


class Simulated:
    """The check on the CPU, on a small problem of the same kind. Needs no binary."""

    def __call__(self, unit: Unit, config: Config, binary) -> Verdict:
        from autotune.simulator import shrunk, simulate

        asked = unit.case.problem
        problem = shrunk(asked, config)
        problem = replace(problem, batch=max(problem.batch, min(asked.batch, 2)))
        kernel = kernel_of(config)

        def run(inputs, out, lse) -> None:
            simulation = simulate(problem, config, inputs, out, lse, unit.seed)
            if not simulation.ok:
                raise Found(str(simulation.findings[0]))

        try:
            verdict = Checker(problem, unit.kinds, unit.seed, make=laid_out(unit.case.form))(written_as(unit.case.form, run))
        except (Found, GapWritten, compile.CompileError) as error:
            return Verdict(False, float("inf"), f"{problem} ({kernel.name}): {error}")
        return Verdict(verdict.ok, verdict.worst_ratio, verdict.message)

    def close(self) -> None:
        """Nothing to close."""


class Found(Exception):
    """What the simulator found."""


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
