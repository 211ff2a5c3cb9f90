"""`torch.ops.autotune.*`: attention as operators that torch can trace, compile and export.

    torch.compile(model, fullgraph=True)       # `autotune.attention` inside it becomes a node of the graph
    torch.ops.autotune.attention(q, k, v)      # the same by hand, e.g. for a graph that was exported

Eager calls do not come here: a dispatcher costs 6 to 10 us, which is what a decode step takes. `autotune.attention`,
`attention_varlen` and `attention_with_kvcache` choose by themselves (`device.arrays.TorchArrays.traced`).

The operators are defined through `torch.library.Library`, the cheapest of torch's ways; `custom_op` costs 35 us more a call.
A window's -1 is no bound. An lse that was not asked for has no elements.
"""

from __future__ import annotations

import sys
from functools import partial, wraps

import torch

from ..calls import dense, kvcache, varlen, writing
from ..calls.arguments import bounds_of, window_bounds
from ..calls.autograd import attend
from ..calls.gradients import Packed
from ..calls.varlenchecks import longest_of
from ..core.masks import NUMBERS
from ..device.arrays import AttentionError, TorchArrays, library_of
from . import training

MASK = "*, bool causal=False, SymInt left=-1, SymInt right=-1, float? scale=None, float softcap=0.0, Tensor? sinks=None, " \
       "Tensor? alibi_slopes=None, bool return_lse=False" + "".join(f", SymInt {name}=0" for name in NUMBERS)
PACKED = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
CACHE = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens=None, Tensor? page_table=None, " \
        "Tensor? cu_seqlens_q=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? k_scale=None, " \
        "Tensor? v_scale=None, float? k_factor=None, float? v_factor=None, int? num_splits=None"
SCHEMAS = {
    "attention": f"(Tensor q, Tensor k, Tensor v, {MASK}) -> (Tensor, Tensor)",
    "attention_out": f"(Tensor(a!) out, Tensor q, Tensor k, Tensor v, {MASK}) -> Tensor",
    "attention_varlen": f"({PACKED}, {MASK}) -> (Tensor, Tensor)",
    "attention_varlen_out": f"(Tensor(a!) out, {PACKED}, {MASK}) -> Tensor",
    "attention_with_kvcache": f"({CACHE}, {MASK}) -> (Tensor, Tensor)",
    "attention_with_kvcache_out": f"(Tensor(a!) out, {CACHE}, {MASK}) -> Tensor",
}
WRITE = "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, " \
        "Tensor? k_scale=None, Tensor? v_scale=None, " \
        "float? k_factor=None, float? v_factor=None) -> ()"
LIBRARY = torch.library.Library("autotune", "DEF")


# Kernels: what a launch does, once tracing is over. -------------------------------------------------------------------------

def without_autocast(run):
    """`run`, whose inputs have been cast: a call inside must not ask for that again."""
    @wraps(run)
    def inside(q, *inputs, **mask):
        if not torch.is_autocast_enabled(q.device.type):
            return run(q, *inputs, **mask)
        with torch.autocast(q.device.type, enabled=False):
            return run(q, *inputs, **mask)
    return inside


@without_autocast
def run_attention(q, k, v, *, return_lse=False, out=None, **mask):
    """(out, lse) of `calls.attention`; as the operator has them."""
    result = dense.attention(q, k, v, return_lse=return_lse, out=out, **_mask(**mask))
    return result if return_lse else (result, _no_lse(q))


@without_autocast
def run_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, return_lse=False, out=None, **mask):
    """(out, lse) of `calls.attention_varlen`."""
    result = varlen.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse=return_lse,
                                     out=out, **_mask(**mask))
    return result if return_lse else (result, _no_lse(q))


@without_autocast
def run_kvcache(q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None, max_seqlen_k=None,
                k_scale=None, v_scale=None, k_factor=None, v_factor=None, num_splits=None, *, return_lse=False, out=None, **mask):
    """(out, lse) of `calls.attention_with_kvcache`. `k_factor` and `v_factor` are scales that are numbers."""
    result = kvcache.attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=page_table, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, k_scale=k_factor if k_scale is None else k_scale,
        v_scale=v_factor if v_scale is None else v_scale, num_splits=num_splits, return_lse=return_lse, out=out,
        **_mask(**mask))
    return result if return_lse else (result, _no_lse(q))


