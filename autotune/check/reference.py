"""What attention must compute: a float64 reference, and the *plain* low-precision computation that sets the tolerance.

Plain rounds S to the dtype, takes the softmax in fp32, rounds P, multiplies P V in fp32 and rounds the output. A kernel
may be wrong by a small multiple of what plain is wrong by, per (batch, head, block of 64 rows): over a whole tensor the
worst block would hide a dropped tile elsewhere. Only the blocks that are asked for are computed, so that a sample of a
64k x 64k problem is affordable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .inputs import ROWS, Inputs, visible_range
from .layout import Layout
from .numerics import bits, host, matmul, rounded, to_float32, ulp
from ..core.problem import Problem

# Elements of gathered K, V and scores handled at once: about 20 bytes each at the peak.
CHUNK_ELEMENTS = {"numpy": 1 << 22, "cupy": 1 << 26}


@dataclass(frozen=True)
class Expected:
    """What the checked blocks must hold. n blocks of 64 rows; rows past the end and exempt rows are `skip`."""

    inputs: Inputs = field(repr=False)
    blocks: np.ndarray = field(repr=False)  # (n, 3) int64: batch, head, index of the 64-row block
    index: tuple = field(repr=False)  # of each row, in the output: two (n, 64) or (n, 1) arrays of `inputs.xp`, and head (n, 1)
    skip: object = field(repr=False)  # (n, 64) bool
    out: object = field(repr=False)  # (n, 64, Dv) float64
    nothing: object = field(repr=False)  # (n, 64) bool: rows that see no key, whose out is exactly 0
    lse: object = field(repr=False)  # (n, 64) float64, natural log, -inf where a row sees nothing and has no sink
    plain_error: np.ndarray = field(repr=False)  # (n,) max |plain - out|
    allowed: np.ndarray = field(repr=False)  # (n,) what a kernel's error may be


def all_blocks(layout: Layout) -> np.ndarray:
    """(n, 3) int64: every (batch entry or packed sequence, head, block of 64 rows)."""
    bands = -(-layout.queries // ROWS)
    sequence = np.repeat(np.arange(len(bands)), bands)
    band = np.arange(len(sequence)) - np.repeat(np.cumsum(bands) - bands, bands)
    heads = layout.problem.heads_q
    blocks = np.stack([np.repeat(sequence, heads), np.tile(np.arange(heads), len(sequence)), np.repeat(band, heads)], -1)
    return blocks[np.lexsort(blocks.T[::-1])].astype(np.int64)


def sampled_blocks(layout: Layout, count: int | None, seed: int = 0) -> np.ndarray:
    """`count` of the blocks, or all if it is None or there are no more: the corners, and rows drawn evenly, each head in turn."""
    if count is None or _block_count(layout) <= count:
        return all_blocks(layout)
    bands, heads_q = -(-layout.queries // ROWS), layout.problem.heads_q
    filled = np.flatnonzero(bands)
    corners = {(int(b), h, r) for b in filled[[0, -1]] for h in (0, heads_q - 1) for r in (0, int(bands[b]) - 1)}
    chosen = sorted(corners)[:count]
    random = np.random.default_rng([seed, 64])
    heads = random.permutation(heads_q)
    strata = random.permutation(count - len(chosen))
    share = np.cumsum(bands) / bands.sum()  # of all rows, those of sequences up to each: long ones are drawn more often
    for n, stratum in enumerate(strata):
        position = (stratum + random.random()) / len(strata)
        sequence = int(np.searchsorted(share, random.random(), "right"))
        chosen.append((sequence, int(heads[n % len(heads)]), int(bands[sequence] * position)))
    return np.unique(np.array(chosen, np.int64), axis=0)


def _block_count(layout: Layout) -> int:
    return int((-(-layout.queries // ROWS)).sum()) * layout.problem.heads_q


def expect(inputs: Inputs, blocks: np.ndarray | None = None) -> Expected:
    """The reference and the tolerance for `blocks` ((n, 3), as `all_blocks` gives; None: all of them)."""
    problem, xp = inputs.problem, inputs.xp
    blocks = all_blocks(inputs.layout) if blocks is None else blocks
    first, end = _key_range(inputs, blocks)
    out = xp.zeros((len(blocks), ROWS, problem.head_dim_v), np.float64)
    lse = xp.zeros((len(blocks), ROWS), np.float64)
    skip = _skipped(inputs, blocks)
    error, peak = np.zeros(len(blocks)), np.zeros(len(blocks))
    order = np.argsort(end - first, kind="stable")
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for chunk in _chunks(problem, order, (end - first)[order], CHUNK_ELEMENTS["numpy" if xp is np else "cupy"]):
            tile = _gather(inputs, blocks[chunk], first[chunk], end[chunk])
            where, skipped = xp.asarray(chunk), xp.asarray(skip[chunk])[..., None]
            exact, exact_lse = _attend(inputs, tile, np.float64)
            plain, _ = _attend(inputs, tile, np.float32)
            out[where], lse[where] = exact, exact_lse
            error[chunk] = host(xp.abs(xp.where(skipped, 0, plain.astype(np.float64) - exact)).max((1, 2)))
            peak[chunk] = host(xp.abs(xp.where(skipped, 0, exact)).max((1, 2)))
    factor = 3 if problem.softcap else 2
    allowed = factor * error + ulp(peak, problem.out_dtype)
    rows = inputs.layout.at_query(*(xp.asarray(x) for x in (blocks[:, :1], _rows(inputs.layout, blocks))))
    index = *rows, xp.asarray(blocks[:, 1:2])
    return Expected(inputs, blocks, index, xp.asarray(skip), out, abs(out).max(-1) == 0, lse, error, allowed)


@dataclass(frozen=True)
class _Tile:
    """The operands of n blocks. W keys are gathered for each, those outside a block's first..last visible key zeroed in V."""

    q: object  # (n, 64, D) float32
    k: object  # (n, W, D) float32
    v: object  # (n, W, Dv) float32
    rows: object  # (n, 64) int64
    keys: object  # (n, W) int64
    visible: object  # (n, 64, W) bool
    head: object  # (n,)
    batch: object  # (n,)
    queries: object  # (n,) int64: of the block's sequence
    length: object  # (n,) int64: keys of it


