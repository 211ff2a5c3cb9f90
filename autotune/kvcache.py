"""Attention of a few new queries over cached keys: `attention_with_kvcache`.

    out = attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)                  # k_cache (B, Smax, Hkv, D)
    out = attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, page_table=table)   # (pages, page_size, Hkv, D)
    out = attention_with_kvcache(q, ..., cu_seqlens_q=starts, max_seqlen_q=4)                    # q (total_q, Hq, D)

Lengths and page tables stay on the device, so a captured CUDA graph can be replayed with others.
"""

from __future__ import annotations

from . import arrays, plans
from .arguments import check_out, check_sinks, integer, number, positive_scale, readable_slopes, refuse_grad, window_bounds
from .arrays import LIBRARIES, OTHER, AttentionError, library_of
from .attention import NO_WINDOW, attention, suited, unsuited
from .cachechecks import as_one_sequence, check_contents, check_starts, describe_cache, integers, most_queries, scales, starts_of
from .kernels.decode import MAX_QUERIES
from .problem import bucket_batch, bucket_length


def attention_with_kvcache(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, causal=True, cu_seqlens_q=None,
                           max_seqlen_q=None, max_seqlen_k=None, k_scale=None, v_scale=None, num_splits=None, window=NO_WINDOW,
                           scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None, check=False):
    """Attention of q (B, Sq, Hq, D), Sq up to 16, over the first cache_seqlens[b] keys of each sequence's cache.

    The keys of the new queries are already in the cache: with `causal` the last query sees all cache_seqlens[b] keys, the one
    before it one less. k_cache is (B, Smax, Hkv, D) and v_cache (B, Smax, Hkv, Dv), or with `page_table` (B, max_pages) int32,
    (num_pages, page_size, Hkv, D or Dv): key j of sequence b is slot j % page_size of page page_table[b, j // page_size].
    `cache_seqlens` is (B,) int32 on the device; without it every sequence is full. Returns out (B, Sq, Hq, Dv), and with
    `return_lse` also lse (B, Hq, Sq) float32. A sequence of no keys gives 0 and -inf (or its sink).

    Slots beyond a length and table entries of pages beyond it are never read. Lengths beyond the cache count as full; with
    `check` they raise, and so do page numbers out of range, which else are the caller's business: looking takes a
    synchronisation. `max_seqlen_k` says how long sequences are about, and helps choose a config; it never changes the result.
    `num_splits` is into how many parts each sequence's keys are cut; None leaves that to the config. The other arguments are
    as in `attention`.

    A cache may be 8-bit, float8_e4m3fn (with CuPy its bytes, uint8), under queries of 16 bits: keys are then k_cache * k_scale
    and values v_cache * v_scale. A scale is a number, or float32 on the device, one or (Hkv,); None is 1.

    More queries than 16, and float32, are served only where `attention` can: over a dense cache that is full. `cu_seqlens_q` with
    `max_seqlen_q` (mixed batches) raises `AttentionError`, as do arguments that do not fit together. Also raises what
    `attention` raises.
    """
    library = LIBRARIES.get(type(q)) or library_of(q)
    if library is OTHER:
        return _through_cupy((q, k_cache, v_cache), dict(
            cache_seqlens=cache_seqlens, page_table=page_table, causal=causal, cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, k_scale=k_scale, v_scale=v_scale, num_splits=num_splits,
            window=window, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, return_lse=return_lse, out=out,
            check=check))
    packed, given, starts_pointer = cu_seqlens_q is not None, out, 0
    if packed:  # the shapes and strides looked at are those of one sequence
        q, out = as_one_sequence(library, "q", q), None if out is None else as_one_sequence(library, "out", out)
        cu_seqlens_q, starts_pointer, batch = starts_of(library, cu_seqlens_q, q)
    elif max_seqlen_q is not None:
        raise AttentionError("max_seqlen_q must be None without cu_seqlens_q: the shape of q says how many queries there are")
    read = library.read
    try:
        q_pointer, (outer, rows, heads_q, head_dim), q0, q1, q2, q3, dtype, device = read(q)
        if not packed:
            batch = outer
        k_pointer, (pages, page_size, heads_kv, head_dim_k), k0, k1, k2, k3, dtype_k, device_k = read(k_cache)
        v_pointer, (pages_v, page_size_v, heads_v, head_dim_v), v0, v1, v2, v3, dtype_v, device_v = read(v_cache)
        if not (pages == pages_v and page_size == page_size_v and heads_kv == heads_v and not heads_q % heads_kv
                and head_dim == head_dim_k and dtype_k == dtype_v and device == device_k == device_v >= 0
                and (page_table is not None or pages == batch)):
            raise AttentionError("q, k_cache and v_cache do not fit together")
        dtype_name = library.dtypes[dtype]
        kv_dtype = dtype_name if dtype_k == dtype else library.cache_dtypes[dtype_k]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _sentence(error, q, k_cache, v_cache, page_table, batch if packed else None) from None
    seqlen_q = most_queries(max_seqlen_q, rows) if packed else rows  # of a sequence, at most
    if cache_seqlens is None:
        lengths_pointer = 0
    else:
        cache_seqlens, lengths_pointer, _, _ = integers(library, "cache_seqlens", cache_seqlens, (batch,), device)
    if page_table is None:
        table_pointer = table_stride = 0
        capacity, page_size = page_size, 0
    else:
        page_table, table_pointer, table_shape, table_stride = integers(library, "page_table", page_table, (batch, None), device)
        capacity = table_shape[1] * page_size
    if check:
        check_contents(library, cache_seqlens, page_table, capacity, pages, page_size)
        if packed:
            check_starts(library, cu_seqlens_q, rows, seqlen_q)
    k_scale, k_scales, k_scale_stride = scales(library, "k_scale", k_scale, heads_kv, device, kv_dtype)
    v_scale, v_scales, v_scale_stride = scales(library, "v_scale", v_scale, heads_kv, device, kv_dtype)
    if num_splits is not None and not (type(num_splits) is int and num_splits > 0):
        raise AttentionError(f"num_splits is {num_splits!r}; it must be an int of at least 1, or None")
    if library.grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad or sinks is not None
                                   or out is not None or alibi_slopes is not None):
        refuse_grad(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, alibi_slopes=alibi_slopes, out=out)
    # What `attention` computes, too.
    whole = not lengths_pointer and not page_size and not packed and num_splits is None and kv_dtype == dtype_name
    if whole and (seqlen_q > MAX_QUERIES or dtype_name == "fp32"):
        return attention(q, k_cache, v_cache, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
                         alibi_slopes=alibi_slopes, return_lse=return_lse, out=out)
    if out is not None:
        check_out(library, out, (outer, rows, heads_q, head_dim_v), dtype, device)
    if type(softcap) is not float:
        softcap = number(softcap)
    left, right = (None, 0 if causal else None) if window is NO_WINDOW else window_bounds(window, causal)
    if right is not None and right >= seqlen_q - 1:  # Problem.simplified, without a Problem
        right = None
    if sinks is None:
        sink_pointer = sink_dtype = 0
    else:
        sink_pointer, sink_stride, sink_dtype = check_sinks(library, sinks, heads_q, device)
        if sink_stride != 1:
            sinks = library.packed(sinks)
            sink_pointer = library.pointer(sinks)
    slopes = ()
    if alibi_slopes is not None:
        alibi_slopes, slopes = readable_slopes(library, alibi_slopes, batch, heads_q, device)
    if not (batch and seqlen_q and capacity):
        return _empty(library, q, (outer, rows, heads_q, head_dim_v), sinks, return_lse, out, packed, given)

    if max_seqlen_k is None:
        expected = capacity
    else:
        expected = max_seqlen_k if type(max_seqlen_k) is int else integer("max_seqlen_k", max_seqlen_k)
    plan = plans.find(("decode", device, dtype_name, kv_dtype, heads_q, heads_kv, head_dim, head_dim_v, left, right, softcap,
                       alibi_slopes is not None, sinks is not None, page_size, bucket_batch(batch), seqlen_q,
                       bucket_length(expected)))
    if plan is None:
        problem = describe_cache(dtype_name, kv_dtype, page_size, batch=batch, seqlen_q=seqlen_q, seqlen_k=expected,
                                 heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v, window_left=left,
                                 window_right=right, softcap=softcap, alibi=alibi_slopes is not None, sinks=sinks is not None)
        plan = plans.make(problem, device, arrays.is_capturing(library.stream(device)))

    if scale is None:
        scale = plan.scale
    else:
        scale, negative = positive_scale(scale)
        if negative:
            q = library.negated(q)
            q_pointer, _, q0, q1, q2, q3, _, _ = read(q)
    if q3 != 1 or q_pointer & 15 or (q0 | q1 | q2) & 7:
        q, (q_pointer, _, q0, q1, q2, q3, _, _) = suited(library, q, True)
    chunk = 15 if kv_dtype == "e4m3" else 7  # elements of 16 bytes, less 1
    if k3 != 1 or v3 != 1 or (k_pointer | v_pointer) & 15 or (k0 | k1 | k2 | v0 | v1 | v2) & chunk:
        k_cache, (k_pointer, _, k0, k1, k2, _, _, _) = _suited_cache(library, k_cache, chunk)
        v_cache, (v_pointer, _, v0, v1, v2, _, _, _) = _suited_cache(library, v_cache, chunk)
    target = out
    if out is None or unsuited(read(out), True):
        target = library.empty(q, (outer, rows, heads_q, head_dim_v))
        out_pointer, o2 = library.pointer(target), head_dim_v
        o1 = heads_q * o2
        o0 = rows * o1
    else:
        out_pointer, _, o0, o1, o2, _, _, _ = read(out)
    lse = library.empty_float32(q, (outer, heads_q, rows)) if return_lse else None
    lse_stride = heads_q * rows
    if packed:
        q0 = o0 = lse_stride = 0

    if k_scale != 1.0:
        scale = positive_scale(scale * k_scale)[0]
    launches = plan.sized(batch, seqlen_q, capacity, not (lengths_pointer or packed), scale, sink_dtype, num_splits or 0,
                          page_size, (k_scale_stride, v_scale_stride), v_scale)
    plan.run(launches, library, q, device, library.stream(device), arrays.is_capturing,
             (q_pointer, k_pointer, v_pointer, out_pointer, library.pointer(lse) if return_lse else 0, sink_pointer,
              lengths_pointer, starts_pointer, table_pointer, k_scales, v_scales),
             (q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2, lse_stride, rows, table_stride), slopes)
    if out is None:
        out = target
    elif target is not out:
        library.assign(out, target)
    return _as_given(out, lse, packed, given)


