"""`differentiate`: the gradients of a call of attention on arrays."""

from __future__ import annotations

from typing import NamedTuple

from . import plans
from .arguments import read_sinks, read_slopes
from .call import Call
from ..core.masks import Bounds
from ..core.problem import Problem
from ..kernels.backward.base import TENSORS


class Mask(NamedTuple):
    """What of a call decides gradients besides its arrays. `scale` is above 0."""

    bounds: Bounds
    softcap: float
    scale: float
    deterministic: bool = False  # the same bits every time


class Packed(NamedTuple):
    """Where sequences begin in packed arrays, (batch + 1,) int32 each, and the longest ones, which only choose the config."""

    cu_seqlens_q: object
    cu_seqlens_k: object
    longest_q: int
    longest_k: int


def problem_of(dtype: str, q, k, v, mask: Mask, sinks: bool, alibi: bool, packed: Packed | None) -> Problem:
    """The backward problem of a call on arrays of these shapes, simplified."""
    *_, heads_q, head_dim = q.shape
    if packed is None:
        batch, lengths = q.shape[0], (q.shape[1], k.shape[1])
    else:
        batch, lengths = len(packed.cu_seqlens_q) - 1, (packed.longest_q, packed.longest_k)
    return Problem(op="backward", dtype=dtype, batch=batch, heads_q=heads_q, heads_kv=k.shape[-2], seqlen_q=lengths[0],
                   seqlen_k=lengths[1], head_dim=head_dim, head_dim_v=v.shape[-1], softcap=mask.softcap,
                   alibi=alibi, sinks=sinks, kv="dense" if packed is None else "varlen", deterministic=mask.deterministic,
                   **mask.bounds._asdict()).simplified()


def differentiate(library, q, k, v, out, lse, dout, dlse, sinks, slopes, mask: Mask, packed: Packed | None,
                  want_sinks: bool) -> tuple:
    """(dq, dk, dv, dsinks or None) of one call of `attention`, or with `packed` of `attention_varlen`.

    q, k, v, sinks and slopes are what the call had, out and lse what it gave; dout is as out, of the dtype of q, dlse as lse in
    float32 or None. What a kernel cannot read in place is copied. `slopes` are float32 with a last stride of 1, or None.
    """
    call = Call()
    call.op, call.kv, call.config = "backward", "dense" if packed is None else "varlen", None
    call.library, call.like, call.device = library, q, library.vector(q)[4]
    call.stream = library.stream(call.device)
    call.dtype = call.kv_dtype = library.dtypes[library.vector(q)[3]]
    *_, call.heads_q, call.head_dim = q.shape
    *_, call.heads_kv, call.head_dim_v = v.shape
    call.bounds, call.softcap, call.scale = mask.bounds, float(mask.softcap), mask.scale
    call.page_size, call.deterministic = 0, mask.deterministic
    if packed is None:
        call.batch, call.seqlen_q, call.seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        call.longest_q, call.longest_k = call.seqlen_q, call.seqlen_k
    else:
        call.batch, call.seqlen_q, call.seqlen_k = len(packed.cu_seqlens_q) - 1, q.shape[0], k.shape[0]
        call.longest_q, call.longest_k = packed.longest_q, packed.longest_k
        call.cu_seqlens_q, call.cu_seqlens_k = library.pointer(packed.cu_seqlens_q), library.pointer(packed.cu_seqlens_k)
    call.sinks = call.sink_dtype = call.alibi_slopes = 0
    if sinks is not None:
        sinks = read_sinks(call, sinks)
    if slopes is not None:
        slopes = read_slopes(call, slopes)
    plan = plans.find(call.key()) or plans.plan_of(call)

    dq, dk, dv = (library.empty(array, array.shape) for array in (q, k, v))
    dsinks = library.empty(sinks, sinks.shape) if want_sinks else None
    kept = []
    for name, array in zip(TENSORS, (q, k, v, out, dout, dq, dk, dv)):
        pointer, shape, steps, _, _ = library.vector(array)
        if _unreadable(pointer, shape, steps, plan.kernel.mapped):
            array = library.packed(array)
            pointer, shape, steps, _, _ = library.vector(array)
        kept.append(array)
        setattr(call, name, pointer)
        call.set_strides(name, *(steps[:3] if packed is None else (0, *steps[:2])))
    call.lse, call.dlse = library.pointer(lse), 0 if dlse is None else library.pointer(dlse)
    call.dsinks = library.pointer(dsinks) if want_sinks else 0
    plan.run(call)
    return dq, dk, dv, dsinks


def _unreadable(pointer: int, shape: tuple, strides: tuple, mapped: bool) -> bool:
    """Whether a kernel cannot read an array in place; one that is `mapped` needs strides above 0. A stride of a size of 1 means
    nothing."""
    if pointer & 15 or strides[-1] != 1 and shape[-1] > 1:
        return True
    return any((stride & 7 or mapped and stride <= 0) and size > 1 for stride, size in zip(strides[:-1], shape))