def _attend(inputs: Inputs, tile: _Tile, dtype):
    """(out (n, 64, Dv), lse (n, 64)): the reference if `dtype` is float64, plain with its roundings if it is float32."""
    xp, problem = inputs.xp, inputs.problem
    plain = dtype == np.float32
    s = matmul(xp, tile.q.astype(dtype), xp.ascontiguousarray(tile.k.astype(dtype).transpose(0, 2, 1))) * dtype(inputs.scale)
    if plain:
        s = _plain_scores(xp, s, tile, inputs)
    if problem.softcap:
        s = xp.tanh(s / dtype(problem.softcap)) * dtype(problem.softcap)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes
        slopes = slopes[tile.head] if slopes.ndim == 1 else slopes[tile.batch, tile.head]
        distance = tile.rows[..., None] + (tile.length - tile.queries)[:, None, None] - tile.keys[:, None]
        s = s - slopes.astype(dtype)[:, None, None] * xp.abs(distance).astype(dtype)
    s = xp.where(tile.visible, s, dtype(-np.inf))
    # The sink is one more column, with no value: it also keeps the maximum defined when there are no keys.
    sink = xp.zeros((*s.shape[:2], 1), dtype)
    sink += dtype(-np.inf) if inputs.sinks is None else inputs.sinks[tile.head].astype(dtype)[:, None, None]
    s = xp.concatenate([s, sink], -1)
    peak = s.max(-1, keepdims=True)
    p = xp.exp(s - xp.where(peak == -np.inf, dtype(0), peak))
    total = p.sum(-1, keepdims=True)
    lse = xp.where(total == 0, dtype(-np.inf), peak + xp.log(xp.where(total == 0, dtype(1), total)))[..., 0]
    p = p[..., :-1] / xp.where(total == 0, dtype(1), total)
    if plain:
        p = _plain_weights(xp, p, problem.dtype)
    out = matmul(xp, xp.ascontiguousarray(p), tile.v.astype(dtype))
    return (rounded(xp, out, problem.out_dtype) if plain else out), lse


