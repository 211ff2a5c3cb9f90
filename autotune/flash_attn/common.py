"""What the three generations of flash-attn's functions share: their words in autotune's, and what is refused.

A parameter that would change the result and that autotune cannot serve raises NotImplementedError with its name, unless it is at
its default. `num_splits`, `pack_gqa` and `scheduler_metadata` are hints: they are taken, and change nothing, but for `num_splits`
of a cache, which is followed. Every forward of autotune is `deterministic`; gradients are if torch is told so (`settle`).
"""

from __future__ import annotations

import torch

from ..calls.dense import attention
from ..calls.kvcache import attention_with_kvcache
from ..calls.varlen import attention_varlen
from .cache import appended, gathered, lengths_of, one_page_a_sequence

REMEDY = {"dropout_p": "attention of autotune drops nothing, so set the model to eval() or its attention dropout to 0",
          "rotary_cos": "rotate q and k before the call", "rotary_sin": "rotate q and k before the call"}


def refuse(module: str, **values) -> None:
    """Raises NotImplementedError for the first of `values` that is not None, 0 or False."""
    for name, value in values.items():
        if value is None or isinstance(value, (int, float)) and not value:
            continue
        raise NotImplementedError(f"{name} of {module} is not supported by autotune: leave it at its default"
                                  + (f"; {REMEDY[name]}" if name in REMEDY else ""))


def mask_of(softmax_scale, causal, window_size, softcap, alibi_slopes=None, sinks=None) -> dict:
    """flash-attn's mask and score arguments as autotune has them; a window's side of -1 is None."""
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return dict(causal=causal, window=(left, right), scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)


def dense(q, k, v, mask: dict) -> tuple:
    """(out (B, Sq, Hq, Dv), lse (B, Hq, Sq))"""
    return attention(q, k, v, return_lse=True, **mask)


def dense_out(q, k, v, mask: dict):
    return attention(q, k, v, **mask)


def settle(module: str, deterministic: bool, *arrays) -> None:
    """Raises NotImplementedError where `deterministic` asks for gradients of the same bits and torch has not been told so."""
    if deterministic and torch.is_grad_enabled() and any(array.requires_grad for array in arrays) \
            and not torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(f"deterministic of {module} is not supported by autotune where gradients are recorded: call "
                                  "torch.use_deterministic_algorithms(True), which gives them the same bits every time")


def packed(q, k, v, starts_q, starts_k, longest_q, longest_k, mask: dict, *, used_k=None, page_table=None, k_scale=None,
           v_scale=None, num_splits=None, return_lse=False):
    """Attention of packed sequences, or of packed queries over a cache of pages, (num_pages, page_size, Hkv, D). The lengths of
    the latter are `used_k`, or steps of `starts_k`. With `used_k` and no pages only the first keys of each sequence are there."""
    cache = dict(k_scale=k_scale, v_scale=v_scale, num_splits=num_splits or None, return_lse=return_lse, **mask)
    if starts_q is None:
        if q.dim() != 4:
            raise ValueError(f"cu_seqlens_q is None and q has shape {tuple(q.shape)}; without cu_seqlens_q q must be (batch, "
                             "seqlen_q, heads_q, head_dim)")
        return attention_with_kvcache(q, k, v, cache_seqlens=used_k, page_table=page_table, max_seqlen_k=longest_k, **cache)
    longest_q = q.shape[0] if longest_q is None else longest_q
    if page_table is None and used_k is None:
        if starts_k is None:
            raise ValueError("cu_seqlens_k is None; it must be (batch + 1,) int32, unless there is a page table")
        longest_k = k.shape[0] if longest_k is None else longest_k
        return attention_varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, return_lse=return_lse, **mask)
    if page_table is None:
        if starts_k is None:
            raise ValueError("cu_seqlens_k is None; with seqused_k and no page table it must be (batch + 1,) int32")
        k, v, page_table = gathered(k, v, starts_k[:-1], k.shape[0] if longest_k is None else longest_k)
    if used_k is None:
        if starts_k is None:
            raise ValueError("cu_seqlens_k and seqused_k are None; with a page table one of them must say how long sequences are")
        used_k = starts_k.diff()
    return attention_with_kvcache(q, k, v, cache_seqlens=used_k, page_table=page_table, cu_seqlens_q=starts_q,
                                  max_seqlen_q=longest_q, max_seqlen_k=longest_k, **cache)


def cached(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, mask: dict, num_splits, *,
           starts_q=None, longest_q=None, k_descale=None, v_descale=None, return_lse=False):
    """flash_attn_with_kvcache: writes k and v, if given, behind what is in the cache, then attends to all of it."""
    if (k is None) != (v is None):
        raise ValueError("k and v must both be given, or neither")
    batch = q.shape[0] if starts_q is None else starts_q.shape[0] - 1
    lengths = lengths_of(cache_seqlens, batch, k_cache)
    if k is not None:
        if lengths is None:
            raise ValueError("cache_seqlens is None; with k and v it must say where in the cache they go")
        lengths = appended(k_cache, v_cache, k, v, lengths, cache_batch_idx, page_table)
    if cache_batch_idx is not None and page_table is not None:
        raise NotImplementedError("cache_batch_idx with a page table is not supported: put the pages into the table's rows")
    if cache_leftpad is not None:
        if page_table is not None:
            raise NotImplementedError("cache_leftpad with a page table is not supported by autotune: leave it at its default")
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        capacity = k_cache.shape[1]
        lengths = (capacity if lengths is None else lengths) - cache_leftpad
        k_cache, v_cache, page_table = gathered(k_cache.flatten(0, 1), v_cache.flatten(0, 1), rows * capacity + cache_leftpad,
                                                capacity)
    elif cache_batch_idx is not None:
        page_table = one_page_a_sequence(cache_batch_idx)
    return attention_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, page_table=page_table, cu_seqlens_q=starts_q, max_seqlen_q=longest_q,
        k_scale=per_head("k_descale", k_descale), v_scale=per_head("v_descale", v_descale), num_splits=num_splits or None,
        return_lse=return_lse, **mask)


def per_head(name: str, scale):
    """A descale (B, Hkv) as autotune has it, (Hkv,): one for all sequences. Raises NotImplementedError for others, as far as
    strides show."""
    if scale is None or scale.dim() < 2:
        return scale
    if scale.shape[0] > 1 and scale.stride(0):
        raise NotImplementedError(f"{name} of each sequence is not supported by autotune: expand one row (heads_kv,) to the "
                                  "batch, or pass that")
    return scale[0].contiguous()
