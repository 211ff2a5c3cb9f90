"""What to expect of configs that were not measured: a Gaussian process over those that were. Knows nothing of GPUs.

log(time) is the kernel's own estimate (`prior`), plus a level, plus a residual. Residuals of two configs are the more alike the
fewer single-step changes lie between them: a part of the covariance is a sum over parameters (each has an effect of its own), a
part falls with all changes together (they interact), and a part is each config's own: only measuring it tells. How much of each,
and how far likeness reaches, is what makes the measured times most likely (Rasmussen & Williams 2006, chapter 5), out of
`SHAPES`. Deviations are widened if leaving each measurement out in turn shows that they are too small. What a config may gain is
its expected improvement on the best time (Jones, Schonlau & Welch 1998), times the chance that it works at all, which is the
share of working ones around it.
"""

from __future__ import annotations

import math
from typing import Sequence

import numpy as np

NOISE = 0.003  # of one measurement of a race: standard deviation of log(time)
LEVEL = 4.0  # variance of the level: nothing is known of it
SLOPE = 0.3  # standard deviation of how much more or less than the estimate says its differences are worth
REACHES = {0.5: 1.5, 1.5: 4.0}  # steps: of one parameter, and of all together
SHAPES = tuple((own, share, *reach) for own in (0.03, 0.15, 0.4) for share in (0.3, 0.7) for reach in REACHES.items())
SCALES = (0.001, 0.003, 0.01, 0.03, 0.06, 0.12, 0.25)  # standard deviations of the residual
USUAL = 0.08  # of them: so far off the estimates of kernels are on an H200 (covers). Others are less likely, by log-normal odds
ENOUGH = 5  # measurements to judge the fit by
WORKS, DOUBTS = 0.9, 1.0  # the share of configs that work before any was tried, and how many tries that is worth