def _plain_scores(xp, s, tile: _Tile, inputs: Inputs):
    """S in the dtype. For fp32, which sums 64 and more products in an order of the kernel's own, off by 4 ulps of what the
    products may add up to: the error that numpy's order happens to have is no bound for another."""
    if inputs.problem.dtype != "fp32":
        return rounded(xp, s, inputs.problem.dtype)
    lengths = [xp.sqrt((x * x).sum(-1)) for x in (tile.q, tile.k)]
    return s + _sign(s) * (lengths[0][:, :, None] * lengths[1][:, None] * np.float32(inputs.scale * 2.0**-22))


def _plain_weights(xp, p, dtype: str):
    """P in the dtype; for fp32 off by 4 to 8 ulps, as the sums that it enters are."""
    return p * (1 + _sign(p) * np.float32(2.0**-21)) if dtype == "fp32" else rounded(xp, p, dtype)


def _sign(array):
    """-1 or 1 by the last bit of float32 numbers."""
    return (array.view(np.uint32) & 1).astype(np.float32) * 2 - 1


def _gather(inputs: Inputs, blocks: np.ndarray, first: np.ndarray, end: np.ndarray) -> _Tile:
    xp, problem = inputs.xp, inputs.problem
    width = int((end - first).max())
    batch, head = xp.asarray(blocks[:, 0]), xp.asarray(blocks[:, 1])
    rows = xp.asarray(_rows(inputs.layout, blocks))
    keys = xp.asarray(first)[:, None] + xp.arange(width)
    inside = keys < xp.asarray(end)[:, None]
    queries, length = (xp.asarray(each[blocks[:, 0]]) for each in (inputs.layout.queries, inputs.layout.lengths))
    row_first, row_end = visible_range(problem, rows, length[:, None], queries[:, None])
    visible = inside[:, None] & (keys[:, None] >= row_first[..., None]) & (keys[:, None] < row_end[..., None])

    def take(array, at, heads, name):
        return to_float32(bits(array, name)[(*at, heads[:, None])].view(array.dtype), name)

    q = take(inputs.q, inputs.layout.at_query(batch[:, None], rows), head, problem.dtype)
    if width:
        at = inputs.layout.at(batch[:, None], xp.minimum(keys, xp.maximum(length - 1, 0)[:, None]))
        k, v = (take(array, at, head // problem.group, problem.kv_dtype) for array in (inputs.k, inputs.v))
        if inputs.k_scales is not None:
            head_kv = head // problem.group
            k, v = k * inputs.k_scales[head_kv][:, None, None], v * inputs.v_scales[head_kv][:, None, None]
        v = xp.where(inside[..., None], v, np.float32(0))
    else:
        k, v = (xp.zeros((len(blocks), 0, d), np.float32) for d in (problem.head_dim, problem.head_dim_v))
    return _Tile(q, k, v, rows, keys, visible, head, batch, queries, length)


def _rows(layout: Layout, blocks: np.ndarray) -> np.ndarray:
    """(n, 64) int64: the rows of each block; the last one repeats where a block is not full."""
    return np.minimum(blocks[:, 2:] * ROWS + np.arange(ROWS), layout.queries[blocks[:, :1]] - 1)


def _key_range(inputs: Inputs, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, end), each (n,): all keys that some row of the block sees. Both bounds grow with the row."""
    problem, layout = inputs.problem, inputs.layout
    rows, (queries, length) = _rows(layout, blocks), (each[blocks[:, 0]] for each in (layout.queries, layout.lengths))
    first = visible_range(problem, rows[:, 0], length, queries)[0]
    end = visible_range(problem, rows[:, -1], length, queries)[1]
    return first, np.maximum(first, end)


def _skipped(inputs: Inputs, blocks: np.ndarray) -> np.ndarray:
    skip = blocks[:, 2:] * ROWS + np.arange(ROWS) >= inputs.layout.queries[blocks[:, :1]]
    if inputs.exempt is not None:
        row = _rows(inputs.layout, blocks)
        skip |= inputs.exempt[row + inputs.layout.query_starts[blocks[:, :1]] if inputs.problem.packed else row]
    return skip


def _chunks(problem: Problem, order: np.ndarray, widths: np.ndarray, budget: int):
    """Slices of `order` (by growing width) whose gathered elements stay within `budget`."""
    start = 0
    while start < len(order):
        stop = start + 1
        each = 2 * ROWS + problem.head_dim + problem.head_dim_v
        while stop < len(order) and (stop + 1 - start) * (int(widths[stop]) + ROWS) * each <= budget:
            stop += 1
        yield order[start:stop]
        start = stop
