"""Attention of new queries over cached keys: `attention_with_kvcache`.

    out = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)                  # k_cache (B, Smax, Hkv, D)
    out = attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, page_table=table)   # (pages, page_size, Hkv, D)
    out = attention_with_kvcache(q, ..., cu_seqlens_q=starts, max_seqlen_q=4)                    # q (total_q, Hq, D)

Lengths and page tables stay on the device, so a captured CUDA graph can be replayed with others.
"""

from __future__ import annotations

from ..device import arrays, streams
from . import packed, plans
from .arguments import positive_scale
from ..device.arrays import LIBRARIES, OTHER, library_of
from .dense import NO_WINDOW, attention, unsuited
from .cachecall import CacheCall, understand
from ..kernels.decode.base import MAX_QUERIES
from ..core.problem import bucket_batch, bucket_length
from ..device.tensormap import Unmappable

_without_decode: set[tuple] = set()  # keys of decode problems that forward kernels serve
MAX_REMEMBERED = 4096


def attention_with_kvcache(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, causal=True, cu_seqlens_q=None,
                           max_seqlen_q=None, max_seqlen_k=None, k_scale=None, v_scale=None, num_splits=None, window=NO_WINDOW,
                           scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None, check=False):
    """Attention of q (B, Sq, Hq, D) over the first cache_seqlens[b] keys of each sequence's cache.

    The keys of the new queries are already in the cache: with `causal` the last query sees all cache_seqlens[b] keys, the one
    before it one less. k_cache is (B, Smax, Hkv, D) and v_cache (B, Smax, Hkv, Dv), or with `page_table` (B, max_pages) int32,
    (num_pages, page_size, Hkv, D or Dv): key j of sequence b is slot j % page_size of page page_table[b, j // page_size].
    `cache_seqlens` is (B,) int32 on the device; without it every sequence is full. Returns out (B, Sq, Hq, Dv), and with
    `return_lse` also lse (B, Hq, Sq) float32. A sequence of no keys gives 0 and -inf (or its sink).

    With `cu_seqlens_q` (B + 1,) int32 on the device, queries are packed: q is (total_q, Hq, D), and those of sequence b are
    q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]], any number of them, also none; out is (total_q, Hq, Dv), lse (Hq, total_q). So one
    call serves sequences that decode and chunks of prompts. Sequences of up to 16 queries are the decode kernel's, those of more
    a forward kernel's, which is launched too unless `max_seqlen_q` says that there are none. A sequence must not have more than
    `max_seqlen_q` queries; None is as many as there are. Rows of q that are no sequence's leave those of out as they were.

    What stands in slots beyond a length and in table entries of pages beyond it never matters, whatever it is. Lengths beyond
    the cache count as full; with `check` they raise, and so do page numbers out of range and a cu_seqlens_q that does not
    count up, which else are the caller's business: looking takes a synchronisation. `max_seqlen_k` says how long sequences are
    about, and helps choose a config; it never changes the result. `num_splits` is into how many parts each sequence's keys are
    cut where it has up to 16 queries; None leaves that to the config. The other arguments are as in `attention`.

    A cache may be 8-bit, float8_e4m3fn (with CuPy its bytes, uint8), under queries of 16 bits, up to 16 of a sequence: keys are
    then k_cache * k_scale and values v_cache * v_scale. A scale is a number, or float32 on the device, one or (Hkv,); None is 1.

    Raises `AttentionError` for arguments that do not fit together, and what `attention` raises.
    """
    library = LIBRARIES.get(type(q)) or library_of(q)
    if library is OTHER:
        return _through_cupy((q, k_cache, v_cache), dict(
            cache_seqlens=cache_seqlens, page_table=page_table, causal=causal, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, k_scale=k_scale, v_scale=v_scale, num_splits=num_splits,
            window=window, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, return_lse=return_lse, out=out,
            check=check))
    if library.traced():
        return library.ops.attention_with_kvcache(
    q,
    k_cache,
    v_cache,
    cache_seqlens=cache_seqlens,
    page_table=page_table,
    cu_seqlens_q=cu_seqlens_q,
    max_seqlen_q=max_seqlen_q,
    max_seqlen_k=max_seqlen_k,
    k_scale=k_scale,
    v_scale=v_scale,
    num_splits=num_splits,
    causal=causal,
    window=window,
    scale=scale,
    softcap=softcap,
    sinks=sinks,
    alibi_slopes=alibi_slopes,
    return_lse=return_lse,
     out=out)
    call = understand(library, q, k_cache, v_cache, cache_seqlens, page_table, causal, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
                      k_scale, v_scale, num_splits, window, softcap, sinks, alibi_slopes, out, check)
    if call.left_to_attention:
        return attention(q, k_cache, v_cache, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
                         alibi_slopes=alibi_slopes, return_lse=return_lse, out=out)
    result, lse = _empty(call, sinks, return_lse) if call.empty else _launched(call, scale, return_lse)
    if call.packed:
        result, lse = result[0], lse[0] if return_lse else None
    if out is not None:
        result = out
    return (result, lse) if return_lse else result


