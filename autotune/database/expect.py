"""What time to expect of a config on a problem: the kernel's account of its own work, times what measurements say of it.

Measurements are times of configs on problems of one static part (`Point`): of covers, or where there is none, of records. Of
each the residual log(time / account) is known, and where its launch stands among others (`Account.traits`): how blocks fill the
GPU, what they do, sizes, the config. Residuals are a Gaussian process over these places, of which those on a few near problems
are looked at (kriging). So a config is judged by what was measured of itself and of others in the same situation.
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
from ..kernels.traits import Account, sizes
from .kriging import Process, correlations

# Variances of a log, by maximum likelihood over 82 covers: of residuals; of what all configs on one problem share, beyond that;
# of one time beside another at the same place, which is what traits leave out, as the same launch again takes 0.5 % more or less.
SIGNAL = {"forward": 0.0176, "decode": 0.058, "backward": 0.0176}
SHARED = {"forward": 0.0008, "decode": 0.0008, "backward": 0.0008}
NOISE = {"forward": 0.0002, "decode": 0.0019, "backward": 0.0002}
NEAREST = 9  # points that are looked at: 70 times or so

# Bounds hold for 19 problems of 20 that were left out; the loss is that share of its bound's log.
DEVIATIONS = {"forward": 1.3, "decode": 1.6, "backward": 1.6}
LEAST_BOUND, LOSS_OF_BOUND = 0.02, 0.16
# Logs of what is charged, by what a config is judged by: for all that is not known of it, and for one that was timed nowhere
# near, such as a default. Beside a cover this serves problems of another seed best (docs/log.md).
DOUBT = {"cover": (0.2, 0.1), "records": (0.03, 0.0)}


@dataclass(frozen=True, eq=False)
class Point:
    """Times in us of configs, by family (`Kernel.family`), on one problem of one GPU."""

    problem: Problem
    gpu: Gpu
    times: Mapping[tuple, float]


@dataclass(frozen=True)
class Expectation:
    """`time_us` of `config`, fitted to the problem; `charged_us` is what configs are compared by. `account_us` is the kernel's
    own estimate; `support` the share of what can be known of it that was measured, `nearest` the nearest problem on which it
    was timed itself."""

    config: Config
    time_us: float
    charged_us: float
    account_us: float
    support: float
    nearest: Problem | None
    source: object = field(default=None, compare=False)


def expectations(problem: Problem, gpu: Gpu, points: Sequence[Point], configs: Iterable[tuple[Config, object]],
                 doubt: tuple[float, float] = DOUBT["cover"]) -> list[Expectation]:
    """What to expect of each of `configs` (with where it is from), each family once, the best first."""
    return _expected(problem, gpu, _Surroundings(problem, gpu, points), configs, doubt)


def _expected(problem: Problem, gpu: Gpu, surroundings: _Surroundings, configs: Iterable[tuple[Config, object]],
              doubt: tuple[float, float]) -> list[Expectation]:
    found: dict[tuple, Expectation] = {}
    for config, source in configs:
        kernel = KERNELS[config.kernel]
        family = kernel.family(config)
        if family in found or kernel.reject(problem, gpu) or kernel.illegal(problem.static, config, gpu):
            continue
        fitted = kernel.fitted(problem, config, gpu)
        account = kernel.account(problem, fitted, gpu)
        residual, support, where = surroundings.of(family, account.traits)
        time_us = account.time_us * math.exp(surroundings.level + residual)
        charged_us = time_us * math.exp(doubt[0] * (1 - support) + (0 if where else doubt[1]))
        found[family] = Expectation(fitted, time_us, charged_us, account.time_us, support, where, source)
    return sorted(found.values(), key=lambda e: (e.charged_us, e.config.text))


def over_bucket(problem: Problem, gpu: Gpu, points: Sequence[Point], configs: Sequence[tuple[Config, object]],
                doubt: tuple[float, float]) -> list[Expectation]:
    """`expectations` of the problem that stands for a bucket, that first which is best on average over both ends: what is good
    for one only is not chosen."""
    surroundings, least = _Surroundings(problem, gpu, points), problem.least_of_bucket()
    found = _expected(problem, gpu, surroundings, configs, doubt)
    if least != problem:
        others = {_family(other): other.charged_us for other in _expected(least, gpu, surroundings, configs, doubt)}
        most = max(others.values(), default=1.0)
        found.sort(key=lambda e: (e.charged_us * others.get(_family(e), most), e.config.text))
    return found


def _family(expectation: Expectation) -> tuple:
    return KERNELS[expectation.config.kernel].family(expectation.config)


def loss_of(found: Sequence[Expectation]) -> tuple[float, float]:
    """(time to expect of the first of `found` in units of the fastest config's, its bound). Another may be faster than is
    expected by so many deviations of what is known of both."""
    chosen, bound, op = found[0], LEAST_BOUND, KERNELS[found[0].config.kernel].op
    for other in (other for other in found[1:] if other.nearest):
        doubt = SIGNAL[op] * (2 - chosen.support - other.support) + 2 * NOISE[op]
        bound = max(bound, DEVIATIONS[op] * doubt**0.5 - math.log(other.time_us / chosen.time_us))
    return math.exp(LOSS_OF_BOUND * bound), math.exp(bound)


class _Surroundings:
    """What the points nearest to a problem say."""

    def __init__(self, problem: Problem, gpu: Gpu, points: Iterable[Point]):
        place = sizes(problem, gpu)
        near = sorted(((math.dist(sizes(point.problem, gpu), place), point.problem.text, n, point)
                       for n, point in enumerate(points)), key=lambda entry: entry[:3])[:NEAREST]
        self._problems: dict[tuple, Problem] = {}  # family -> the nearest problem on which it was timed
        for *_, point in near:
            for family in point.times:
                self._problems.setdefault(family, point.problem)
        self._known = _known(tuple(point for *_, point in sorted(near, key=lambda entry: entry[2])))
        self.level = self._known.level

    def of(self, family: tuple, traits: tuple[float, ...]) -> tuple[float, float, Problem | None]:
        """(how far the residual of `family` is from the level, the share of that which is known, the nearest problem on which it
        was timed)."""
        residual, known = self._known.at(family[0], traits)
        return residual, known, self._problems.get(family)


class _Known:
    """The residuals of some points."""

    def __init__(self, points: Sequence[Point]):
        self._op = points[0].problem.op if points else "forward"
        self._places: list[tuple[str, tuple[float, ...]]] = []  # of times: kernel and traits
        shared, residuals = [], []
        for n, point in enumerate(points):
            for family, time_us in point.times.items():
                account = _account(point.problem, family, point.gpu)
                self._places.append((family[0], account.traits))
                shared.append(n)
                residuals.append(math.log(time_us / account.time_us))
        self.level = sum(residuals) / len(residuals) if residuals else 0.0
        lower = [self._to_known(*mine, n) for n, mine in enumerate(self._places)]
        for n, row in enumerate(lower):
            of_point = shared.index(shared[n])  # and those that follow
            row[of_point:] = [value + SHARED[self._op] for value in row[of_point:]]
            row.append(SIGNAL[self._op] + SHARED[self._op] + NOISE[self._op])
        self._process = Process(lower, [residual - self.level for residual in residuals])

    def _to_known(self, kernel: str, traits: tuple[float, ...], count: int) -> list[float]:
        """Covariances of a time there with the first `count` times."""
        signal, others = SIGNAL[self._op], [theirs if of == kernel else None for of, theirs in self._places[:count]]
        return [signal * correlation for correlation in correlations(traits, others)]

    def at(self, kernel: str, traits: tuple[float, ...]) -> tuple[float, float]:
        """(how far a residual there is from the level, the share of that which is known)."""
        residual, known = self._process.at(self._to_known(kernel, traits, len(self._places)))
        return residual, known / SIGNAL[self._op]


@lru_cache(maxsize=64)  # of 80 KB: the 7,936 buckets of a model that is prepared have 1,241 neighbourhoods, one after another
def _known(points: tuple[Point, ...]) -> _Known:
    return _Known(points)


@lru_cache(maxsize=16384)
def _account(problem: Problem, family: tuple, gpu: Gpu) -> Account:
    kernel = KERNELS[family[0]]
    return kernel.account(problem, kernel.fitted(problem, _any_of(problem.static, family), gpu), gpu)


@lru_cache(maxsize=1024)
def _any_of(static: Static, family: tuple) -> Config:
    """A config of `family`."""
    kernel = KERNELS[family[0]]
    values = dict(family[1]) | {name: next(p.values[0] for p in kernel.parameters if p.name == name) for name in kernel.sized}
    return kernel.config(static, values)


def distance(a: Problem, b: Problem, gpu: Gpu) -> float:
    """How unlike the sizes of two problems of one static part are. A metric."""
    return math.dist(sizes(a, gpu), sizes(b, gpu))
