"""Interpolation between measurements: a Gaussian process over a few points. Plain Python, as a lookup must not wait for numpy to
be imported, and sixty points take a few milliseconds."""

from __future__ import annotations

import math
from operator import mul
from typing import Iterable, Sequence

ROOT3 = math.sqrt(3)


def correlations(place: Sequence[float], others: Iterable[Sequence[float] | None]) -> list[float]:
    """Of the value at a place with those at others: Matern 3/2, 0.48 at distance 1. None is a place that has nothing to do with
    it."""
    dist, exp = math.dist, math.exp
    return [0.0 if other is None else (1 + (scaled := ROOT3 * dist(place, other))) * exp(-scaled) for other in others]


class Process:
    """A Gaussian process of mean 0, of whose values some are known: their covariances are `lower`, a lower triangle, which is
    overwritten."""

    def __init__(self, lower: list[list[float]], values: Sequence[float]):
        self._factor: list[list[float]] = []  # Cholesky's
        for row in lower:
            own = row.pop()
            row[:] = self._solved(row)
            row.append(math.sqrt(own - sum(map(mul, row, row))))
            self._factor.append(row)
        self._values = self._solved(values)

    def at(self, to_known: Sequence[float]) -> tuple[float, float]:
        """(the value to expect where covariances with the known ones are `to_known`, how much less its variance is for them)."""
        share = self._solved(to_known)
        return sum(map(mul, share, self._values)), sum(map(mul, share, share))

    def _solved(self, right: Sequence[float]) -> list[float]:
        """x of L x = right."""
        x: list[float] = []
        for row, value in zip(self._factor, right):
            x.append((value - sum(map(mul, row, x))) / row[len(x)])
        return x
