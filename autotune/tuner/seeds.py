"""Where a search begins: winners of neighbouring problems, the default, and the best few by the kernel's own estimate."""

from __future__ import annotations

from typing import Sequence

from ..config import Config
from ..gpu import Gpu
from ..kernels.base import Kernel
from ..lookup import distance
from ..problem import Problem
from ..records import Record
from .search import diverse

NEIGHBOURS = 3
PREDICTED = 10
APART = 3  # single-step changes between two predicted seeds
HOPELESS = 4.0  # a kernel whose best estimate is this many times the best kernel's is not searched


def seeds(kernel: Kernel, problem: Problem, gpu: Gpu, space: Sequence[Config], records: Sequence[Record]) -> list[Config]:
    """Configs to try first, in order, all in `space`. The default is always one of them."""
    default = kernel.default(problem, gpu)
    near = sorted((r for r in records if r.problem.static == problem.static and r.config.kernel == kernel.name),
                  key=lambda r: (distance(r.problem, problem, gpu.sms), r.problem.text))
    winners = [kernel.adapted(problem, record.config, gpu) or record.config for record in near]
    winners = list(dict.fromkeys(winners))[:NEIGHBOURS]
    legal = set(space)
    return [config for config in dict.fromkeys([*winners, default, *predicted(kernel, problem, gpu, space, PREDICTED)])
            if config in legal]


def predicted(kernel: Kernel, problem: Problem, gpu: Gpu, space: Sequence[Config], count: int) -> list[Config]:
    """The `count` most promising of `space` by `estimate_us`, apart from each other, with the default's launch parameters but for
    those that go with compile parameters."""
    default = kernel.default(problem, gpu)
    launch = [p.name for p in kernel.parameters if p.kind == "launch" and not p.derived and not p.needs]
    skeletons = [config for config in space if all(config[name] == default[name] for name in launch)]
    changes = {config: sum(config[name] != value for name, value in default.items) for config in skeletons}
    guesses = {config: round(guess_us(kernel, problem, config, gpu), 3) for config in skeletons}
    ranked = sorted(skeletons, key=lambda config: (guesses[config], changes[config], config.text))
    return diverse(ranked, count, kernel.parameters, APART)


def guess_us(kernel: Kernel, problem: Problem, config: Config, gpu: Gpu) -> float:
    """`estimate_us` before compiling: with as many registers as a thread can have at most."""
    threads = max(step.block for step in kernel.plan(problem, config))
    return kernel.estimate_us(problem, config, gpu, min(255, gpu["registers_per_sm"] // threads))


def worthwhile(kernels: Sequence[Kernel], problem: Problem, gpu: Gpu) -> list[Kernel]:
    """`kernels` without those whose estimate for their best config is hopelessly behind. Keeps the order."""
    best = {}
    for kernel in kernels:
        top = predicted(kernel, problem, gpu, kernel.space(problem, gpu), 1)
        if top:
            best[kernel.name] = guess_us(kernel, problem, top[0], gpu)
    return [kernel for kernel in kernels if kernel.name in best and best[kernel.name] <= HOPELESS * min(best.values())]
