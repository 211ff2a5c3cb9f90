"""Inputs that make wrong kernels visible: the same numbers on numpy and cupy, from a seed.

Kinds (see `KINDS`): ``random``, ``large`` logits, ``equal`` logits, ``masked_nan`` (non-finite K and V wherever the
mask or the length hides them), ``needles`` (each row's weight lies on one chosen key: at tile, window and split edges, the first,
the last, anywhere), and ``mixed``, where 64-row blocks are needles, random, large and equal in turn, so that one launch
of an expensive problem tests all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log, prod, sqrt
from typing import Sequence

import numpy as np

from .layout import Layout
from .numerics import MANTISSA_BITS, NAN_BITS, array_dtype, bits, empty, from_float32
from ..core.problem import Problem

KINDS = ("random", "large", "equal", "masked_nan", "needles", "mixed")
ROWS = 64  # rows of a checked block; `mixed` changes its kind at this step

LARGE = 16.0  # standard deviation of large logits; the largest of 65536 is near 70
GAP = 24.0  # a needle's score stands this far above the others: they weigh e^-24 each
PADDING = 256  # NaN rows before and after the keys of each batch entry; pages have an eighth of theirs
CHUNK = 1 << 22  # elements generated at a time, to bound temporaries


@dataclass(frozen=True)
class Inputs:
    """Arrays of one attention call.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), sinks (Hq,) float32 or None, alibi_slopes (Hq,) float32, for
    ``large`` (B, Hq), or None. Last strides are 1; k and v are views with gaps between batch entries for ``masked_nan`` and
    ``mixed``.
    A paged k is (pages, page_size, Hkv, D), v likewise; where queries are packed, q is (1, total_q, Hq, D), and where keys are
    (varlen), k (1, total_k, Hkv, D). `layout` knows each sequence's lengths and where its queries and keys stand.
    An 8-bit cache is unsigned bytes, and `k_scales` and `v_scales` are (Hkv,) float32, else None.
    """

    problem: Problem
    kind: str
    seed: int
    xp: object = field(repr=False)
    q: object = field(repr=False)
    k: object = field(repr=False)
    v: object = field(repr=False)
    sinks: object = field(repr=False)
    alibi_slopes: object = field(repr=False)
    scale: float = 1.0
    layout: Layout | None = field(default=None, repr=False)
    k_scales: object = field(default=None, repr=False)
    v_scales: object = field(default=None, repr=False)
    exempt: np.ndarray | None = field(default=None, repr=False)  # (Sq or total_q,) bool: rows that see a non-finite K may fail

    @property
    def slopes_batch_stride(self) -> int:
        """Elements from one batch entry's ALiBi slopes to the next one's, 0 if all have the same."""
        return 0 if self.alibi_slopes.ndim == 1 else self.alibi_slopes.strides[0] // 4


def make_inputs(problem: Problem, kind: str, seed: int = 0, xp=np, sequences: Sequence[tuple[int, int]] | None = None) -> Inputs:
    """Inputs of `kind` for `problem`, allocated by `xp` (numpy or cupy).

    In a cache, ``random`` fills every sequence; the other kinds draw lengths, and make what is not in use non-finite. `sequences`
    are the (queries, keys) of packed ones, if they are not to be drawn.

    Raises `ValueError` for an unknown kind or a K/V source that no kernel has for the operation.
    """
    if kind not in KINDS:
        raise ValueError(f"input kind is {kind!r}; allowed are {', '.join(KINDS)}")
    if problem.kv == "varlen" and problem.op == "decode":
        raise ValueError(f"inputs for {problem} cannot be made: K/V source {problem.kv!r} is not supported for it")
    layout = Layout(problem, kind, seed, xp, sequences)
    scale = 1 / sqrt(problem.head_dim)
    hq, d, sk, hkv, dv = problem.heads_q, problem.head_dim, problem.seqlen_k, problem.heads_kv, problem.head_dim_v
    make = _Generator(xp, seed)
    q = make.normal((*layout.rows, hq, d), problem.dtype, LARGE if kind == "large" else 1.0)
    padding = 0 if kind not in ("masked_nan", "mixed") else PADDING if problem.kv != "paged" else problem.page_size // 8 + 1
    k_shape, v_shape = layout.shape(hkv, d), layout.shape(hkv, dv)
    k = _storage(xp, k_shape, problem.kv_dtype, padding)
    v = _storage(xp, v_shape, problem.kv_dtype, padding)
    _assign(v, make.normal(v_shape, problem.kv_dtype, 1.0), problem.kv_dtype)
    exempt, level = None, log(max(_keys_of_last_row(problem), 1)) + 0.5  # e^(x^2/2) averages to e^0.5
    if kind == "equal":
        _assign(k, make.normal((1, 1, hkv, d), problem.kv_dtype, 1.0), problem.kv_dtype)
    elif kind in ("needles", "mixed"):
        signs = make.normal(k_shape, problem.kv_dtype, None)
        _assign(k, signs, problem.kv_dtype)
        if sk:
            amplitude = _needle_amplitude(problem, scale)
            needles = _needles(xp, make, problem, layout, signs, amplitude)
            q = needles if kind == "needles" else _mix(xp, problem, layout, q, needles)
            level = amplitude * scale * d if kind == "needles" else level
    else:
        _assign(k, make.normal(k_shape, problem.kv_dtype, 1.0), problem.kv_dtype)
    if kind == "large":
        level = LARGE * sqrt(2 * log(max(_keys_of_last_row(problem), 2)))
    if kind != "random":
        _poison_unused(layout, k, v)
    if kind == "masked_nan":
        exempt = _poison_hidden(layout, k, v)
    sinks = xp.asarray(make.host_normal(hq) + np.float32(level)) if problem.sinks else None
    slopes = None
    if problem.alibi:
        slopes = np.exp2(-8 * np.arange(1, hq + 1) / hq)
        if kind in ("needles", "mixed"):
            slopes *= 4 / max(sk, 4)  # so that distance does not outweigh the needle
        elif kind == "large":
            slopes = slopes * np.exp2(-np.arange(problem.batch) % 3)[:, None]
        slopes = xp.asarray(slopes.astype(np.float32))
    k_scales = v_scales = None
    if problem.kv_dtype == "e4m3":  # a K scale of at least 1 leaves needles sharp
        k_scales, v_scales = (xp.asarray(np.exp2(abs(make.host_normal(hkv)) * shrink)) for shrink in (0.3, -1.0))
    return Inputs(problem, kind, seed, xp, q, k, v, sinks, slopes, scale, layout, k_scales, v_scales, exempt)


def visible_range(problem: Problem, rows, length=None, queries=None):
    """(first, end): row i sees the keys first[i] <= j < end[i]. `rows` is an int64 array of numpy or cupy; `length` and
    `queries`, of shapes that go with it, are how many keys and queries there are if not seqlen_k and seqlen_q."""
    queries, length = problem.seqlen_q if queries is None else queries, problem.seqlen_k if length is None else length
    return problem.bounds.visible(rows, queries, length)


class _Generator:
    """Counter-based random numbers: element n of stream s is a hash of (seed, s, n), so numpy and cupy agree."""

    def __init__(self, xp, seed: int):
        self.xp, self.seed, self.stream = xp, seed, 0

    def _key(self, chunk: int) -> int:
        return int(np.random.SeedSequence([self.seed, self.stream, chunk]).generate_state(1)[0])

    def words(self, count: int, chunk: int = 0):
        """`count` uniform uint32, for at most 2**31 of them."""
        return _mix32(self.xp.arange(count, dtype=np.uint32), self._key(chunk))

    def normal(self, shape, dtype: str, sigma: float | None):
        """Normal numbers of standard deviation `sigma`, or random signs (-1, 1) if it is None, as a contiguous array."""
        self.stream += 1
        xp, size = self.xp, prod(shape)
        flat = empty(xp, (size,), dtype)
        target = bits(flat, dtype)
        for chunk, start in enumerate(range(0, size, CHUNK)):
            word = self.words(min(CHUNK, size - start), chunk)
            if sigma is None:
                values = (word & 1).astype(np.float32) * 2 - 1
            else:  # Box-Muller; the 24 bits that float32 holds
                radius = xp.sqrt(-2 * xp.log(((word >> 8).astype(np.float32) + 0.5) * np.float32(2.0**-24)))
                angle = (_mix32(word, 0x9E3779B9) >> 8).astype(np.float32) * np.float32(2 * np.pi * 2.0**-24)
                values = radius * xp.cos(angle) * np.float32(sigma)
            target[start:start + CHUNK] = bits(from_float32(xp, values, dtype), dtype)
        return flat.reshape(shape)

    def host_normal(self, count: int) -> np.ndarray:
        """A few float32 normals on the host."""
        self.stream += 1
        return np.random.default_rng([self.seed, self.stream]).standard_normal(count).astype(np.float32)


def _mix32(word, key: int):
    """A bijective mix of uint32 words in which every input bit reaches every output bit."""
    word = word ^ np.uint32(key)
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


def _storage(xp, shape, dtype: str, padding: int):
    """An array, or a view into a larger one with `padding` rows of NaN before and after each batch entry's (or page's) keys."""
    if not padding:
        return empty(xp, shape, dtype)
    b, s, h, d = shape
    whole = empty(xp, (b, s + 2 * padding, h, d), dtype)
    bits(whole, dtype).fill(NAN_BITS[dtype])
    return whole[:, padding:padding + s]


def _assign(target, values, dtype: str) -> None:
    bits(target, dtype)[...] = bits(values, dtype)


def _keys_of_last_row(problem: Problem) -> int:
    first, end = visible_range(problem, np.array([max(problem.seqlen_q - 1, 0)]))
    return max(0, int(end[0] - first[0]))


def _needle_amplitude(problem: Problem, scale: float) -> float:
    """|q| per element, a power of two, such that a key of signs that q copies beats the best of 65536 others by `GAP`."""
    d = problem.head_dim
    lead = scale * max(d - 4.5 * sqrt(d), d / 4)
    amplitude = GAP / lead
    if problem.softcap:
        amplitude = min(amplitude, problem.softcap / (scale * d))  # beyond the cap all scores look alike
    return float(np.exp2(np.ceil(np.log2(amplitude))))


def _needles(xp, make: _Generator, problem: Problem, layout: Layout, signs, amplitude: float):
    """q whose row (sequence, i, h) is `amplitude` times the key that it must find."""
    target = _targets(xp, make, problem, layout)
    sequence = layout.owners()[0][..., None]
    head = (xp.arange(problem.heads_q) // problem.group).reshape(1, 1, -1)
    q_bits = 8 * array_dtype(problem.dtype).itemsize
    sign = bits(signs, problem.kv_dtype) >> (8 * signs.itemsize - 1)
    word = np.array(amplitude, np.float32).astype(array_dtype(problem.dtype)).view(f"u{q_bits // 8}")[()]
    sign = sign[(*layout.at(sequence, target), head)].astype(word.dtype) << (q_bits - 1)
    return (sign | word).view(array_dtype(problem.dtype))


def _targets(xp, make: _Generator, problem: Problem, layout: Layout):
    """(*layout.rows, Hq) int64: the key that each row must find, one that it sees if it sees any."""
    shape = *layout.rows, problem.heads_q
    sequence, query = (each[..., None] for each in layout.owners())
    queries, sk = (xp.asarray(each)[sequence] for each in (layout.queries, layout.lengths))
    make.stream += 1
    word = make.words(prod(shape))
    draw = _mix32(word, 0x85EBCA6B).astype(np.int64).reshape(shape)
    word = word.astype(np.int64).reshape(shape)
    first, end = visible_range(problem, query, sk, queries)
    anywhere = first + draw % xp.maximum(end - first, 1)
    before = (word >> 8) & 1  # the last key before an edge or the first after it
    tile_edge = anywhere // 16 * 16 - before  # every tile is a multiple of 16 keys
    parts = 2 + (word >> 9) % 7
    split_edge = sk * (1 + (word >> 12) % (parts - 1)) // parts // 16 * 16 - before
    choice = word % 8
    target = xp.where(choice < 4, anywhere, xp.where(choice == 4, first, xp.where(choice == 5, end - 1, tile_edge)))
    target = xp.where(choice == 7, split_edge, target)
    return xp.maximum(xp.minimum(target, end - 1), xp.minimum(first, sk - 1)).clip(0, xp.maximum(sk - 1, 0))


def _mix(xp, problem: Problem, layout: Layout, normal, needles):
    """Rows of needles, normal, large and zero q by turns of 64 rows, shifted by head and sequence."""
    sequence, query = (each[..., None, None] for each in layout.owners())
    turn = (sequence + query // ROWS + xp.arange(problem.heads_q).reshape(1, 1, -1, 1)) % 4
    word = bits(normal, problem.dtype)
    sixteenfold = word + word.dtype.type(4 << MANTISSA_BITS[problem.dtype])  # exponent + 4
    mixed = xp.where(turn == 2, sixteenfold, xp.where(turn == 3, word & 0, word))
    mixed = xp.where(turn == 0, bits(needles, problem.dtype), mixed)
    return mixed.astype(word.dtype).view(array_dtype(problem.dtype))


def _poison_unused(layout: Layout, k, v) -> None:
    """Makes the places of a cache that hold no key non-finite."""
    unused = layout.unused()
    if unused is not None:
        for array in (k, v):
            bits(array, layout.problem.kv_dtype)[unused] = NAN_BITS[layout.problem.kv_dtype]


def _poison_hidden(layout: Layout, k, v) -> np.ndarray:
    """Makes K and V non-finite where nobody sees them, and K at the outermost visible keys.

    Returns a bool for each of layout.rows[1] rows: those that do see such a K. Every other row must be as if the key were finite.
    """
    problem = layout.problem
    exempt = np.zeros(layout.rows[1], bool)
    nan = NAN_BITS[problem.kv_dtype]
    k_bits, v_bits = bits(k, problem.kv_dtype), bits(v, problem.kv_dtype)
    for queries, length, batches in layout.by_lengths():
        if length == 0:
            continue
        if queries == 0:
            for word in (k_bits, v_bits):
                layout.fill(word, batches, 0, length, nan)
            continue
        first, end = visible_range(problem, np.arange(queries, dtype=np.int64), length, queries)
        seen_first, seen_end = int(first.min()), max(int(end.max()), int(first.min()))
        for word in (k_bits, v_bits):
            layout.fill(word, batches, 0, seen_first, nan)
            layout.fill(word, batches, seen_end, length, nan)
        if problem.op == "backward":  # its rows and keys add to each other's gradients
            continue
        edges = [] if problem.window_right is None else [seen_end - 1]
        edges += [] if problem.window_left is None else [seen_first]
        for key in edges:
            sees = (first <= key) & (key < end)
            if seen_first <= key < seen_end and sees.sum() <= queries // 2:  # keep rows to check
                layout.fill(k_bits, batches, key, key + 1, nan)
                for start in layout.query_starts[batches] if problem.packed else [0]:
                    exempt[start:start + queries] |= sees
    return exempt
