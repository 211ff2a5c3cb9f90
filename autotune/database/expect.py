"""What time to expect of a config on a problem: the kernel's account of its own work, times what measurements say of it.

Measurements are times of configs on problems of one static part (`Point`): covers and records. For each the residual
log(time / account) is known. That of a config on another problem is what residuals of all configs are near there (the level),
plus how much better or worse than the level this config did on near problems. The less was measured of a config near by, the
more its expectation is drawn to the level, and the more is charged for doubt when configs are compared: a config serves
another problem only if what is known of it there is better than what is known of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Iterable, Mapping, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem
from ..kernels import KERNELS

NEAREST = 10  # points that are looked at: weights of others are small
PRIOR = 0.05  # weight of the level in a config's residual: a twentieth of a measurement of this very problem
DOUBT = 0.05  # log of what is charged for a config of which nothing was measured near by
KNOWN_GOOD = 0.5  # of it, for a default: its tile is known to be good everywhere
STRANGE = 0.3  # the same for a config that a cover of this static part did not time, which may be good near a record of it only
LEAST_DOUBT = 0.05  # that is left of it however much a record says
NEAR_BY = 0.6  # weight of such a record
FAR = 1e-4  # weight of a point however far it is


@dataclass(frozen=True)
class Point:
    """Times in us of configs, by family (`Kernel.family`), on one problem of one GPU. `whole`: of a cover, so that the mean over
    its configs says how fast the GPU was here; else of a record, whose configs are the best there are."""

    problem: Problem
    gpu: Gpu
    times: Mapping[tuple, float]
    whole: bool


@dataclass(frozen=True)
class Expectation:
    """`time_us` of `config`, fitted to the problem; `charged_us` is what configs are compared by. `account_us` is the kernel's own
    estimate; `support` the weight of what was measured of its family (1: of this very problem), `nearest` where."""

    config: Config
    time_us: float
    charged_us: float
    account_us: float
    support: float
    nearest: Problem | None
    source: object = field(default=None, compare=False)


def expectations(problem: Problem, gpu: Gpu, points: Sequence[Point], configs: Iterable[tuple[Config, object]],
                 default: Config | None) -> list[Expectation]:
    """What to expect of `default` and of each of `configs` (with where it is from), each family once, the best first."""
    whole = [point for point in points if point.whole]
    near = nearest(problem, gpu, whole or points)
    level, deltas = _residuals(near)
    covered = {family for point in whole for family in point.times}
    found: dict[tuple, Expectation] = {}
    for config, source in (*configs, *([(default, None)] if default else [])):
        kernel = KERNELS[config.kernel]
        family = kernel.family(config)
        if family in found or kernel.reject(problem, gpu) or kernel.illegal(problem.static, config, gpu):
            continue
        fitted = config if config is default else kernel.fitted(problem, config, gpu)
        account = kernel.account_us(problem, fitted, gpu)
        if whole and family not in covered:
            own = _beside_a_cover(family, problem, gpu, points, whole)
        else:
            own = [(weight, delta, point.problem) for (weight, point), rows in zip(near, deltas)
                   if (delta := rows.get(family)) is not None]
        support = sum(weight for weight, _, _ in own)
        residual = sum(weight * delta for weight, delta, _ in own) / (support + PRIOR)
        strange = whole and family not in covered
        most = STRANGE if strange else DOUBT * (KNOWN_GOOD if config is default else 1)
        doubt = max(most * PRIOR / (support + PRIOR), LEAST_DOUBT if strange else 0.0)
        time_us = account * math.exp(level + residual)
        where = max(own, key=lambda entry: entry[0])[2] if own else None
        found[family] = Expectation(fitted, time_us, time_us * math.exp(doubt), account, support, where, source)
    return sorted(found.values(), key=lambda e: (e.charged_us, e.config != default, e.config.text))


def _beside_a_cover(family: tuple, problem: Problem, gpu: Gpu, points: Sequence[Point],
                    whole: Sequence[Point]) -> list[tuple[float, float, Problem]]:
    """(weight, how far `family` was from the level that the cover has there, problem) of records that timed it near by. Of what
    the cover timed itself, a record says nothing that the cover does not: its configs are the best of their problem, so a mean of
    them is no level, and what is known of the others would only be blurred."""
    own = []
    for point in points:
        weight = 0.0 if point.whole or family not in point.times else _weight(distance(point.problem, problem, gpu))
        if weight >= NEAR_BY:
            level = _residuals(nearest(point.problem, gpu, whole))[0]
            own.append((weight, residual_of(point, family) - level, point.problem))
    return own


def nearest(problem: Problem, gpu: Gpu, points: Iterable[Point]) -> list[tuple[float, Point]]:
    """(weight, point) of the `NEAREST` points, nearest first."""
    weighed = [(_weight(distance(point.problem, problem, gpu)), point) for point in points]
    return sorted(weighed, key=lambda entry: (-entry[0], entry[1].problem.text))[:NEAREST]


def _weight(distance: float) -> float:
    return math.exp(-distance * distance) + FAR / (1 + distance)


def _residuals(near: Sequence[tuple[float, Point]]) -> tuple[float, list[dict[tuple, float]]]:
    """(level near the problem, by point how far each family is from the level there)."""
    levels, rows = [], []
    for _, point in near:
        residuals = {family: residual_of(point, family) for family in point.times}
        here = sorted(residuals.values())
        middle = here[len(here) // 2] if point.whole else sum(here) / len(here)
        levels.append(middle)
        rows.append({family: value - middle for family, value in residuals.items()})
    total = sum(weight for weight, _ in near)
    level = sum(weight * value for (weight, _), value in zip(near, levels)) / total if near else 0.0
    return level, rows


def residual_of(point: Point, family: tuple) -> float:
    """log(time / account) of one family on a point's problem."""
    return math.log(point.times[family] / _account(point.problem, family, point.gpu))


@lru_cache(maxsize=16384)
def _account(problem: Problem, family: tuple, gpu: Gpu) -> float:
    kernel = KERNELS[family[0]]
    values = dict(family[1]) | {name: next(p.values[0] for p in kernel.parameters if p.name == name) for name in kernel.sized}
    config = kernel.fitted(problem, kernel.config(problem.static, values), gpu)
    return kernel.account_us(problem, config, gpu)


def distance(a: Problem, b: Problem, gpu: Gpu) -> float:
    """How unlike two problems of one static part are; at 1 what was measured of one says a third of what it says of itself.
    A metric."""
    return math.dist(_features(a, gpu), _features(b, gpu))


@lru_cache(maxsize=4096)
def _features(problem: Problem, gpu: Gpu) -> tuple[float, ...]:
    """Coordinates that choose a config, each log2 over the steps by which it may differ."""
    def log2(value: float) -> float:
        return math.log2(max(value, 1))

    keys = problem.visible_pairs / max(problem.seqlen_q, 1)
    sets = problem.batch * problem.heads_kv
    page = log2(problem.page_size) / 4 if problem.page_size else 0.0
    if problem.op == "decode":
        return (log2(sets) / 1.5, log2(keys) / 1.5, log2(problem.group * problem.seqlen_q) / 3, *problem.bounds.features, page,
                min(log2(sets * keys), 24) / 3)
    rows = sets * problem.group * problem.seqlen_q
    return (log2(min(rows, gpu.sms * 64 * 32)) / 2, log2(problem.seqlen_q) / 2, log2(keys) / 2, log2(problem.group) / 2,
            *problem.bounds.features, page)
