"""What blocks of queries find to do, and when the last of them ends: tiles of keys by block, and the places on the GPU that take
one block after another."""

from __future__ import annotations

import heapq
import math
from functools import lru_cache
from typing import NamedTuple

from ...core.masks import Bounds
from ...core.problem import Problem

BLOCKS, SEQUENCES = 48, 24  # of a problem that are looked at: more are like so many, evenly chosen


class Visits(NamedTuple):
    """Key tiles that a block of queries visits: on average, at the most, and the deviation over the mean; `shares` are (tiles,
    the share of blocks that visits so many), most tiles first."""

    mean: float
    most: int
    spread: float
    shares: tuple[tuple[int, float], ...]


def _tiles(bounds: Bounds, block: int, block_queries: int, block_n: int, queries: int, keys: int) -> int:
    """That the queries of one block see."""
    first, end = block * block_queries, (block + 1) * block_queries
    begin, end = bounds.span(first, (end if end < queries else queries) - 1, queries, keys)
    tiles = -(-end // block_n) - begin // block_n
    return tiles if tiles > 0 else 0


@lru_cache(maxsize=4096)
def visits(problem: Problem, block_queries: int, block_n: int) -> Visits:
    """Of the blocks of one head."""
    sequences, bounds = problem.sequences, problem.bounds
    if len(sequences) > SEQUENCES:
        sequences = [sequences[(2 * n + 1) * len(sequences) // (2 * SEQUENCES)] for n in range(SEQUENCES)]

    weights: dict[int, float] = {}
    for queries, keys in sequences:
        if not queries:
            continue
        blocks = math.ceil(queries / block_queries)
        looked_at = min(blocks, max(1, BLOCKS // len(sequences)))
        for n in range(looked_at):
            tiles = _tiles(bounds, (2 * n + 1) * blocks // (2 * looked_at), block_queries, block_n, queries, keys)
            weights[tiles] = weights.get(tiles, 0.0) + blocks / looked_at
    most = max(weights, default=0)
    if problem.sequences and problem.sequences[0][0]:  # the longest, whose last block sees most unless a window hides it
        queries, keys = problem.sequences[0]
        most = max(most, _tiles(bounds, (queries - 1) // block_queries, block_queries, block_n, queries, keys))

    total = sum(weights.values())
    shares = tuple((tiles, weight / total) for tiles, weight in sorted(weights.items(), reverse=True))
    mean = sum(tiles * share for tiles, share in shares)
    squares = sum(tiles * tiles * share for tiles, share in shares)
    return Visits(mean, most, math.sqrt(max(0.0, squares - mean * mean)) / mean if mean else 0.0, shares)


@lru_cache(maxsize=4096)
def last_end(problem: Problem, block_queries: int, block_n: int, blocks: int, places: int) -> float:
    """Tiles until the last of `blocks` ends where the longest go first, each to the place that is free first (Graham's list
    scheduling, 1969). Blocks alike begin together, so this takes as many steps as there are kinds of blocks and rounds."""
    free, last = [(0.0, places)], 0.0  # (when, how many places)
    counted, begun = 0.0, 0
    for tiles, share in visits(problem, block_queries, block_n).shares:
        counted += share * blocks
        waiting, begun = round(counted) - begun, round(counted)
        while waiting > 0:
            when, count = heapq.heappop(free)
            taken = min(waiting, count)
            if count > taken:
                heapq.heappush(free, (when, count - taken))
            heapq.heappush(free, (when + tiles, taken))
            waiting, last = waiting - taken, max(last, when + tiles)
    return last
