"""Attention of new queries over cached keys: `attention_with_kvcache`.

    out = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)                  # k_cache (B, Smax, Hkv, D)
    out = attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, page_table=table)   # (pages, page_size, Hkv, D)
    out = attention_with_kvcache(q, ..., cu_seqlens_q=starts, max_seqlen_q=4)                    # q (total_q, Hq, D)

Lengths and page tables stay on the device, so a captured CUDA graph can be replayed with others.
"""

from __future__ import annotations

from ..device import arrays
from . import again, plans
from .arguments import bounds_of, positive_scale, refuse_config
from ..device.arrays import LIBRARIES, OTHER, library_of
from ..core.masks import CAUSAL, FULL
from .dense import NO_PREFIX, NO_WINDOW, attention, unsuited
from .cachecall import Arrays, forward_only, understand
from .call import Call
from .plan import Plan
from ..kernels.decode.base import MAX_QUERIES
from ..device.tensormap import Unmappable

_without_decode: set[tuple] = set()  # keys of decode problems that forward kernels serve
MAX_REMEMBERED = 4096


def attention_with_kvcache(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, causal=True, cu_seqlens_q=None,
                           max_seqlen_q=None, max_seqlen_k=None, k_scale=None, v_scale=None, num_splits=None, window=NO_WINDOW,
                           prefix=NO_PREFIX, scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None,
                           check=False, config=None):
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
    cut where it has up to 16 queries; None leaves that to the config. `prefix` is of each sequence's
    own first keys. The other arguments are as in `attention`.

    A cache may be 8-bit, float8_e4m3fn (with CuPy its bytes, uint8), under queries of 16 bits, up to 16 of a sequence: keys are
    then k_cache * k_scale and values v_cache * v_scale. A scale is a number, or float32 on the device, one or (Hkv,); None is 1.

    Raises `AttentionError` for arguments that do not fit together, and what `attention` raises.
    """
    library = LIBRARIES.get(type(q)) or library_of(q)
    if library is OTHER or library.traced():
        keywords = dict(cache_seqlens=cache_seqlens, page_table=page_table, causal=causal, cu_seqlens_q=cu_seqlens_q,
                        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, k_scale=k_scale, v_scale=v_scale,
                        num_splits=num_splits, window=window, prefix=prefix, scale=scale, softcap=softcap, sinks=sinks,
                        alibi_slopes=alibi_slopes, return_lse=return_lse, out=out)
        if library is OTHER:
            return _through_cupy((q, k_cache, v_cache), {**keywords, "check": check, "config": config})
        refuse_config(config)
        return library.ops.attention_with_kvcache(q, k_cache, v_cache, **keywords)
    form = None
    if k_scale is v_scale is num_splits is sinks is alibi_slopes is config is None and window is NO_WINDOW and \
            prefix is NO_PREFIX and not (check or return_lse) and (
                cu_seqlens_q is max_seqlen_q is None or type(max_seqlen_q) is int and max_seqlen_q <= MAX_QUERIES):
        form, result = again.launch(library, "decode", q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, out,
                                    max_seqlen_q, max_seqlen_k, causal, scale, softcap)
        if result is not None:
            return result
    bounds = (CAUSAL if causal else FULL) if window is NO_WINDOW and prefix is NO_PREFIX else bounds_of(causal, window, prefix)
    call, given = understand(library, q, k_cache, v_cache, cache_seqlens, page_table, bounds, cu_seqlens_q, max_seqlen_q,
                             max_seqlen_k, k_scale, v_scale, num_splits, softcap, sinks, alibi_slopes, out, check, config)
    if given.whole:
        return attention(q, k_cache, v_cache, causal=causal, window=window, prefix=prefix, scale=scale, softcap=softcap,
                         sinks=sinks, alibi_slopes=alibi_slopes, return_lse=return_lse, out=out, config=config)
    empty = not (call.batch and given.queries and call.seqlen_k)
    result, lse = _empty(call, given, sinks, return_lse) if empty else _launched(call, given, scale, return_lse)
    if given.packed:
        result, lse = result[0], lse[0] if return_lse else None
    result = result if out is None else out
    if form is not None:
        again.keep(form, call, q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, result)
    return (result, lse) if return_lse else result


def _launched(call: Call, given: Arrays, scale, return_lse: bool) -> tuple:
    """(out, lse or None) of a call that is not empty; packed ones as those of one sequence."""
    library, packed = call.library, given.packed
    call.stream = library.stream(call.device)
    few, many, twin = _plans_of(call, given)
    q, k_cache, v_cache, q_view, k_view, v_view = given.q, given.k_cache, given.v_cache, given.q_view, given.k_view, given.v_view
    if scale is None:
        scale = (few or many).scale
    else:
        scale, negative = positive_scale(scale)
        if negative:
            q = library.negated(q)
            q_view = library.read(q)
    unpacked = not packed and many is not None  # then its queries are taken as packed, which forward kernels need
    call.q, (outer, rows, heads_q, _), q0, q1, q2, q3, _, _ = q_view
    call.k, _, k0, k1, k2, k3, _, _ = k_view
    call.v, _, v0, v1, v2, v3, _, _ = v_view
    if unpacked or q3 != 1 or k3 != 1 or v3 != 1 or (call.q | call.k | call.v) & 15 or (q0 | q1 | q2) & 7 or \
            (k0 | k1 | k2 | v0 | v1 | v2) & chunk_of(call):
        q, (call.q, _, q0, q1, q2, _, _, _) = _suited_queries(library, q, q_view, unpacked)
        k_cache, (call.k, _, k0, k1, k2, _, _, _) = _suited_cache(library, k_cache, k_view, chunk_of(call))
        v_cache, (call.v, _, v0, v1, v2, _, _, _) = _suited_cache(library, v_cache, v_view, chunk_of(call))
    call.q_row_stride, call.q_head_stride = q1, q2
    call.k_batch_stride, call.k_row_stride, call.k_head_stride = k0, k1, k2
    call.v_batch_stride, call.v_row_stride, call.v_head_stride = v0, v1, v2
    out = given.out
    if out is None or unsuited(out_view := library.read(out), True) or unpacked and _gaps(out_view):
        o2 = call.head_dim_v
        o1 = heads_q * o2
        o0 = rows * o1
        target = library.dense(q, call.device, (outer, rows, heads_q, o2), (o0, o1, o2, 1))
        call.out = library.pointer(target)
    else:
        target, (call.out, _, o0, o1, o2, _, _, _) = out, out_view
    call.out_row_stride, call.out_head_stride = o1, o2
    lse, call.lse = None, 0
    if return_lse:
        lse = library.empty_float32(q, (1, heads_q, outer * rows) if unpacked else (outer, heads_q, rows))
        call.lse = library.pointer(lse)
    call.like = q
    if many is not None:
        # Its name only keeps the array alive until both kernels are launched.
        _steps = _complete_twin(twin, call, scale, outer, rows, unpacked, few is not None)
    if few is not None:
        call.scale = scale if call.k_scale == 1.0 else positive_scale(scale * call.k_scale)[0]
        call.lse_head_stride = rows
        if packed:
            call.q_batch_stride = call.out_batch_stride = call.lse_batch_stride = 0
        else:
            call.q_batch_stride, call.out_batch_stride, call.lse_batch_stride = q0, o0, heads_q * rows
        if many is None:
            few.run(call)
            call.plan = few
        else:
            call.pages = 0  # nothing is prefetched: it does not begin before what ran before it has ended
            _run_both(few, call, many, twin)
    else:
        plans.run(many, twin)
    if out is not None and target is not out:
        library.assign(out, target)
    if return_lse and unpacked:
        lse = library.by_sequence(lse, outer)
    return target if out is None else out, lse


def _complete_twin(twin: Call, call: Call, scale: float, outer: int, rows: int, unpacked: bool, shared: bool):
    """Puts in `twin` what is known only now. Gives what must live until it has been launched."""
    library, steps = call.library, None
    twin.scale, twin.like, twin.pages, twin.seqlen_q = scale, call.like, call.pages, outer * rows
    twin.min_queries = MAX_QUERIES + 1 if shared else 0
    for name in ("q", "k", "v", "out", "lse", "q_row_stride", "q_head_stride", "k_batch_stride", "k_row_stride", "k_head_stride",
                 "v_batch_stride", "v_row_stride", "v_head_stride", "out_row_stride", "out_head_stride"):
        setattr(twin, name, getattr(call, name))
    twin.q_batch_stride = twin.out_batch_stride = 0
    if unpacked:
        steps = library.steps_int32(call.like, outer + 1, rows)
        twin.cu_seqlens_q = library.pointer(steps)
    return steps


def _run_both(few: Plan, call: Call, many: Plan, twin: Call) -> None:
    try:
        few.run_beside(call, many, twin)
    except Unmappable:
        few.run_beside(call, plans.without_maps(many, call.device, arrays.is_capturing(call.stream)), twin)


def _plans_of(call: Call, given: Arrays) -> tuple:
    """(plan for sequences of up to `MAX_QUERIES` queries, plan for those of more, its call), None where there are none or, of the
    former, where a forward kernel must serve all. Raises `AttentionError` if no kernel can."""
    config, mixed = call.config, given.packed and given.queries > MAX_QUERIES
    of_forward = config is not None and plans.op_of(config) == "forward"
    few = many = twin = None
    if of_forward and mixed:
        call.config = None  # it is for the sequences of many queries
    if mixed or given.queries <= MAX_QUERIES and not of_forward:
        few = _few(call, given)
    if few is None or given.queries > MAX_QUERIES:
        twin, key = call.twin(given.queries, config if of_forward or few is None else None)
        twin.stream = call.stream
        many = plans.find(key) or plans.plan_of(twin)
    return few, many, twin


def _few(call: Call, given: Arrays):
    """The plan of decode kernels, or None if only forward kernels can serve these."""
    key = call.key()
    plan = plans.find(key)
    if plan is None and key not in _without_decode:
        if call.config is None and forward_only(call, given, plans.detect(call.device)):
            if len(_without_decode) >= MAX_REMEMBERED:
                _without_decode.clear()
            _without_decode.add(key)
            return None
        plan = plans.plan_of(call)
    return plan


def _gaps(view: tuple) -> bool:
    """Whether rows of one batch entry do not begin where those of the one before end."""
    _, (outer, rows, _, _), stride0, stride1, *_ = view
    return outer > 1 and stride0 != rows * stride1


def _suited_queries(library, q, view: tuple, unpacked: bool) -> tuple:
    """(q or a packed copy that a kernel can read in place, what `read` says of it)."""
    if unsuited(view, True) or unpacked and _gaps(view):
        q = library.packed(q)
        view = library.read(q)
    return q, view


def _suited_cache(library, array, view: tuple, chunk: int) -> tuple:
    """The same of a cache."""
    if unsuited_cache(view, chunk):
        array = library.packed(array)
        view = library.read(array)
    return array, view


def chunk_of(call: Call) -> int:
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


def _empty(call: Call, given: Arrays, sinks, return_lse: bool) -> tuple:
    """(out, lse or None) where there is no query or no room for a key: nothing to launch."""
    library, shape = call.library, (*given.q_view[1][:3], call.head_dim_v)
    out = library.empty(given.q, shape) if given.out is None else given.out
    lse = library.empty_float32(given.q, (shape[0], shape[2], shape[1])) if return_lse else None
    if 0 not in shape:
        library.zero(out)
        if return_lse:
            library.fill_lse(lse, sinks)
    return out, lse


def _through_cupy(inputs: tuple, keywords: dict):
    """`attention_with_kvcache` on arrays that only speak DLPack, with results in their library."""
    like, out = inputs[0], keywords["out"]
    for name in ("cache_seqlens", "page_table", "cu_seqlens_q", "sinks", "alibi_slopes", "out"):
        keywords[name] = OTHER.if_given(keywords[name], name)
    results = attention_with_kvcache(*(OTHER.to_cupy(array, name) for array, name in zip(inputs, ("q", "k_cache", "v_cache"))),
                                     **keywords)
    if keywords["return_lse"]:
        return (OTHER.from_cupy(results[0], like) if out is None else out), OTHER.from_cupy(results[1], like)
    return OTHER.from_cupy(results, like) if out is None else out
