"""Tuning without the GPU: compile the most promising configs and rank them by an estimate from what ptxas says of them.

The estimate is each kernel's `estimate_us`: resources and roofline, explicit, in its module. Records made here are
"predicted" and never stand in the way of a measured one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Callable, Iterator, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..kernels import candidates, default_config, kernel_of
from ..core.problem import Problem, Static
from ..database.record import Record
from . import builder
from .builder import Builder, Built
from .finalists import predicted_record
from .progress import Progress
from .seeds import predicted, worthwhile

WANTED = 10  # configs that compile without spilling, of all kernels together, besides the defaults
TRIED = 48  # configs compiled to find them: before compiling, the estimate cannot see spills
SECONDS_EACH = 40.0  # for one problem; problems that share a static part share binaries
SECONDS_ALL = 200.0  # for all problems of a call, so that a model takes under 5 minutes on 2 cores


def predict(problems: Sequence[Problem], gpu: Gpu, make: Builder, progress: Progress, keep: Callable[[Record], None],
            execute: Callable[[Problem, list], list]) -> None:
    """Gives `keep` a predicted record for each problem that some kernel can serve with a binary that does not spill.

    `execute` takes a problem and its ranking, and leaves out what is wrong: an `Executor`.
    When time is up, what is compiled by then is ranked; the default always is. Raises `CompilerMissing`, `CacheError`.
    """
    began = time.monotonic()
    good: dict[Static, dict[Config, Built]] = defaultdict(dict)  # what compiled for earlier problems
    with builder.pool(builder.threads(spare=0)) as pool:
        for n, problem in enumerate(problems):
            left = max(0.0, SECONDS_ALL - (time.monotonic() - began))
            deadline = time.monotonic() + min(SECONDS_EACH, 2 * left / (len(problems) - n))
            progress.problem(problem.text)
            ranked = execute(problem, _ranked(problem, gpu, make, pool, deadline, progress, good[problem.static]))
            if ranked:
                record = predicted_record(problem, gpu, ranked, default_config(problem, gpu))
                keep(record)
                progress.finished(f"predicted {record.time_us:.1f} us: {record.config}")
            else:
                progress.finished("no config compiles without spilling and is right, so nothing is recorded")


def _ranked(problem: Problem, gpu: Gpu, make: Builder, pool: ThreadPoolExecutor, deadline: float,
            progress: Progress, good: dict[Config, Built]) -> list[tuple[float, Built]]:
    """(estimate in us, binary) of the configs that compile without a flaw, best first. Adds them to `good`."""
    default = default_config(problem, gpu)
    configs = (config for config in _promising(problem, gpu) if config not in good and config != default)
    running: dict[Future, Config] = {} if default in good else {pool.submit(make.build, problem.static, default): default}
    try:
        while True:
            done = len(good) > WANTED or time.monotonic() > deadline
            while not done and len(running) < builder.threads(spare=0) + 1 and (config := next(configs, None)):
                running[pool.submit(make.build, problem.static, config)] = config
            if not running or (done and default not in running.values()):
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                config, built = running.pop(future), future.result()
                if isinstance(built, Built):
                    good[config] = built
                    progress.predicted(config, _estimate_us(problem, built, gpu))
                else:
                    progress.trial(config, built)
    finally:
        for future in running:
            future.cancel()
    ranked = [(_estimate_us(problem, built, gpu), built) for built in good.values()]
    return sorted(ranked, key=lambda entry: (entry[0], entry[1].config != default, entry[1].config.text))


def _promising(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """The best `TRIED` of the kernels that are worth it, by turns."""
    kernels = worthwhile(candidates(problem, gpu), problem, gpu)
    lists = [predicted(kernel, problem, gpu, kernel.space(problem, gpu), TRIED) for kernel in kernels]
    turns = [configs[n] for n in range(TRIED) for configs in lists if n < len(configs)]
    return iter(turns[:TRIED])


def _estimate_us(problem: Problem, built: Built, gpu: Gpu) -> float:
    registers = max(resources.registers for resources in built.binary.entries.values())
    return kernel_of(built.config).estimate_us(problem, built.config, gpu, registers)
