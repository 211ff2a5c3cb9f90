"""The problems on which a cover is measured: for one static part, spread over batch, heads, lengths, windows and pages.

They are drawn from a Halton sequence, so that a few of them leave no corner empty, and are not round: what lies between two
powers of two is what servers call.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Iterable, Sequence

from ..core.masks import TYPICAL, Bounds
from ..core.problem import Problem, Static

COUNT = 40  # problems of a static part
MOST_FLOPS = 1.5e12  # 2 to 3 ms of an H200: more is more of the same
MOST_BYTES = 2e9
SPLITS = (1, 2, 4, 8)  # GPUs that share a model's heads
HEADS = ((32, 8), (16, 16), (32, 32), (64, 8), (28, 4), (40, 8), (8, 1))  # beside those of models with these head dims
PAGES = (16, 64, 16, 256, 128, 1)
PRIMES = (2, 3, 5, 7, 11, 13)


def grid(static: Static, like: Iterable[Problem], count: int = COUNT) -> list[Problem]:
    """`count` problems of `static`, each once, in the order of the sequence: any first few are spread, too. `like` are problems
    whose heads and windows are typical."""
    like = [problem for problem in like if (problem.head_dim, problem.head_dim_v) == (static.head_dim, static.head_dim_v)]
    heads = sorted({*HEADS, *(pair for problem in like for pair in split_heads(problem.heads_q, problem.heads_kv))})
    bounds = sorted({Bounds(problem.window_left, 0) for problem in like if problem.window_left and static.mask == "window"})
    found: dict[Problem, None] = {}
    for n in range(1, 40 * count):
        problem = _drawn(static, heads, bounds or TYPICAL[static.mask], [_halton(n, prime) for prime in PRIMES])
        if problem is not None and problem.simplified().static == static:
            found[problem.simplified()] = None
        if len(found) == count:
            break
    return list(found)


def split_heads(heads_q: int, heads_kv: int) -> list[tuple[int, int]]:
    """(query heads, key/value heads) that one GPU has where 1, 2, 4 or 8 share a model; key/value heads that are too few are
    repeated."""
    shares = []
    for gpus in SPLITS:
        q, kv = heads_q // gpus, max(1, heads_kv // gpus)
        if heads_q % gpus == 0 and q and q % kv == 0:
            shares.append((q, kv))
    return shares


def _drawn(static: Static, heads: Sequence[tuple[int, int]], bounds: Sequence[Bounds], u: Sequence[float]) -> Problem | None:
    heads_q, heads_kv = heads[int(u[3] * len(heads))]
    fields = dict(op=static.op, dtype=static.dtype, kv_dtype=static.kv_dtype, out_dtype=static.out_dtype,
                  head_dim=static.head_dim, head_dim_v=static.head_dim_v, heads_q=heads_q, heads_kv=heads_kv, softcap=50.0
                  if static.softcap else 0.0, alibi=static.alibi, kv=static.kv, page_size=PAGES[int(u[4] * len(PAGES))]
                  if static.kv == "paged" else 0, sinks=static.mask == "window" and static.head_dim == 64,
                  **bounds[int(u[5] * len(bounds))]._asdict())
    if static.op == "decode":
        return _step(static, fields, u)
    if static.kv == "paged":
        fields["page_size"] = max(16, fields["page_size"])
    return _prompt(static, fields, u)


def _step(static: Static, fields: dict, u: Sequence[float]) -> Problem:
    batch = _log_between(1, 320, u[0])
    one = Problem(**fields, batch=1, seqlen_q=1, seqlen_k=16384)
    queries = 1 if one.simplified().mask == static.mask else 2 + int(u[2] * 7)
    key_bytes = one.cache_bytes / min(16384, one.window_left or 16384)
    most = min(131072.0, MOST_BYTES / (batch * key_bytes)) if static.mask != "window" else 65536.0
    return Problem(**fields, batch=batch, seqlen_q=queries, seqlen_k=_log_between(128, max(512, most), u[1]))


def _prompt(static: Static, fields: dict, u: Sequence[float]) -> Problem | None:
    packed = static.kv != "dense"
    tokens = _log_between(192, 65536, u[0])
    queries = _log_between(64 if packed else 96, min(tokens, 32768), u[1] ** 0.7)
    batch = max(2 if packed else 1, round(tokens / queries))
    chunk = u[2] > (0.6 if static.kv != "paged" else 0.2)
    keys = min(131072, round(queries * 2 ** (4 * u[5]))) if chunk else queries
    left = fields["window_left"]
    if left is not None and left >= keys - 1:
        keys = min(131072, 2 * left + queries)
    pairs = Problem(**fields, seqlen_q=queries, seqlen_k=keys).visible_pairs
    flops = 2 * fields["heads_q"] * pairs * (static.head_dim + static.head_dim_v) * batch * (0.5 if packed else 1)
    if flops > MOST_FLOPS:
        batch = max(2 if packed else 1, int(batch * MOST_FLOPS / flops))
    problem = Problem(**fields, batch=batch, seqlen_q=queries, seqlen_k=keys)
    return problem if problem.flops <= 2 * MOST_FLOPS and problem.compulsory_bytes <= MOST_BYTES else None


def _log_between(low: float, high: float, u: float) -> int:
    return max(1, round(math.exp(math.log(low) + u * (math.log(max(high, low)) - math.log(low)))))


def _halton(n: int, base: int) -> float:
    """The n-th number of van der Corput's sequence in `base`, in [0, 1)."""
    value, share = 0.0, 1.0
    while n:
        share /= base
        value += share * (n % base)
        n //= base
    return value


def anchors(problems: Sequence[Problem], count: int) -> list[Problem]:
    """`count` of `problems` that are unlike each other in size and shape."""
    def features(problem: Problem) -> tuple[float, ...]:
        return (math.log2(problem.batch * problem.heads_kv), math.log2(problem.seqlen_q + 1), math.log2(problem.seqlen_k + 1),
                math.log2(problem.group))

    chosen = list(problems[:1])
    while len(chosen) < min(count, len(problems)):
        chosen.append(max((p for p in problems if p not in chosen),
                          key=lambda p: (min(math.dist(features(p), features(c)) for c in chosen), p.text)))
    return chosen


def in_bf16(problem: Problem) -> Problem:
    """The same problem in bf16 if it is in fp16."""
    if "fp16" not in (problem.dtype, problem.kv_dtype, problem.out_dtype):
        return problem
    return replace(problem, **{name: "bf16" if getattr(problem, name) == "fp16" else getattr(problem, name)
                               for name in ("dtype", "kv_dtype", "out_dtype")})
