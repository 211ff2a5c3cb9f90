"""What a call of `attention_with_kvcache` asks for, read from its arguments and checked: `CacheCall`."""

from __future__ import annotations

from typing import NamedTuple

from ..device import arrays
from .arguments import check_out, check_sinks, integer, number, positive_scale, readable_slopes, refuse_grad, window_bounds
from ..device.arrays import AttentionError
from .dense import NO_WINDOW
from .cachechecks import as_one_sequence, check_contents, check_starts, describe, integers, most_queries, scales, starts_of
from ..core.gpu import Gpu
from ..kernels import candidates
from ..kernels.decode.base import MAX_QUERIES
from ..core.problem import MAX_LENGTH, Problem


class CacheCall(NamedTuple):
    """A call, understood. Sizes are exact; pointers are of arrays that `keep` holds. Packed queries are those of one sequence, as
    far as the shapes of q and out go."""

    library: object
    device: int
    q: object
    k_cache: object
    v_cache: object
    out: object  # or None
    views: tuple  # what the library's `read` says of q, k_cache and v_cache
    dtype: str
    kv_dtype: str
    packed: bool
    batch: int  # sequences
    queries: int  # of a sequence, at most
    capacity: int  # keys that a sequence can have
    expected: int  # keys that it has, about
    page_size: int  # 0: not paged
    left: int | None
    right: int | None
    softcap: float
    sinks: tuple[int, int] | None  # pointer and dtype code
    slopes: tuple  # of ALiBi, as kernels take them, or none
    lengths: int  # pointers; 0: none
    starts: int
    table: int
    table_stride: int
    k_scale: tuple[float, int, int]  # number, pointer, stride
    v_scale: tuple[float, int, int]
    num_splits: int  # 0: the config's choice
    keep: tuple

    @property
    def left_to_attention(self) -> bool:
        """Whether `attention` does it: every sequence has all queries and keys, side by side, and they are none for decoding."""
        whole = not (self.lengths or self.page_size or self.packed or self.num_splits) and self.kv_dtype == self.dtype
        return whole and (self.queries > MAX_QUERIES or self.dtype == "fp32")

    @property
    def empty(self) -> bool:
        """Whether there is no query, or no room for a key."""
        return not (self.batch and self.queries and self.capacity)

    @property
    def ops(self) -> tuple[str, ...]:
        """Of the kernels that share the work: "decode" for sequences of up to `MAX_QUERIES` queries, "forward" for more."""
        few = ("decode",) if self.packed or self.queries <= MAX_QUERIES else ()
        return few + ("forward",) * (self.queries > MAX_QUERIES)

    def forward_only(self, gpu: Gpu) -> bool:
        """Whether no decode kernel can serve the sequences of few queries, but a forward kernel can serve all."""
        return not candidates(self.problem("decode").simplified(), gpu) and bool(candidates(self.problem("forward"), gpu))

    def launches(self, bound, scale: float, prefetches: bool = True):
        """What a decode kernel, bound to a config by `DecodeKernel.bind`, launches for this call. `prefetches`: it may come into
        place while what ran before it still runs."""
        (k_scale, _, k_stride), (v_scale, _, v_stride) = self.k_scale, self.v_scale
        if k_scale != 1.0:
            scale = positive_scale(scale * k_scale)[0]
        return bound(self.batch, min(self.queries, MAX_QUERIES), self.capacity, not (self.lengths or self.packed), scale,
                     self.sinks[1] if self.sinks else 0, self.num_splits, self.page_size, (k_stride, v_stride), v_scale,
                     self.views[1][1][0] if prefetches else 0)

    def problem(self, op: str) -> Problem:
        """What the sequences of few queries ("decode") or of many ("forward") come to. Raises `ProblemError`."""
        _, (_, _, heads_q, head_dim), *_ = self.views[0]
        heads_kv, head_dim_v = self.views[2][1][2:]
        kv, page_size = ("paged" if self.page_size else "dense"), self.page_size
        if op == "forward":  # a cache without pages has one for each sequence
            kv, page_size = "paged", page_size or self.capacity
        return Problem(op=op, dtype=self.dtype, kv_dtype=self.kv_dtype, kv=kv, page_size=page_size, batch=self.batch,
                       heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v,
                       seqlen_q=self.queries if op == "forward" else self.decode_queries, seqlen_k=self.expected,
                       window_left=self.left, window_right=self.right, softcap=self.softcap, alibi=bool(self.slopes),
                       sinks=self.sinks is not None)

    @property
    def decode_queries(self) -> int:
        """Queries of the problem whose config decode kernels get. Beside sequences of many, those of few mostly have one: then as
        few as the mask allows, which must not be simplified away."""
        if self.queries <= MAX_QUERIES:
            return self.queries
        return 2 if self.right is None else max(2, min(MAX_QUERIES, self.right + 2))


