"""Tuning without the GPU: compile the most promising configs and rank them by an estimate from what ptxas says of them.

The estimate is each kernel's `estimate_us`: resources and roofline, explicit, in its module. Records made here are
"predicted" and never stand in the way of a measured one.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Callable, Sequence

from ..gpu import Gpu
from ..kernels import candidates, kernel_of
from ..problem import Problem
from ..records import Record
from . import builder
from .builder import Builder, Built
from .finalists import predicted_record
from .progress import Progress
from .seeds import predicted, worthwhile

CANDIDATES = 12  # configs compiled for each kernel and problem, and each kernel's default
SECONDS_EACH = 40.0  # compile time for one problem; problems that share a static part share binaries
SECONDS_ALL = 210.0  # for all problems of a call, so that a model takes under 5 minutes on 2 cores


def predict(problems: Sequence[Problem], gpu: Gpu, make: Builder, progress: Progress, keep: Callable[[Record], None]) -> None:
    """Gives `keep` a predicted record for each problem that some kernel can serve with a binary that does not spill.

    When time is up, what is compiled by then is ranked; at least the default always is. Raises `CompilerMissing`.
    """
    began = time.monotonic()
    with builder.pool() as pool:
        for n, problem in enumerate(problems):
            left = SECONDS_ALL - (time.monotonic() - began)
            record = _predict(problem, gpu, make, pool, min(SECONDS_EACH, max(left, 0) / (len(problems) - n) * 2), progress)
            if record:
                keep(record)


def _predict(problem: Problem, gpu: Gpu, make: Builder, pool: ThreadPoolExecutor, seconds: float,
             progress: Progress) -> Record | None:
    kernels = worthwhile(candidates(problem, gpu), problem, gpu)
    defaults = [kernel.default(problem, gpu) for kernel in kernels]
    configs = list(dict.fromkeys(defaults + [config for kernel in kernels for config in
                                             predicted(kernel, problem, gpu, kernel.space(problem, gpu), CANDIDATES)]))
    progress.problem(problem.text, len(configs))
    deadline = time.monotonic() + seconds
    running = {pool.submit(make.build, problem.static, config): config for config in configs}
    ranked: list[tuple[float, int, Built]] = []
    try:
        while running:
            must = any(config in defaults for config in running.values())
            done, _ = wait(running, None if must else max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                config, built = running.pop(future), future.result()
                if isinstance(built, Built):
                    time_us = _estimate_us(problem, built, gpu)
                    ranked.append((time_us, configs.index(config), built))
                    progress.predicted(config, time_us)
                else:
                    progress.trial(config, built)
    finally:
        for future in running:
            future.cancel()
    if not ranked:
        progress.finished("no config compiles without spilling, so nothing is recorded")
        return None
    record = predicted_record(problem, gpu, sorted(ranked, key=lambda entry: entry[:2]), defaults[0])
    progress.finished(f"predicted {record.time_us:.1f} us: {record.config}")
    return record


def _estimate_us(problem: Problem, built: Built, gpu: Gpu) -> float:
    registers = max(resources.registers for resources in built.binary.entries.values())
    return kernel_of(built.config).estimate_us(problem, built.config, gpu, registers)