def _launched(call: CacheCall, scale, return_lse: bool) -> tuple:
    """(out, lse or None) of a call that is not empty; packed ones as those of one sequence."""
    library, few, many = call.library, *plans_of(call)
    q, (q_view, k_view, v_view) = call.q, call.views
    if scale is None:
        scale = (few or many).scale
    else:
        scale, negative = positive_scale(scale)
        if negative:
            q = library.negated(q)
            q_view = library.read(q)
    unpacked = not call.packed and many is not None  # then its queries are taken as packed, which forward kernels need
    q, (q_pointer, (outer, rows, heads_q, _), q0, q1, q2, _, _, _) = _suited_queries(library, q, q_view, unpacked)
    chunk = chunk_of(call)
    k_cache, (k_pointer, (pages, *_), k0, k1, k2, _, _, _) = _suited_cache(library, call.k_cache, k_view, chunk)
    v_cache, (v_pointer, (_, _, _, head_dim_v), v0, v1, v2, _, _, _) = _suited_cache(library, call.v_cache, v_view, chunk)
    out = call.out
    if out is None or unsuited(out_view := library.read(out), True) or unpacked and _gaps(out_view):
        target = library.empty(q, (outer, rows, heads_q, head_dim_v))
        out_pointer, o2 = library.pointer(target), head_dim_v
        o1 = heads_q * o2
        o0 = rows * o1
    else:
        target, (out_pointer, _, o0, o1, o2, _, _, _) = out, out_view
    lse, lse_pointer = None, 0
    if return_lse:
        lse = library.empty_float32(q, (1, heads_q, outer * rows) if unpacked else (outer, heads_q, rows))
        lse_pointer = library.pointer(lse)
    sink_pointer, sink_dtype = call.sinks or (0, 0)
    device, stream, capturing = call.device, library.stream(call.device), arrays.is_capturing
    pointers = q_pointer, k_pointer, v_pointer, out_pointer, lse_pointer, sink_pointer

    both = few is not None and many is not None
    if few is not None:
        lse0 = heads_q * rows
        if call.packed:
            q0 = o0 = lse0 = 0
        decode = (call.launches(few.sized, scale, not both), library, q, device, stream, capturing,
                  (*pointers, call.lengths, call.starts, call.table, call.k_scale[1], call.v_scale[1]),
                  (q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2, lse0, rows, call.table_stride), call.slopes, both)
    if many is not None:
        starts = call.starts
        if unpacked:
            steps = library.steps_int32(q, outer + 1, rows)
            starts = library.pointer(steps)
        where = packed.Pages(starts, call.lengths, call.table, call.table_stride, pages, 0 if few is None else MAX_QUERIES + 1)
        forward = (library, q, device, stream, capturing, call.batch, outer * rows, call.capacity,
                   (*pointers, 0, q1, q2, k0, k1, k2, v0, v1, v2, 0, o1, o2), scale, sink_dtype, call.slopes, where, both)
        try:
            ready = many.ready(*forward)
        except Unmappable:
            many = plans.without_maps(many, device, capturing(stream))
            ready = many.ready(*forward)
    if both:
        # The forward kernel comes first: the last of its blocks, of 400 us at 32k keys, leave SMs idle, which the decode kernel's
        # many small ones fill.
        with streams.beside(device, stream) as other:
            many.launch(other, ready)
            few.run(*decode)
    elif many is not None:
        many.launch(stream, ready)
    else:
        few.run(*decode)
    if out is not None and target is not out:
        library.assign(out, target)
    if return_lse and unpacked:
        lse = library.by_sequence(lse, outer)
    return target if out is None else out, lse


def plans_of(call: CacheCall) -> tuple:
    """(plan for sequences of up to `MAX_QUERIES` queries, plan for those of more), None where there are none or, of the former,
    where a forward kernel must serve all. Raises `AttentionError` if no kernel can."""
    ops = call.ops
    few = _find(call, "decode") if "decode" in ops else None
    return few, _find(call, "forward") if few is None or "forward" in ops else None


