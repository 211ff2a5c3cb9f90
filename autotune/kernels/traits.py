"""Where a launch stands among others: the coordinates by which times of one kernel over its accounts are alike.

Coordinates are scaled such that at distance 1 two launches have half to do with each other. Scales were chosen by maximum
likelihood over the covers of an H200 (docs/log.md, "Which config is fastest here").
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Mapping, NamedTuple, Sequence

from ..core.config import Parameter, Value
from ..core.gpu import Gpu
from ..core.problem import Problem

APART = 2.0  # between configs of a kernel that says nothing of its own


class Account(NamedTuple):
    """What a kernel expects of one launch: its time, and its coordinates."""

    time_us: float
    traits: tuple[float, ...]


def log2(value: float) -> float:
    """Of what is below 1, 0."""
    return math.log2(max(value, 1))


def keys_seen(problem: Problem) -> float:
    """By a query, on average."""
    return problem.visible_pairs / max(problem.seqlen_q, 1)


@lru_cache(maxsize=4096)
def sizes(problem: Problem, gpu: Gpu) -> tuple[float, ...]:
    """Coordinates of a problem among those of its static part, whatever the config."""
    sets, keys = problem.batch * problem.heads_kv, keys_seen(problem)
    sides = [side / 2 for side in problem.bounds.features]
    page = log2(problem.page_size) / 8
    if problem.op == "decode":
        return (log2(sets) / 4, log2(keys) / 4, log2(problem.group * problem.seqlen_q) / 8, *sides, page)
    rows = sets * problem.group * problem.seqlen_q
    return (log2(min(rows, gpu.sms * 64 * 32)) / 8, log2(problem.seqlen_q) / 12, log2(keys) / 6, log2(problem.group) / 12, *sides,
            page)


def apart(parameters: Sequence[Parameter], v: Mapping[str, Value], sized: Sequence[str]) -> tuple[float, ...]:
    """Coordinates that set configs of values `v` apart wherever they differ in what does not follow from sizes (`sized`)."""
    return tuple(APART * p.values.index(v[p.name]) for p in parameters if not p.derived and p.name not in sized)
