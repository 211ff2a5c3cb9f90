"""Lengths of sequences: their buckets, how packed ones are spread, and what a mask lets through of them."""

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


def visible_pairs(queries: int, keys: int, left: int | None, right: int | None) -> int:
    """(query, key) pairs that a window lets through; the last query stands at the last key."""
    offset = keys - queries
    before_end = queries * keys if right is None else _prefix_clamped(queries, keys, offset + 1 + right)
    before_begin = 0 if left is None else _prefix_clamped(queries, keys, offset - left)
    return before_end - before_begin


def visible_keys(queries: int, keys: int, left: int | None, right: int | None) -> int:
    """Keys that at least one query sees."""
    if queries == 0:
        return 0
    begin = 0 if left is None else max(0, keys - queries - left)
    end = keys if right is None else min(keys, keys + right)
    return max(0, end - begin)


def _prefix_clamped(rows: int, limit: int, start: int) -> int:
    """sum over i in [0, rows) of clamp(start + i, 0, limit), in closed form."""
    low = min(max(0, -start), rows)  # rows before this one contribute 0
    high = min(max(low, limit - start), rows)  # rows from this one on contribute `limit`
    ramp = high - low
    return ramp * (start + low) + ramp * (ramp - 1) // 2 + (rows - high) * limit
