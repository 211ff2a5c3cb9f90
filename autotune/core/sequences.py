"""Lengths of sequences: their buckets, and how packed ones are spread."""

from __future__ import annotations

from functools import lru_cache
from math import exp

QUANTILES = 512  # more sequences than that are like so many
SIGMA = 1.0  # of the logarithm: lengths of prompts and documents spread about as widely


def bucket_length(length: int) -> int:
    """`length` rounded up to one of 8 steps an octave: 8192 -> 8192, 8193 -> 9216. Lengths to 16 stand for themselves."""
    return _rounded_up(length, 4)


def bucket_batch(batch: int) -> int:
    """`batch` rounded up to one of 4 steps an octave: 17 -> 20. Batches to 8 stand for themselves."""
    return _rounded_up(batch, 3)


def least_length(length: int) -> int:
    """The least length that stands for the same as `length` does."""
    return _least(length, 4)


def least_batch(batch: int) -> int:
    """The same of batches."""
    return _least(batch, 3)


def _rounded_up(value: int, bits: int) -> int:
    if value <= 1 << bits:
        return value
    shift = (value - 1).bit_length() - bits
    return ((value - 1 >> shift) + 1) << shift


def _least(value: int, bits: int) -> int:
    if value <= 1 << bits:
        return value
    shift = (value - 1).bit_length() - bits
    return (value - 1 >> shift << shift) + 1


@lru_cache(maxsize=256)
def spread(count: int, longest: int) -> tuple[int, ...]:
    """`count` lengths that are spread log-normally, longest first: quantiles of the distribution, scaled so that the first is
    `longest`. What packed sequences are like when nothing but their number and the largest is known."""
    from statistics import NormalDist

    steps = [NormalDist().inv_cdf(1 - (n + 0.5) / count) for n in range(count)]
    return tuple(round(longest * exp(SIGMA * (step - steps[0]))) for step in steps)


def typical(batch: int, seqlen_q: int, seqlen_k: int) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of packed sequences of which only the number and the largest lengths are known; of more than `QUANTILES`
    sequences, so many that stand for all. Both lengths of a sequence are the same share of the largest."""
    count = min(batch, QUANTILES)
    return tuple(zip(spread(count, seqlen_q), spread(count, seqlen_k)))