def _find(call: CacheCall, op: str):
    """The plan for what `call.problem(op)` says, or None if that is "decode" and only forward kernels can serve it."""
    _, (_, _, heads_q, head_dim), *_ = call.views[0]
    heads_kv, head_dim_v = call.views[2][1][2:]
    device, alibi, sinks = call.device, bool(call.slopes), call.sinks is not None
    batch, keys = bucket_batch(call.batch), bucket_length(call.expected)
    if op == "decode":
        key = ("decode", device, call.dtype, call.kv_dtype, heads_q, heads_kv, head_dim, head_dim_v, call.left, call.right,
               call.softcap, alibi, sinks, call.page_size, batch, call.decode_queries, keys)
    else:
        key = ("paged", device, call.dtype, heads_q, heads_kv, head_dim, head_dim_v, call.left, call.right, call.softcap, alibi,
               sinks, call.page_size or call.capacity, batch, bucket_length(call.queries), keys)
    plan = plans.find(key)
    if plan is None and key not in _without_decode:
        if op == "decode" and call.forward_only(plans.detect(device)):
            if len(_without_decode) >= MAX_REMEMBERED:
                _without_decode.clear()
            _without_decode.add(key)
            return None
        plan = plans.make(call.problem(op), device, arrays.is_capturing(call.library.stream(device)))
    return plan


def _gaps(view: tuple) -> bool:
    """Whether rows of one batch entry do not begin where those of the one before end."""
    _, (outer, rows, _, _), stride0, stride1, *_ = view
    return outer > 1 and stride0 != rows * stride1


def _suited_queries(library, q, view: tuple, unpacked: bool) -> tuple:
    """(q or a packed copy that a kernel can read in place, what `read` says of it)."""
    pointer, _, stride0, stride1, stride2, stride3, _, _ = view
    if (stride3 != 1 or pointer & 15 or (stride0 | stride1 | stride2) & 7) and unsuited(view, True) or unpacked and _gaps(view):
        q = library.packed(q)
        view = library.read(q)
    return q, view


def _suited_cache(library, array, view: tuple, chunk: int) -> tuple:
    """The same of a cache."""
    pointer, _, stride0, stride1, stride2, stride3, _, _ = view
    if (stride3 != 1 or pointer & 15 or (stride0 | stride1 | stride2) & chunk) and unsuited_cache(view, chunk):
        array = library.packed(array)
        view = library.read(array)
    return array, view


def chunk_of(call: CacheCall) -> int:
    """Elements of a cache in 16 bytes, less 1."""
    return 15 if call.kv_dtype == "e4m3" else 7


def unsuited_cache(view: tuple, chunk: int) -> str | None:
    """Why kernels cannot read a cache in place, or None. `chunk` is how many elements 16 bytes have, less 1."""
    pointer, shape, *strides = view[:6]
    used = [stride for stride, size in zip(strides[:3], shape) if size > 1]  # the stride of a size of 1 means nothing
    if strides[3] != 1 and shape[3] > 1:
        return f"its last stride is {strides[3]}, not 1"
    if pointer & 15:
        return "its address is not a multiple of 16 bytes"
    if any(stride & chunk for stride in used):
        return f"its strides {tuple(strides)} are not multiples of {chunk + 1} elements"
    return None


def _empty(call: CacheCall, sinks, return_lse: bool) -> tuple:
    """(out, lse or None) where there is no query or no room for a key: nothing to launch."""
    library, shape = call.library, (*call.views[0][1][:3], call.views[2][1][3])
    out = library.empty(call.q, shape) if call.out is None else call.out
    lse = library.empty_float32(call.q, (shape[0], shape[2], shape[1])) if return_lse else None
    if 0 not in shape:
        library.zero(out)
        if return_lse:
            library.fill_lse(lse, sinks)
    return out, lse


def _through_cupy(inputs: tuple, keywords: dict):
    """`attention_with_kvcache` on arrays that only speak DLPack, with results in their library."""
    like, out = inputs[0], keywords["out"]
    for name in ("cache_seqlens", "page_table", "cu_seqlens_q", "sinks", "alibi_slopes", "out"):
        keywords[name] = OTHER.to_cupy(keywords[name], name)
    results = attention_with_kvcache(*(OTHER.to_cupy(array, name) for array, name in zip(inputs, ("q", "k_cache", "v_cache"))),
                                     **keywords)
    if keywords["return_lse"]:
        return (OTHER.from_cupy(results[0], like) if out is None else out), OTHER.from_cupy(results[1], like)
    return OTHER.from_cupy(results, like) if out is None else out