def run_write(k, v, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None, k_factor=None, v_factor=None) -> None:
    """`calls.write_kvcache`, likewise."""
    writing.write_kvcache(k, v, k_cache, v_cache, slot_mapping, k_scale=k_factor if k_scale is None else k_scale,
                          v_scale=v_factor if v_scale is None else v_scale)


def _mask(left=-1, right=-1, **rest) -> dict:
    window = (None if left < 0 else left, None if right < 0 else right)
    return {"window": dense.NO_WINDOW if window == dense.NO_WINDOW else window, **rest}


def _no_lse(q):
    return q.new_empty((0,), dtype=torch.float32)


# What tracing sees: shapes, strides and dtypes, also of sizes that are symbols. ------------------------------------------------

def _fake_attention(q, k, v, *_, return_lse=False, **__):
    batch, rows, heads, _ = q.shape
    return _fake(q, (batch, rows, heads, v.shape[3]), (batch, heads, rows), return_lse)


def _fake_varlen(q, k, v, *_, return_lse=False, **__):
    rows, heads, _ = q.shape
    return _fake(q, (rows, heads, v.shape[2]), (heads, rows), return_lse)


def _fake_kvcache(q, k_cache, v_cache, *_, return_lse=False, **__):
    *batch, rows, heads, _ = q.shape
    return _fake(q, (*batch, rows, heads, v_cache.shape[3]), (*batch, heads, rows), return_lse)


def _fake_out(fake, out, *inputs, **mask):
    return fake(*inputs, **mask)[1]


def _fake(q, shape: tuple, lse_shape: tuple, return_lse: bool):
    return q.new_empty(shape), q.new_empty(lse_shape if return_lse else (0,), dtype=torch.float32)


# What `autotune.attention` and its kin call instead of launching. --------------------------------------------------------------

def attention(q, k, v, *, out=None, **mask):
    """`autotune.attention` through its operator, its floats cast as autocast asks."""
    q, k, v = _lowered(q, k, v)
    if _records_under_autocast(q, k, v, mask["sinks"]):
        return attend(dense.attention, library_of(q), q, k, v, (), None, out=out, **_bounded(mask))
    if training.records(q, k, v, mask["sinks"], mask["alibi_slopes"]):
        return training.attention(q, k, v, out=out, **mask)
    return _called("attention", out, (q, k, v), mask, dict(q=q, k=k, v=v))


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, out=None, **mask):
    """`autotune.attention_varlen` through its operator."""
    q, k, v = _lowered(q, k, v)
    if _records_under_autocast(q, k, v, mask["sinks"]):
        places = (*(starts.contiguous() for starts in (cu_seqlens_q, cu_seqlens_k)),
                  longest_of("max_seqlen_q", max_seqlen_q, q.shape[0]), longest_of("max_seqlen_k", max_seqlen_k, k.shape[0]))
        return attend(varlen.attention_varlen, library_of(q), q, k, v, places, Packed(*places), out=out, **_bounded(mask))
    if training.records(q, k, v, mask["sinks"], mask["alibi_slopes"]):
        places = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k)
        return training.attention(q, k, v, places, out=out, **mask)
    inputs = q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _called("attention_varlen", out, inputs, mask, dict(q=q, k=k, v=v))


def attention_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, max_seqlen_k, k_scale,
                           v_scale, num_splits, out=None, **mask):
    """`autotune.attention_with_kvcache` through its operator. An 8-bit cache stays as it is under autocast."""
    if k_cache.element_size() > 1:
        q, k_cache, v_cache = _lowered(q, k_cache, v_cache)
    else:
        q, = _lowered(q)
    k_scale, k_factor = _scale(k_scale)
    v_scale, v_factor = _scale(v_scale)
    inputs = (q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, max_seqlen_k, k_scale, v_scale,
              k_factor, v_factor, num_splits)
    return _called("attention_with_kvcache", out, inputs, mask, dict(q=q, k_cache=k_cache, v_cache=v_cache))


