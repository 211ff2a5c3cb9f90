"""Where a search begins: winners of neighbouring problems, the default, and the best few by the kernel's own estimate."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter, ne
from typing import Callable, Iterable, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..kernels.base import Kernel
from ..kernels.reads import Remembered
from ..kernels.space import Space
from ..database.expect import distance
from ..core.problem import Problem
from ..database.record import Record
from .points import diverse

NEIGHBOURS = 3
PREDICTED = 10
OUTSIDER_PREDICTED = 2  # of a kernel whose best estimate is more than OUTSIDER times the best kernel's
OUTSIDER = 1.4
APART = 3  # single-step changes between two predicted seeds
HOPELESS = 4.0  # a kernel whose best estimate is this many times the best kernel's is not searched


def seeds(kernel: Kernel, problem: Problem, gpu: Gpu, records: Sequence[Record], predictions: Iterable[Config]) -> list[Config]:
    """Configs to try first, in order: winners of `records`, the default (always), and `predictions`. Those that are not in the
    kernel's space are for the search to drop."""
    near = sorted((r for r in records if r.problem.static.in_bf16 == problem.static.in_bf16 and r.config.kernel == kernel.name),
                  key=lambda r: (distance(r.problem, problem, gpu), r.problem.text))
    winners = [kernel.fitted(problem, record.config, gpu) for record in near]
    winners = list(dict.fromkeys(winners))[:NEIGHBOURS]
    return list(dict.fromkeys([*winners, kernel.default(problem, gpu), *predictions]))


def predicted(kernel: Kernel, problem: Problem, gpu: Gpu, space: Sequence[Config], count: int) -> list[Config]:
    """The `count` most promising of `space` by `estimate_us`, apart from each other, with the default's launch parameters but for
    those that go with compile parameters."""
    default, estimate = kernel.default(problem, gpu), estimates(kernel, problem, gpu)
    launch = {p.name: default[p.name] for p in kernel.parameters if p.kind == "launch" and not p.derived and not p.needs}
    skeletons = list(Space.of(kernel, space).launching(launch))
    guesses = [round(estimate(config), 3) for config in skeletons]
    changes = [sum(map(ne, config.items, default.items)) for config in skeletons]
    ranked = sorted(zip(guesses, changes, skeletons), key=itemgetter(0, 1))
    # Texts, which break ties, are made only for those that are looked at.
    by_text = (config for _, alike in groupby(ranked, itemgetter(0, 1))
               for config in sorted((config for _, _, config in alike), key=attrgetter("text")))
    return diverse(by_text, count, kernel.parameters, APART)


@lru_cache(maxsize=8)
def estimates(kernel: Kernel, problem: Problem, gpu: Gpu) -> Callable[[Config], float]:
    """`account_us`, run once where the values that it reads are the same: for 128 queries over 8192 keys 9,446 times, where
    `predicted` asks for 58,944 configs of `forward_wgmma` and a `Search` for another 18,816."""
    us = Remembered(lambda config: kernel.account_us(problem, config, gpu))
    return lambda config: us(dict(config.items))


def worthwhile(kernels: Sequence[Kernel], problem: Problem, gpu: Gpu) -> dict[Kernel, list[Config]]:
    """The predicted configs to begin with, for each of `kernels` whose best estimate is not hopelessly behind, in order."""
    tops = {kernel: predicted(kernel, problem, gpu, kernel.space(problem, gpu), PREDICTED) for kernel in kernels}
    best = {kernel: estimates(kernel, problem, gpu)(top[0]) for kernel, top in tops.items() if top}
    least = min(best.values(), default=0.0)
    return {kernel: tops[kernel][:PREDICTED if guess <= OUTSIDER * least else OUTSIDER_PREDICTED]
            for kernel, guess in best.items() if guess <= HOPELESS * least}