def _as_given(out, lse, packed: bool, given):
    """What the call returns: `given`, if there was an `out`, and packed results packed."""
    if packed:
        out, lse = out[0], None if lse is None else lse[0]
    if given is not None:
        out = given
    return out if lse is None else (out, lse)


def _suited_cache(library, array, chunk: int) -> tuple:
    """(array or a packed copy that a kernel can read in place, what `read` says of it)."""
    view = library.read(array)
    pointer, shape, *strides = view[:6]
    used = [stride for stride, size in zip(strides, shape) if size > 1]  # the stride of a size of 1 means nothing
    if strides[3] != 1 and shape[3] > 1 or pointer & 15 or any(stride & chunk for stride in used[: 3 if shape[3] > 1 else None]):
        array = library.packed(array)
        view = library.read(array)
    return array, view


def _sentence(error: Exception, q, k_cache, v_cache, page_table, batch: int | None) -> Exception:
    """What is wrong with the arrays, or `error` if nothing is found."""
    from .cachechecks import check_arrays

    try:
        check_arrays(q, k_cache, v_cache, page_table, batch)
    except ValueError as better:
        return better
    return error


def _empty(library, q, shape, sinks, return_lse: bool, out, packed: bool, given):
    """The result where there is no query or no room for a key: nothing to launch."""
    out = library.empty(q, shape) if out is None else out
    lse = library.empty_float32(q, (shape[0], shape[2], shape[1])) if return_lse else None
    if 0 not in shape:
        library.zero(out)
        if return_lse:
            library.fill_lse(lse, sinks)
    return _as_given(out, lse, packed, given)


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
