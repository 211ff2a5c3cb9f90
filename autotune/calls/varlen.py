"""Attention over packed sequences, each as long as it likes: `attention_varlen`.

    out = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=True)

Where sequences begin stays on the device, so a captured CUDA graph can be replayed with other lengths.
"""

from __future__ import annotations

from . import plans
from .arguments import (UNREADABLE, bounds_of, check_out, number, positive_scale, read_sinks, read_slopes, records, refuse_config,
                        sentence)
from .call import Call
from ..device.arrays import LIBRARIES, OTHER, AttentionError, library_of
from ..core.masks import CAUSAL, FULL
from .dense import NO_PREFIX, NO_WINDOW, suited, unsuited
from .varlenchecks import describe_varlen, longest_of, read_packed


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, window=NO_WINDOW,
                     prefix=NO_PREFIX, scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None,
                     config=None):
    """`attention` of each of B sequences that are packed: q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv).

    Sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys cu_seqlens_k[b] to cu_seqlens_k[b + 1]; both
    arrays are (B + 1,) int32 on the device, where they are read: nothing waits for them, and a captured graph can be replayed
    with others. A length may be 0. Returns out (total_q, Hq, Dv), and with `return_lse` also lse (Hq, total_q) float32. Rows
    of no sequence, behind the last one, are left as they are.

    `max_seqlen_q` and `max_seqlen_k` are the largest lengths, or more: they choose the config and never change the result. Starts
    that do not rise, or lie outside of the arrays, give wrong results, but nothing outside of the arrays is read or written.
    `prefix` is of each sequence's own first keys. `alibi_slopes` are (Hq,) or (B, Hq). The other
    arguments, what is copied and what is raised are as in `attention`.
    """
    library = LIBRARIES.get(type(q)) or library_of(q)
    if library is OTHER:
        return _through_cupy((q, k, v, cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), dict(
            causal=causal, window=window, prefix=prefix, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            return_lse=return_lse, out=out, config=config))
    if library.traced():
        refuse_config(config)
        return library.ops.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
            window=window, prefix=prefix, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            return_lse=return_lse, out=out)
    bounds = (CAUSAL if causal else FULL) if window is NO_WINDOW and prefix is NO_PREFIX else bounds_of(causal, window, prefix)
    vector = library.vector
    try:
        q_pointer, (total_q, heads_q, head_dim), (q0, q1, q2), dtype, device = vector(q)
        k_pointer, (total_k, heads_kv, head_dim_k), (k0, k1, k2), dtype_k, device_k = vector(k)
        v_pointer, (total_v, heads_v, head_dim_v), (v0, v1, v2), dtype_v, device_v = vector(v)
        starts_q, (size,), (step_q,), dtype_starts_q, device_starts_q = vector(cu_seqlens_q)
        starts_k, (size_k,), (step_k,), dtype_starts_k, device_starts_k = vector(cu_seqlens_k)
        if not (total_k == total_v and heads_kv == heads_v and not heads_q % heads_kv and head_dim == head_dim_k
                and dtype == dtype_k == dtype_v and dtype_starts_q == dtype_starts_k == library.int32 and size == size_k > 0
                and device == device_k == device_v == device_starts_q == device_starts_k >= 0):
            raise AttentionError("q, k, v and where sequences begin do not fit together")
        dtype_name = library.dtypes[dtype]
    except UNREADABLE as error:
        raise sentence(describe_varlen, error, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, bounds, softcap,
                       sinks, alibi_slopes) from None
    if library.grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or sinks is not None or out is not None
                                   or alibi_slopes is not None or library.forward_mode()):
        if records(library, q, k, v, sinks, alibi_slopes, out):
            from .autograd import attend  # with it comes torch
            from .gradients import Packed

            starts = [each.contiguous() for each in (cu_seqlens_q, cu_seqlens_k)]
            places = *starts, longest_of("max_seqlen_q", max_seqlen_q, total_q), longest_of("max_seqlen_k", max_seqlen_k, total_k)
            return attend(attention_varlen, library, q, k, v, places, Packed(*places), bounds=bounds, scale=scale,
                          softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, return_lse=return_lse, out=out, config=config)
    batch = size - 1
    if out is not None:
        read_packed(library, "out", out)
        check_out(library, out[None], (1, total_q, heads_q, head_dim_v), dtype, device)
    longest_q, longest_k = max_seqlen_q, max_seqlen_k
    if not (type(longest_q) is type(longest_k) is int and 0 < longest_q <= total_q and 0 < longest_k <= total_k):
        longest_q, longest_k = longest_of("max_seqlen_q", longest_q, total_q), longest_of("max_seqlen_k", longest_k, total_k)
    if type(softcap) is not float:
        softcap = number(softcap)
    call = Call()
    call.op, call.kv = "forward", "varlen"
    call.library, call.device, call.config = library, device, config
    call.dtype = call.kv_dtype = dtype_name
    call.page_size, call.deterministic = 0, False
    call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v = heads_q, heads_kv, head_dim, head_dim_v
    call.bounds, call.softcap = bounds, softcap
    call.batch, call.seqlen_q, call.seqlen_k, call.longest_q, call.longest_k = batch, total_q, total_k, longest_q, longest_k
    call.sinks = call.sink_dtype = call.alibi_slopes = 0
    if sinks is not None:
        sinks = read_sinks(call, sinks)
    if alibi_slopes is not None:
        alibi_slopes = read_slopes(call, alibi_slopes)
    if not (batch and total_q and total_k):
        return _empty(library, q, (total_q, heads_q, head_dim_v), sinks, scale, return_lse, out)
    call.stream = library.stream(device)
    plan = plans.find(call.key()) or plans.plan_of(call)

    if scale is None:
        call.scale = plan.scale
    else:
        call.scale, negative = positive_scale(scale)
        if negative:
            q = library.negated(q)
            q_pointer, _, (q0, q1, q2), _, _ = vector(q)
    aligned = plan.aligned
    if q2 != 1 or k2 != 1 or v2 != 1 or aligned and (
            (q_pointer | k_pointer | v_pointer) & 15 or (q0 | q1 | k0 | k1 | v0 | v1) & 7):
        q, (q_pointer, q0, q1) = _suited(library, q, aligned)
        k, (k_pointer, k0, k1) = _suited(library, k, aligned)
        v, (v_pointer, v0, v1) = _suited(library, v, aligned)
    if step_q != 1 and size > 1:
        cu_seqlens_q = library.packed(cu_seqlens_q)
        starts_q = library.pointer(cu_seqlens_q)
    if step_k != 1 and size > 1:
        cu_seqlens_k = library.packed(cu_seqlens_k)
        starts_k = library.pointer(cu_seqlens_k)
    call.like, call.q, call.k, call.v = q, q_pointer, k_pointer, v_pointer
    call.cu_seqlens_q, call.cu_seqlens_k = starts_q, starts_k
    call.q_batch_stride = call.k_batch_stride = call.v_batch_stride = call.out_batch_stride = 0
    call.q_row_stride, call.q_head_stride, call.k_row_stride, call.k_head_stride = q0, q1, k0, k1
    call.v_row_stride, call.v_head_stride = v0, v1
    target = out
    if out is None or unsuited(library.read(out[None]), aligned):
        o1 = head_dim_v
        o0 = heads_q * o1
        # Rows of no sequence keep what they have where the caller can see it.
        target = library.packed(out) if out is not None else \
            library.dense(q, device, (total_q, heads_q, head_dim_v), (o0, o1, 1))
        call.out = library.pointer(target)
    else:
        call.out, _, (o0, o1, _), _, _ = vector(out)
    call.out_row_stride, call.out_head_stride = o0, o1
    lse = library.empty_float32(q, (heads_q, total_q)) if return_lse else None
    call.lse = library.pointer(lse) if return_lse else 0
    plans.run(plan, call)
    if out is None:
        out = target
    elif target is not out:
        library.assign(out, target)
    return (out, lse) if return_lse else out


