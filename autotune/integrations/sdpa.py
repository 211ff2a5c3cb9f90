"""torch's own attention functions, computed by autotune.

    autotune.activate()                                              # from here on, in this process
    torch.nn.functional.scaled_dot_product_attention(q, k, v)        # wherever torch chooses its flash backend
    torch.nn.attention.varlen.varlen_attn(q, k, v, starts, starts, longest, longest)     # packed, and pages on Hopper too
    autotune.restore()

It is torch's registry of flash implementations that is used (`torch.nn.attention.activate_flash_attention_impl("autotune")` is
the same). What autotune does not serve (dropout, inputs that require grad, fp8, debug masks) goes to what was there before.
"""

from __future__ import annotations

import warnings

import torch
from torch.nn.attention import _registry

from ..calls.dense import attention
from ..calls.kvcache import attention_with_kvcache
from ..calls.varlen import attention_varlen
from ..core.problem import ProblemError
from ..device.arrays import DTYPE_NAMES, AttentionError
from ..flash_attn.cache import gathered

NAME = "autotune"
_DTYPES = {getattr(torch, name) for name in DTYPE_NAMES}


class Handle:
    """Overrides that are in place until `remove`."""

    def __init__(self, library: torch.library.Library):
        self.library = library

    def remove(self) -> None:
        """Gives torch its own kernels back."""
        self.library._destroy()


def activate() -> None:
    """Makes torch's flash attention autotune's, until `restore`. A torch before 2.10 has no registry to do so."""
    _registry.register_flash_attention_impl(NAME, register_fn=override)
    _registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Undoes `activate`; also what another implementation has activated."""
    _registry.restore_flash_attention_impl()


def override(key: str = "CUDA") -> Handle:
    """Puts autotune's functions in place of torch's for dispatch key `key`, as far as this torch has them."""
    library = torch.library.Library("aten", "IMPL")
    handle = Handle(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s)Warning only once for all operators|.*Overriding a previously registered kernel")
        for name, make in (("_scaled_dot_product_flash_attention", _scaled), ("_flash_attention_forward", _flash),
                           ("_flash_attention_forward_no_dropout_inplace", _flash_inplace)):
            operator = getattr(torch.ops.aten, name, None)
            if operator is not None:
                library.impl(name, make(_before(operator.default, key)), key)
    return handle


def _before(operator, key: str):
    """The kernel that `operator` has for `key` now, to be called once it is overridden."""
    name = operator._schema.name
    try:
        kernel = torch.library.get_kernel(name, key)
    except RuntimeError:  # none: what the operator is made of serves
        def missing(*inputs, **more):
            raise NotImplementedError(f"{name} has no other kernel for {key}, and autotune does not serve this call: it needs no "
                                      "dropout, no gradients and one dtype of 16 or 32 bits")
        return missing
    dispatch_keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return lambda *inputs, **more: kernel.call_boxed(dispatch_keys, *inputs, **more)


def _scaled(before):
    def ours(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        if dropout_p or return_debug_mask or is_causal and query.shape[2] != key.shape[2]:
            raise AttentionError("dropout, debug masks and causal masks that are not square are torch's own")
        _refuse(query, key, value)
        out = torch.empty_like(query) if query.shape[3] == value.shape[3] else query.new_empty((*query.shape[:3], value.shape[3]))
        _, lse = attention(*(x.detach().transpose(1, 2) for x in (query, key, value)),
                           causal=is_causal, scale=scale, return_lse=True, out=out.transpose(1, 2))
        return (out, lse, None, None, query.shape[2], key.shape[2], *_auxiliary(query))
    return _or(ours, before)


def _flash(before):
    def ours(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **mask):
        if dropout_p or return_debug_mask:
            raise AttentionError("dropout and debug masks are torch's own")
        return (*_attended(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, None, **mask), *_auxiliary(query))
    return _or(ours, before)


def _flash_inplace(before):
    def ours(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **mask):
        if dropout_p or return_debug_mask:
            raise AttentionError("dropout and debug masks are torch's own")
        return _attended(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, out, **mask)[1]
    return _or(ours, before)


def _or(ours, before):
    """`ours`, and `before` for what it does not serve."""
    def either(*inputs, **more):
        try:
            return ours(*inputs, **more)
        except (AttentionError, ProblemError):
            return before(*inputs, **more)
    return either


def _attended(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, out, *, scale=None, window_size_left=None,
              window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):
    """(out, lse) of aten::_flash_attention_forward: q (B, Sq, H, D), or packed (total_q, H, D), then also over pages."""
    _refuse(q, k, v)
    q, k, v = q.detach(), k.detach(), v.detach()
    window = tuple(None if side is None or side < 0 else side for side in (window_size_left, window_size_right))
    mask = dict(causal=causal, window=window, scale=scale, alibi_slopes=alibi_slopes, return_lse=True, out=out)
    if starts_q is None and seqused_k is None and block_table is None:
        return attention(q, k, v, **mask)
    if block_table is None and seqused_k is None:
        return attention_varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, **mask)
    if block_table is None:
        k, v, block_table = gathered(k, v, starts_k[:-1], longest_k)
    return attention_with_kvcache(
    q,
    k,
    v,
    cache_seqlens=seqused_k if seqused_k is not None else starts_k.diff(),
    page_table=block_table,
    cu_seqlens_q=starts_q,
    max_seqlen_q=longest_q,
    max_seqlen_k=longest_k,
    num_splits=num_splits or None,
     **mask)


def _refuse(*tensors) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise AttentionError("gradients are torch's own")
    if tensors[0].dtype not in _DTYPES or len({tensor.dtype for tensor in tensors}) > 1:
        raise AttentionError("other dtypes are torch's own")


def _auxiliary(query) -> tuple:
    """The random state that a backward with dropout would need, its offset, and the debug mask."""
    return (query.new_zeros((2,), dtype=torch.uint64), query.new_zeros((), dtype=torch.uint64), query.new_empty((0,)))