def understand(library, q, k_cache, v_cache, cache_seqlens, page_table, causal, cu_seqlens_q, max_seqlen_q, max_seqlen_k, k_scale,
               v_scale, num_splits, window, softcap, sinks, alibi_slopes, out, check) -> CacheCall:
    """The arguments of `attention_with_kvcache`, in its words. Raises as it does."""
    packed, starts = cu_seqlens_q is not None, 0
    if packed:
        q, out = as_one_sequence(library, "q", q), None if out is None else as_one_sequence(library, "out", out)
        cu_seqlens_q, starts, batch = starts_of(library, cu_seqlens_q, q)
    elif max_seqlen_q is not None:
        raise AttentionError("max_seqlen_q must be None without cu_seqlens_q: the shape of q says how many queries there are")
    read = library.read
    try:
        views = read(q), read(k_cache), read(v_cache)
        _, (outer, rows, heads_q, head_dim), _, _, _, _, dtype, device = views[0]
        _, (pages, page_size, heads_kv, head_dim_k), _, _, _, _, dtype_k, device_k = views[1]
        _, (pages_v, page_size_v, heads_v, head_dim_v), _, _, _, _, dtype_v, device_v = views[2]
        if not packed:
            batch = outer
        if not (pages == pages_v and page_size == page_size_v and heads_kv == heads_v and not heads_q % heads_kv
                and head_dim == head_dim_k and dtype_k == dtype_v and device == device_k == device_v >= 0
                and (page_table is not None or pages == batch)):
            raise AttentionError("q, k_cache and v_cache do not fit together")
        dtype_name = library.dtypes[dtype]
        kv_dtype = dtype_name if dtype_k == dtype else library.cache_dtypes[dtype_k]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise describe(error, q, k_cache, v_cache, page_table, batch if packed else None) from None
    queries = most_queries(max_seqlen_q, rows) if packed else rows
    lengths = table = table_stride = 0
    if cache_seqlens is not None:
        cache_seqlens, lengths, _, _ = integers(library, "cache_seqlens", cache_seqlens, (batch,), device)
    if page_table is None:
        capacity, page_size = page_size, 0
    else:
        page_table, table, table_shape, table_stride = integers(library, "page_table", page_table, (batch, None), device)
        capacity = table_shape[1] * page_size
    if check:
        if arrays.is_capturing(library.stream(device)):
            raise AttentionError("check must be False while a CUDA graph is captured: it reads lengths and pages on the host")
        check_contents(library, cache_seqlens, page_table, capacity, pages, page_size)
        if packed:
            check_starts(library, cu_seqlens_q, rows, queries)
    if num_splits is not None and not (type(num_splits) is int and 0 < num_splits <= MAX_LENGTH):
        raise AttentionError(f"num_splits is {num_splits!r}; it must be an int from 1 to {MAX_LENGTH}, or None")
    if library.grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad or sinks is not None
                                   or out is not None or alibi_slopes is not None):
        refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, alibi_slopes=alibi_slopes, out=out)
    if out is not None:
        check_out(library, out, (outer, rows, heads_q, head_dim_v), dtype, device)
    left, right = (None, 0 if causal else None) if window is NO_WINDOW else window_bounds(window, causal)
    if right is not None and right >= queries - 1:  # Problem.simplified, without a Problem
        right = None
    sink, slopes = None, ()
    if sinks is not None:
        pointer, stride, code = check_sinks(library, sinks, heads_q, device)
        if stride != 1:
            sinks = library.packed(sinks)
            pointer = library.pointer(sinks)
        sink = pointer, code
    if alibi_slopes is not None:
        alibi_slopes, slopes = readable_slopes(library, alibi_slopes, batch, heads_q, device)
    expected = capacity if max_seqlen_k is None else max_seqlen_k if type(max_seqlen_k) is int else \
        integer("max_seqlen_k", max_seqlen_k)
    return CacheCall(library, device, q, k_cache, v_cache, out, views, dtype_name, kv_dtype, packed, batch, queries, capacity,
                     expected, page_size, left, right, softcap if type(softcap) is float else number(softcap), sink, slopes,
                     lengths, starts, table, table_stride, scales(library, "k_scale", k_scale, heads_kv, device, kv_dtype),
                     scales(library, "v_scale", v_scale, heads_kv, device, kv_dtype), num_splits or 0,
                     (cache_seqlens, page_table, cu_seqlens_q, sinks, alibi_slopes))
