"""Where a search begins: winners of neighbouring problems, the default, and the best few by the kernel's own estimate."""

from __future__ import annotations

from typing import Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..kernels.base import Kernel
from ..database.expect import distance
from ..core.problem import Problem
from ..database.record import Record
from .search import diverse

NEIGHBOURS = 3
PREDICTED = 10
OUTSIDER_PREDICTED = 2  # of a kernel whose best estimate is more than OUTSIDER times the best kernel's
OUTSIDER = 1.4
APART = 3  # single-step changes between two predicted seeds
HOPELESS = 4.0  # a kernel whose best estimate is this many times the best kernel's is not searched


def seeds(kernel: Kernel, problem: Problem, gpu: Gpu, space: Sequence[Config], records: Sequence[Record],
          count: int = PREDICTED) -> list[Config]:
    """Configs to try first, in order: winners of `records`, the default (always), and `count` predicted ones. Those that are
    not in `space` are for the search to drop."""
    default = kernel.default(problem, gpu)
    near = sorted((r for r in records if r.problem.static.in_bf16 == problem.static.in_bf16 and r.config.kernel == kernel.name),
                  key=lambda r: (distance(r.problem, problem, gpu), r.problem.text))
    winners = [kernel.fitted(problem, record.config, gpu) for record in near]
    winners = list(dict.fromkeys(winners))[:NEIGHBOURS]
    return list(dict.fromkeys([*winners, default, *predicted(kernel, problem, gpu, space, count)]))


def predicted(kernel: Kernel, problem: Problem, gpu: Gpu, space: Sequence[Config], count: int) -> list[Config]:
    """The `count` most promising of `space` by `estimate_us`, apart from each other, with the default's launch parameters but for
    those that go with compile parameters."""
    default = kernel.default(problem, gpu)
    launch = {(p.name, default[p.name]) for p in kernel.parameters if p.kind == "launch" and not p.derived and not p.needs}
    skeletons = [config for config in space if launch.issubset(config.items)]
    changes = {config: sum(config[name] != value for name, value in default.items) for config in skeletons}
    guesses = {config: round(kernel.account_us(problem, config, gpu), 3) for config in skeletons}
    ranked = sorted(skeletons, key=lambda config: (guesses[config], changes[config], config.text))
    return diverse(ranked, count, kernel.parameters, APART)


def worthwhile(kernels: Sequence[Kernel], problem: Problem, gpu: Gpu) -> dict[Kernel, int]:
    """How many predicted configs to begin with, for each of `kernels` whose best estimate is not hopelessly behind, in order."""
    best = {}
    for kernel in kernels:
        top = predicted(kernel, problem, gpu, kernel.space(problem, gpu), 1)
        if top:
            best[kernel] = kernel.account_us(problem, top[0], gpu)
    least = min(best.values(), default=0.0)
    return {kernel: PREDICTED if guess <= OUTSIDER * least else OUTSIDER_PREDICTED
            for kernel, guess in best.items() if guess <= HOPELESS * least}
