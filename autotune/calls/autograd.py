"""Gradients of `attention` and `attention_varlen` for torch tensors that require them.

Saved are q, k, v, out, lse and the sinks; scores are computed again. Gradients are the same bits every time if
`torch.use_deterministic_algorithms` is on in the backward. Imported at the first call that needs it: torch is optional.
"""

from __future__ import annotations

import torch

from ..core.gpu import detect
from ..core.masks import Bounds
from ..device.arrays import AttentionError
from ..kernels import KERNELS, candidates, refusals
from . import gradients
from .arguments import number, positive_scale


class _Attend(torch.autograd.Function):
    """(out, lse) of q, k, v and sinks (or None). `call` is the rest of a call, by `Recorded`."""

    @staticmethod
    def forward(ctx, call, q, k, v, sinks):
        out, lse = call.forward(q, k, v, sinks)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None, None
        saved = ctx.saved_tensors
        results = _Differentiate.apply(ctx.call, *saved, dout, dlse, ctx.needs_input_grad[1:])
        return None, *(result if needed else None for result, needed in zip(results, ctx.needs_input_grad[1:]))

    @staticmethod
    def jvp(ctx, *tangents):
        raise AttentionError("attention has no forward-mode gradient; use reverse mode (backward), or detach the dual tensors")


class _Differentiate(torch.autograd.Function):
    """The gradients, which have none of their own."""

    @staticmethod
    def forward(ctx, call, q, k, v, out, lse, sinks, dout, dlse, needed):
        return call.backward(q, k, v, out, lse, sinks, dout, dlse, needed[3])

    @staticmethod
    def backward(ctx, *_):
        raise AttentionError("attention cannot be differentiated twice: its backward has no backward; "
                             "leave out create_graph=True, or use torch.nn.functional.scaled_dot_product_attention's math "
                             "backend")


class Recorded:
    """A call without its arrays that have gradients: `function` is `attention` or `attention_varlen`, `places` its arguments
    between v and the keywords."""

    __slots__ = ("function", "places", "keywords", "library", "mask", "slopes", "packed")

    def __init__(self, function, places: tuple, keywords: dict, library, mask: gradients.Mask, slopes, packed):
        self.function, self.places, self.keywords, self.library = function, places, keywords, library
        self.mask, self.slopes, self.packed = mask, slopes, packed

    def forward(self, q, k, v, sinks) -> tuple:
        return self.function(q, k, v, *self.places, **self.keywords, sinks=sinks, return_lse=True)

    def backward(self, q, k, v, out, lse, sinks, dout, dlse, want_sinks: bool) -> tuple:
        if not (q.numel() and k.numel()):
            return self._of_nothing(q, k, v, sinks, dlse, want_sinks)
        if dout is None:
            dout = out.new_zeros(out.shape[-1]).expand(out.shape)
        elif dout.dtype != q.dtype:
            dout = dout.to(q.dtype)
        if dlse is not None:
            dlse = dlse.to(torch.float32).contiguous()
        mask = self.mask._replace(deterministic=torch.are_deterministic_algorithms_enabled())
        return gradients.differentiate(self.library, q, k, v, out, lse, dout, dlse, sinks, self.slopes, mask, self.packed,
                                       want_sinks)


    @staticmethod
    def _of_nothing(q, k, v, sinks, dlse, want_sinks: bool) -> tuple:
        """The gradients where there is no query or no key: out is 0 and lse the sink, if there is one."""
        dsinks = None
        if want_sinks:  # lse is (B, Hq, Sq) or (Hq, total_q)
            dsinks = torch.zeros_like(sinks)
            if dlse is not None:
                dsinks += dlse.movedim(-2, 0).flatten(1).sum(1).to(sinks.dtype)
        return *(array.new_zeros(array.shape) for array in (q, k, v)), dsinks


def attend(function, library, q, k, v, places: tuple, packed: gradients.Packed | None, *, bounds: Bounds, scale, softcap,
           sinks, alibi_slopes, return_lse: bool, out, config=None):
    """`function`(q, k, v, *places, ...) with its gradients recorded; for `attention_varlen`, `packed` says where sequences begin.

    Raises `AttentionError` for what cannot be differentiated: by ALiBi slopes, by a scale, into a given `out`, twice, forwards,
    or where no kernel can.
    """
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise AttentionError("alibi_slopes requires grad, but attention has no gradient for it; pass alibi_slopes.detach()")
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise AttentionError("scale requires grad, but attention has no gradient for it; multiply q by it instead")
    if out is not None:
        raise AttentionError("out cannot be given where gradients are recorded; call under torch.no_grad(), or leave out away")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        scale, negative = positive_scale(scale)
        q = -q if negative else q
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.to(torch.float32).contiguous()
    if packed is None:
        bounds = bounds.simplified(q.shape[1], k.shape[1])
    mask = gradients.Mask(bounds, number(softcap), scale)
    _must_be_served(library.dtypes[q.dtype], q, k, v, mask, sinks is not None, alibi_slopes is not None, packed)
    keywords = dict(**bounds.arguments, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, config=config)
    results = _Attend.apply(Recorded(function, places, keywords, library, mask, alibi_slopes, packed), q, k, v, sinks)
    return results if return_lse else results[0]


_refused: dict[tuple, str] = {}  # what refusals depend on -> the sentence, "" if a kernel can


def _must_be_served(dtype: str, q, k, v, mask: gradients.Mask, sinks: bool, alibi: bool, packed) -> None:
    """Raises `AttentionError` unless a kernel can compute these gradients: now, not when the loss has been computed."""
    device = q.get_device()
    key = device, dtype, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], mask.bounds.kind, mask.softcap, alibi, \
        packed is None
    message = _refused.get(key)
    if message is None:
        problem, gpu = gradients.problem_of(dtype, q, k, v, mask, sinks, alibi, packed), detect(device)
        reasons = [] if candidates(problem, gpu) else \
            [f"{name}: {reason}" for name, reason in refusals(problem, gpu).items() if KERNELS[name].op == problem.op]
        message = _refused[key] = reasons and (f"no kernel computes the gradients of {problem} on {gpu.name} "
                                               f"({'; '.join(reasons)}); call under torch.no_grad(), or convert q, k and v")
    if message:
        raise AttentionError(message)