def write_kvcache(k, v, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None) -> None:
    """`autotune.write_kvcache` through its operator."""
    k_scale, k_factor = _scale(k_scale)
    v_scale, v_factor = _scale(v_scale)
    torch.ops.autotune.write_kvcache.default(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_factor, v_factor)


def _called(name: str, out, inputs: tuple, mask: dict, arrays: dict):
    causal, scale, sinks, slopes = (mask[key] for key in ("causal", "scale", "sinks", "alibi_slopes"))
    if torch.is_grad_enabled():
        _refuse_grad(**arrays, out=out, sinks=sinks, alibi_slopes=slopes)
    left, right = window_bounds(mask["window"], causal)
    rest = dict(causal=causal, left=-1 if left is None else left, right=-1 if right is None else right,
                scale=None if scale is None else float(scale), softcap=float(mask["softcap"]), sinks=sinks, alibi_slopes=slopes,
                return_lse=mask["return_lse"], **{name: mask[name] for name in NUMBERS})
    if out is None:
        result, lse = getattr(torch.ops.autotune, name).default(*inputs, **rest)
    else:
        result, lse = out, getattr(torch.ops.autotune, f"{name}_out").default(out, *inputs, **rest)
    return (result, lse) if mask["return_lse"] else result


def _bounded(mask: dict) -> dict:
    """The arguments of a call with what its mask hides as `attend` takes it."""
    rest = dict(mask)
    return {"bounds": bounds_of(rest.pop("causal"), rest.pop("window"), *[rest.pop(name) for name in NUMBERS]), **rest}


def _records_under_autocast(q, *others) -> bool:
    """Whether gradients are recorded and nothing but autocast looks on: casts have theirs, and calls have theirs."""
    return torch.is_autocast_enabled(q.device.type) and torch.is_grad_enabled() and not torch.compiler.is_compiling() \
        and not torch._C._len_torch_dispatch_stack() and any(array is not None and array.requires_grad for array in (q, *others))


def _refuse_grad(**arrays) -> None:
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False):
            raise AttentionError(f"{name} requires grad, but this operator records no gradients while torch compiles or exports: "
                                 f"call under torch.no_grad(), pass {name}.detach(), or leave this call out of the graph")


def _lowered(*tensors):
    """Floats in autocast's dtype, where it is on for their device, as torch does for scaled_dot_product_attention."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) for tensor in tensors)


def _scale(value):
    """(scale that is a tensor, scale that is a number) of an 8-bit cache."""
    return (value, None) if value is None or isinstance(value, torch.Tensor) else (None, float(value))


def _define() -> None:
    kernels = {"attention": (run_attention, _fake_attention), "attention_varlen": (run_varlen, _fake_varlen),
               "attention_with_kvcache": (run_kvcache, _fake_kvcache)}
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    for name, (run, fake) in kernels.items():
        LIBRARY.define(name + SCHEMAS[name], tags=tags)
        LIBRARY.define(f"{name}_out{SCHEMAS[name + '_out']}", tags=tags)
        torch.library.register_fake(f"autotune::{name}", fake, lib=LIBRARY)
        torch.library.register_fake(f"autotune::{name}_out", partial(_fake_out, fake), lib=LIBRARY)
        implement(LIBRARY, name, run, "CUDA")


    LIBRARY.define(f"write_kvcache{WRITE}", tags=tags)
    torch.library.register_fake("autotune::write_kvcache", lambda *_, **__: None, lib=LIBRARY)
    LIBRARY.impl("write_kvcache", without_autocast(run_write), "CUDA")


def implement(library: torch.library.Library, name: str, run, key: str) -> None:
    """Makes `run` what `autotune::name` and its variant with `out` do for dispatch key `key`."""
    library.impl(name, run, key)
    library.impl(f"{name}_out", lambda out, *rest, **named: run(*rest, **named, out=out)[1], key)


_define()
TorchArrays.ops = sys.modules[__name__]
