"""Interpolation between measurements: weights of a Gaussian process over a few points. Plain Python, as a lookup must not wait
for numpy to be imported, and a dozen points take a tenth of a millisecond."""

from __future__ import annotations

import math
from typing import Sequence

ROOT3 = math.sqrt(3)


def correlation(distance: float) -> float:
    """Of values at two places: Matern 3/2, 0.48 at distance 1."""
    scaled = ROOT3 * distance
    return (1 + scaled) * math.exp(-scaled)


def weights_of(places: Sequence[Sequence[float]], to_here: Sequence[float], signal: float, noise: float) -> list[float]:
    """The weight of the value at each of `places` in the one expected here, where the mean is 0 and covariances with here are
    `to_here`. Values have variance `signal`, their measurements `noise` on top."""
    rows = [[signal * correlation(math.dist(a, b)) for b in places[:n + 1]] for n, a in enumerate(places)]
    for n, row in enumerate(rows):
        row[n] += noise
    return solved(rows, to_here)


def solved(lower: list[list[float]], right: Sequence[float]) -> list[float]:
    """x of A x = right for a positive definite A, of which `lower` is the lower triangle; overwritten by its Cholesky factor."""
    for i, row in enumerate(lower):
        for j in range(i):
            row[j] = (row[j] - sum([a * b for a, b in zip(row[:j], lower[j])])) / lower[j][j]
        row[i] = math.sqrt(row[i] - sum([a * a for a in row[:i]]))
    x: list[float] = []
    for row, value in zip(lower, right):
        x.append((value - sum([a * b for a, b in zip(row, x)])) / row[len(x)])
    for i in range(len(x) - 1, -1, -1):
        x[i] = (x[i] - sum([lower[k][i] * x[k] for k in range(i + 1, len(x))])) / lower[i][i]
    return x
