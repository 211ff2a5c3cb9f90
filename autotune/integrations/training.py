"""`torch.ops.autotune.attention_recorded`: attention whose gradients are part of a graph that torch compiles or exports.

    torch.compile(step, fullgraph=True)        # with tensors that require grad: both ways are nodes of its graphs

One operator for dense and for packed sequences, which have starts; its gradient is `attention_backward`. All arguments are
positional: torch records no gradient by a tensor that is a keyword.
"""

from __future__ import annotations

import torch

from ..calls import dense, varlen
from ..calls.arguments import positive_scale, window_bounds
from ..calls.autograd import Recorded, _must_be_served
from ..calls.gradients import Mask, Packed
from ..core.masks import NUMBERS, Bounds
from ..device.arrays import AttentionError, library_of

LIBRARY = torch.library.Library("autotune", "FRAGMENT")
REST = "Tensor? sinks, Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, " \
       "SymInt max_seqlen_k, float scale, float softcap, SymInt left, SymInt right" \
       + "".join(f", SymInt {name}" for name in NUMBERS)
RECORDED = f"(Tensor q, Tensor k, Tensor v, {REST}) -> (Tensor, Tensor)"
BACKWARD = f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, bool want_sinks, {REST}) " \
           "-> (Tensor, Tensor, Tensor, Tensor)"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def records(*arrays) -> bool:
    return torch.is_grad_enabled() and any(array is not None and array.requires_grad for array in arrays)


def attention(q, k, v, places: tuple = (), *, causal, window, scale, softcap, sinks, alibi_slopes, return_lse, out, **numbers):
    """`autotune.attention`, or with `places`, its arguments between v and the keywords, `attention_varlen`, with gradients.

    Raises `AttentionError` for what has none, as calls outside of graphs do.
    """
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise AttentionError("alibi_slopes requires grad, but attention has no gradient for it; pass alibi_slopes.detach()")
    if isinstance(scale, torch.Tensor):
        raise AttentionError("scale is a tensor, which a graph with gradients cannot hold; pass a float, or multiply q by it")
    if out is not None:
        raise AttentionError("out cannot be given where gradients are recorded; call under torch.no_grad(), or leave out away")
    scale, negative = (q.shape[-1] ** -0.5, False) if scale is None else positive_scale(scale)
    if negative:
        q = -q
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.to(torch.float32).contiguous()
    left, right = window_bounds(window, causal)
    result, lse = torch.ops.autotune.attention_recorded.default(
        q, k, v, sinks, alibi_slopes, *(places or (None, None, 0, 0)), scale, float(softcap), -1 if left is None else left,
        -1 if right is None else right, *(numbers[name] for name in NUMBERS))
    return (result, lse) if return_lse else result


# What launches, once tracing is over.

def run_recorded(q, k, v, sinks, *rest):
    call = _recorded(q, k, *rest)
    with torch.no_grad():
        _must_be_served(call.library.dtypes[q.dtype], q, k, v, call.mask, sinks is not None, call.slopes is not None, call.packed)
        return call.forward(q, k, v, sinks)


def run_backward(q, k, v, out, lse, dout, dlse, want_sinks, sinks, *rest):
    with torch.no_grad():
        *gradients, dsinks = _recorded(q, k, *rest).backward(q, k, v, out, lse, sinks, dout, dlse, want_sinks)
    return *gradients, q.new_empty((0,)) if dsinks is None else dsinks


def _recorded(q, k, slopes, starts_q, starts_k, longest_q, longest_k, scale, softcap, left, right, *numbers) -> Recorded:
    bounds = Bounds(None if left < 0 else left, None if right < 0 else right, *numbers)
    if starts_q is None:
        function, places, packed, bounds = dense.attention, (), None, bounds.simplified(q.shape[1], k.shape[1])
    else:
        function, places = varlen.attention_varlen, (starts_q, starts_k, longest_q, longest_k)
        packed = Packed(*places)
    keywords = dict(**bounds.arguments, scale=scale, softcap=softcap, alibi_slopes=slopes)
    return Recorded(function, places, keywords, library_of(q), Mask(bounds, softcap, scale), slopes, packed)


# What tracing sees.

def _fake_recorded(q, k, v, *_):
    lse = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse, dtype=torch.float32)


def _fake_backward(q, k, v, out, lse, dout, dlse, want_sinks, sinks, *_):
    like = (q, k, v, sinks) if want_sinks else (q, k, v, q.new_empty((0,)))
    return tuple(array.new_empty(array.shape) for array in like)


def _save(ctx, inputs, output) -> None:
    q, k, v, *tensors = inputs[:7]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.rest = inputs[7:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse):
    wanted = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * len(wanted)
    q, k, v, out, lse, sinks, *tensors = ctx.saved_tensors
    found = torch.ops.autotune.attention_backward.default(q, k, v, out, lse, dout, dlse, wanted[3], sinks, *tensors, *ctx.rest)
    return *(each if needed else None for each, needed in zip(found, wanted)), *[None] * (len(wanted) - 4)


def _twice(ctx, *_):
    raise AttentionError("attention cannot be differentiated twice: its backward has no backward")


def _define() -> None:
    for name, schema, run, fake in (("attention_recorded", RECORDED, run_recorded, _fake_recorded),
                                    ("attention_backward", BACKWARD, run_backward, _fake_backward)):
        LIBRARY.define(name + schema, tags=TAGS)
        torch.library.register_fake(f"autotune::{name}", fake, lib=LIBRARY)
        LIBRARY.impl(name, run, "CUDA")
    torch.library.register_autograd("autotune::attention_recorded", _differentiate, setup_context=_save, lib=LIBRARY)
    torch.library.register_autograd("autotune::attention_backward", _twice, lib=LIBRARY)


_define()
