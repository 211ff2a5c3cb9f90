"""Lengths of sequences: their buckets, and how packed ones are spread."""

from __future__ import annotations

from functools import lru_cache
from math import exp

QUANTILES = 512  # more sequences than that are like so many
SIGMA = 1.0  # of the logarithm: lengths of prompts and documents spread about as widely


def bucket_length(length: int) -> int:
    """`length` rounded up to one of 8 steps an octave: 8192 -> 8192, 8193 -> 9216. Lengths to 16 stand for themselves."""
    if length <= 16:
        return length
    shift = (length - 1).bit_length() - 4
    return ((length - 1 >> shift) + 1) << shift


def bucket_batch(batch: int) -> int:
    """`batch` rounded up to a power of two."""
    return 1 << (batch - 1).bit_length() if batch > 1 else batch


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