def _suited(library, array, aligned: bool) -> tuple:
    """(array or a packed copy that a kernel can read in place, its pointer and first two strides)."""
    one, view = suited(library, array[None], aligned)
    return one, (view[0], *view[3:5])


def _empty(library, q, shape, sinks, scale, return_lse: bool, out):
    """The result where there is no query or no key: nothing to launch."""
    if scale is not None:
        positive_scale(scale)
    out = library.empty(q, shape) if out is None else out
    lse = library.empty_float32(q, (shape[1], shape[0])) if return_lse else None
    if shape[0]:
        library.zero(out)
        if return_lse:
            library.fill_lse(lse[None], sinks)
    return (out, lse) if return_lse else out


def _through_cupy(inputs: tuple, longest: tuple, keywords: dict):
    """`attention_varlen` on arrays that only speak DLPack, with results in their library."""
    like, out = inputs[0], keywords["out"]
    for name in ("sinks", "alibi_slopes", "out"):
        keywords[name] = OTHER.if_given(keywords[name], name)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    results = attention_varlen(*(OTHER.to_cupy(array, name) for array, name in zip(inputs, names)), *longest, **keywords)
    if keywords["return_lse"]:
        return (OTHER.from_cupy(results[0], like) if out is None else out), OTHER.from_cupy(results[1], like)
    return OTHER.from_cupy(results, like) if out is None else out