class Likeness:
    """How alike configs are. `ordered` says which parameters are numbers, whose steps are counted; others are alike or not.

    Configs become vectors whose products are what is wanted, so that thousands are compared with a hundred in a millisecond.
    """

    def __init__(self, counts: Sequence[int], ordered: Sequence[bool]):
        """`counts`: values of each parameter."""
        steps = [np.abs(np.subtract.outer(range(n), range(n))).astype(float) for n in counts]
        steps = [table if number else np.minimum(table, 1) for table, number in zip(steps, ordered)]
        # of a number the steps between i and j are the places where 1..10..0 and 1..1110..0 differ
        codes = [np.tril(np.ones((n, n)), -1) if number else np.eye(n) * np.sqrt(0.5) for n, number in zip(counts, ordered)]
        factors = [[np.linalg.cholesky(np.exp(-table / reach)) / math.sqrt(len(counts)) for table in steps] for reach in REACHES]
        self._tables = [[table.astype(np.float32) for table in tables] for tables in (codes, *factors)]
        self._width = sum(counts)

    @property
    def width(self) -> int:
        """Of a vector."""
        return self._width * len(self._tables)

    def vectors(self, points: np.ndarray) -> np.ndarray:
        """(n, width) float32 of `points`, (n, parameters) of value indices."""
        return np.concatenate([table[column] for tables in self._tables for table, column in zip(tables, points.T)], axis=1)

    def steps(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """(some, others): single-step changes."""
        one, other = some[:, :self._width], others[:, :self._width]
        return (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * _product(one, other)

    def each(self, some: np.ndarray, others: np.ndarray, reach: float) -> np.ndarray:
        """(some, others): the mean over parameters of how alike their values are, at most 1."""
        begin = self._width * (1 + list(REACHES).index(reach))
        return _product(some[:, begin:begin + self._width], others[:, begin:begin + self._width])


class Surrogate:
    """Fitted to `points`, vectors of a `Likeness`, with `times_us` (nan: it failed) and `prior`, (n,) log estimates.

    `shape` is that of one that was fitted to about the same (None: chosen anew, which takes 48 times as long).
    """

    def __init__(self, likeness: Likeness, points: np.ndarray, times_us: np.ndarray, prior: np.ndarray,
                 shape: tuple[tuple[float, ...], float] | None = None):
        self._likeness, self._points = likeness, points
        self._failed = np.isnan(times_us)
        ok = ~self._failed
        self._ok_points, self._log = points[ok], np.log(times_us[ok])
        self._centre = prior[ok].mean() if ok.any() else 0.0
        self._prior = prior[ok] - self._centre
        self._rest = self._log - self._prior - (self._log - self._prior).mean() if ok.any() else self._log
        self.level = float((self._log - self._prior).mean()) if ok.any() else 0.0
        self._fit([shape] if shape else [(shape, scale) for shape in SHAPES for scale in SCALES])

    def _fit(self, choices: Sequence[tuple[tuple[float, ...], float]]) -> None:
        n = len(self._log)
        trend = LEVEL * np.ones((n, n)) + SLOPE**2 * np.outer(self._prior, self._prior) + NOISE**2 * np.eye(n)
        alike = {shape: self._alike(self._ok_points, shape) + shape[0] * np.eye(n) for shape in {shape for shape, _ in choices}}
        best = None
        for shape, scale in choices:
            lower = np.linalg.cholesky(trend + scale**2 * alike[shape])
            half = np.linalg.solve(lower, self._rest)
            likelihood = -0.5 * half @ half - np.log(np.diag(lower)).sum() - 0.5 * math.log(scale / USUAL)**2
            if best is None or likelihood > best[0]:
                best = likelihood, shape, scale, lower, half
        _, self._shape, self._scale, lower, half = best
        self.shape = self._shape, self._scale
        self._inverse = np.linalg.inv(lower)
        self._weights = self._inverse.T @ half
        alone = (self._inverse**2).sum(axis=0)  # leaving each out in turn: how far off, over how far off it was said to be
        left_out = self._weights / np.sqrt(alone) if n >= ENOUGH else np.ones(1)
        self._doubt = max(1.0, float(np.sqrt((left_out**2).mean())))

    def expect(self, points: np.ndarray, prior: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(mean, standard deviation) of log(time in us) at `points`."""
        prior = prior - self._centre
        covariance = self._covariance(points, prior)
        mean = self.level + prior + covariance @ self._weights
        own = LEVEL + SLOPE**2 * prior**2 + self._scale**2
        spent = (_product(covariance, self._inverse) ** 2).sum(axis=1)
        return mean, self._doubt * np.sqrt(np.maximum(own - spent, 1e-12))

    def works(self, points: np.ndarray) -> np.ndarray:
        """The chance that a config at each of `points` compiles without spills and is right: the share of working ones
        around it."""
        if not self._failed.any():
            return np.ones(len(points))
        near = np.exp(-self._likeness.steps(points, self._points))
        return (WORKS * DOUBTS + near @ ~self._failed) / (DOUBTS + near.sum(axis=1))

    def gains(self, points: np.ndarray, prior: np.ndarray, best_us: float) -> np.ndarray:
        """The expected gain of measuring each of `points`, as a share of `best_us`."""
        mean, deviation = self.expect(points, prior)
        ahead = math.log(best_us) - mean
        z = ahead / deviation
        gains = ahead * _cdf(z) + deviation * np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return np.maximum(gains, 0.0) * self.works(points)

    def _covariance(self, points: np.ndarray, prior: np.ndarray) -> np.ndarray:
        return LEVEL + SLOPE**2 * np.outer(prior, self._prior) + self._scale**2 * self._alike(points, self._shape)

    def _alike(self, points: np.ndarray, shape: tuple[float, ...]) -> np.ndarray:
        """Covariance of residuals with those of what worked, as a share of their variance, without what is each config's own."""
        own, share, reach, reach_all = shape
        each = self._likeness.each(points, self._ok_points, reach)
        return (1 - own) * (share * each + (1 - share) * np.exp(-self._likeness.steps(points, self._ok_points) / reach_all))


def _product(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """some @ others.T, not by BLAS: its threads would spin on the cores that compile."""
    return np.einsum("ij,kj->ik", some, others)


def _cdf(z: np.ndarray) -> np.ndarray:
    """Of the normal distribution, to 1e-7 (Abramowitz & Stegun 26.2.17)."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    tail = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) * t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (
        -1.821255978 + t * 1.330274429))))
    return np.where(z > 0, 1 - tail, tail)
