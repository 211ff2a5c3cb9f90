"""What time to expect of a config on a problem: the kernel's account of its own work, times what measurements say of it.

Measurements are times of configs on problems of one static part (`Point`): of covers, or where there is none, of records. For
each the residual log(time / account) is known. That of a config on another problem is what residuals of all configs are near
there (the level), plus how much better or worse than the level this config should be: a Gaussian process over problems, of
which a few near ones are looked at (kriging). So the less was measured of a config near by, the more its expectation is drawn
to the level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Iterable, Mapping, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem, Static
from ..kernels import KERNELS
from .kriging import correlation, weights_of

# How far a config is from the level, as variances of a log. Chosen by leaving out, over 77 covers (benchmarks/replayed.py), where
# twice or half as much makes no difference: by 0.1, of which half is still the same 4 to 8 octaves of a size further, and 0.05
# from one time to the next, mostly a few that are 0.2 apart, for where blocks come to stand.
SIGNAL = 0.01
NOISE = {"forward": 0.0015, "decode": 0.0025, "backward": 0.0015}
NEAREST = 12  # points that are looked at: all 24 to 51 of a cover say no more

# Bounds hold for 19 problems of 20 that were left out, with half a percent to spare; the loss is that share of its bound's log.
DEVIATIONS = {"forward": 1.6, "decode": 2.1, "backward": 2.1}
LEAST_BOUND, LOSS_OF_BOUND = 0.02, 0.16
# Log of what is charged for a config of which nothing was measured, such as a default. Beside a cover, in whose race defaults
# were, it must be much faster by its account: as blocks that share keys are, where a cover has none.
DOUBT = {"cover": 0.35, "records": 0.03}


@dataclass(frozen=True)
class Point:
    """Times in us of configs, by family (`Kernel.family`), on one problem of one GPU."""

    problem: Problem
    gpu: Gpu
    times: Mapping[tuple, float]


@dataclass(frozen=True)
class Expectation:
    """`time_us` of `config`, fitted to the problem; `charged_us` is what configs are compared by. `account_us` is the kernel's
    own estimate; `support` the share of what can be known that was measured of its family, `nearest` where."""

    config: Config
    time_us: float
    charged_us: float
    account_us: float
    support: float
    nearest: Problem | None
    source: object = field(default=None, compare=False)


def expectations(problem: Problem, gpu: Gpu, points: Sequence[Point], configs: Iterable[tuple[Config, object]],
                 doubt: float = DOUBT["cover"]) -> list[Expectation]:
    """What to expect of each of `configs` (with where it is from), each family once, the best first."""
    surroundings = _Surroundings(problem, gpu, points)
    found: dict[tuple, Expectation] = {}
    for config, source in configs:
        kernel = KERNELS[config.kernel]
        family = kernel.family(config)
        if family in found or kernel.reject(problem, gpu) or kernel.illegal(problem.static, config, gpu):
            continue
        fitted = kernel.fitted(problem, config, gpu)
        account = kernel.account_us(problem, fitted, gpu)
        residual, support, where = surroundings.of(family)
        time_us = account * math.exp(surroundings.level + residual)
        charged_us = time_us * math.exp(doubt * (1 - support))
        found[family] = Expectation(fitted, time_us, charged_us, account, support, where, source)
    return sorted(found.values(), key=lambda e: (e.charged_us, e.config.text))


def over_bucket(problem: Problem, gpu: Gpu, points: Sequence[Point], configs: Sequence[tuple[Config, object]],
                doubt: float) -> list[Expectation]:
    """`expectations` of the problem that stands for a bucket, that first which is best on average over both ends: what is good
    for one only is not chosen."""
    found, least = expectations(problem, gpu, points, configs, doubt), problem.least_of_bucket()
    if least != problem:
        others = {_family(other): other.charged_us for other in expectations(least, gpu, points, configs, doubt)}
        most = max(others.values(), default=1.0)
        found.sort(key=lambda e: (e.charged_us * others.get(_family(e), most), e.config.text))
    return found


def _family(expectation: Expectation) -> tuple:
    return KERNELS[expectation.config.kernel].family(expectation.config)


def loss_of(found: Sequence[Expectation]) -> tuple[float, float]:
    """(time to expect of the first of `found` in units of the fastest config's, its bound). Another may be faster than is
    expected by so many deviations of what is known of both."""
    chosen, bound, op = found[0], LEAST_BOUND, KERNELS[found[0].config.kernel].op
    for other in (other for other in found[1:] if other.support):
        doubt = SIGNAL * (2 - chosen.support - other.support) + 2 * NOISE[op]
        bound = max(bound, DEVIATIONS[op] * doubt**0.5 - math.log(other.time_us / chosen.time_us))
    return math.exp(LOSS_OF_BOUND * bound), math.exp(bound)


class _Surroundings:
    """What the points nearest to a problem say."""

    def __init__(self, problem: Problem, gpu: Gpu, points: Iterable[Point]):
        place = features(problem, gpu)
        distances = sorted(((math.dist(features(point.problem, gpu), place), point.problem.text, n, point)
                            for n, point in enumerate(points)), key=lambda entry: entry[:3])[:NEAREST]
        self._places = [features(point.problem, gpu) for *_, point in distances]
        self._near = [point for *_, point in distances]
        self._to_here = [SIGNAL * correlation(distance) for distance, *_ in distances]
        self._noise = NOISE[problem.op]
        residuals = [{family: residual_of(point, family) for family in point.times} for point in self._near]
        levels = [sum(rows.values()) / len(rows) for rows in residuals]
        self._deltas = [{family: value - level for family, value in rows.items()} for rows, level in zip(residuals, levels)]
        self._weights: dict[tuple, list[float]] = {}
        total = sum(self._to_here)
        self.level = sum(weight * level for weight, level in zip(self._to_here, levels)) / total if total else 0.0

    def of(self, family: tuple) -> tuple[float, float, Problem | None]:
        """(how far `family` is from the level here, the share of that which is known, the nearest problem of which it is)."""
        timed = tuple(n for n, deltas in enumerate(self._deltas) if family in deltas)
        if not timed:
            return 0.0, 0.0, None
        if timed not in self._weights:
            self._weights[timed] = weights_of([self._places[n] for n in timed], [self._to_here[n] for n in timed], SIGNAL,
                                              self._noise)
        weights = self._weights[timed]
        residual = sum(weight * self._deltas[n][family] for weight, n in zip(weights, timed))
        known = sum(weight * self._to_here[n] for weight, n in zip(weights, timed)) / SIGNAL
        return residual, known, self._near[timed[0]].problem


def residual_of(point: Point, family: tuple) -> float:
    """log(time / account) of one family on a point's problem."""
    return math.log(point.times[family] / _account(point.problem, family, point.gpu))


@lru_cache(maxsize=16384)
def _account(problem: Problem, family: tuple, gpu: Gpu) -> float:
    kernel = KERNELS[family[0]]
    return kernel.account_us(problem, kernel.fitted(problem, _any_of(problem.static, family), gpu), gpu)


@lru_cache(maxsize=1024)
def _any_of(static: Static, family: tuple) -> Config:
    """A config of `family`."""
    kernel = KERNELS[family[0]]
    values = dict(family[1]) | {name: next(p.values[0] for p in kernel.parameters if p.name == name) for name in kernel.sized}
    return kernel.config(static, values)


def distance(a: Problem, b: Problem, gpu: Gpu) -> float:
    """How unlike two problems of one static part are: at 1 residuals of one have half to do with those of the other. A metric."""
    return math.dist(features(a, gpu), features(b, gpu))


@lru_cache(maxsize=4096)
def features(problem: Problem, gpu: Gpu) -> tuple[float, ...]:
    """Coordinates that choose a config, each log2 over the octaves by which it may differ. What an account says exactly, such as
    rounds of blocks, need not stand here."""
    def log2(value: float) -> float:
        return math.log2(max(value, 1))

    keys = problem.visible_pairs / max(problem.seqlen_q, 1)
    sets = problem.batch * problem.heads_kv
    sides = [side / 2 for side in problem.bounds.features]
    page = log2(problem.page_size) / 8
    if problem.op == "decode":
        return (log2(sets) / 4, log2(keys) / 4, log2(problem.group * problem.seqlen_q) / 8, *sides, page)
    rows = sets * problem.group * problem.seqlen_q
    return (log2(min(rows, gpu.sms * 64 * 32)) / 8, log2(problem.seqlen_q) / 12, log2(keys) / 6, log2(problem.group) / 12, *sides,
            page)
