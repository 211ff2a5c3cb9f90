"""flash-attn's functions, computed by autotune: change the import, keep the calls.

    from autotune.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache    # flash_attn 2
    from autotune.flash_attn.interface import flash_attn_func                                          # flash_attn_interface (3)
    from autotune.flash_attn.cute import flash_attn_func                                               # flash_attn.cute (4)

Names, order, defaults and results are those of each generation. What is not supported is refused by name when it is not at its
default (`common`). Gradients are those of `autotune.attention` and `attention_varlen`; over a cache there are none.
"""

from __future__ import annotations

from . import common

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]
NAME = "flash_attn 2"


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                    softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """out (B, Sq, Hq, D), or (out, lse (B, Hq, Sq), None) with `return_attn_probs`: probabilities are never stored."""
    common.refuse(NAME, dropout_p=dropout_p)
    common.settle(NAME, deterministic, q, k, v)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return (*common.dense(q, k, v, mask), None) if return_attn_probs else common.dense_out(q, k, v, mask)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """The same of kv (B, Sk, 2, Hkv, D)."""
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """The same of qkv (B, S, 3, H, D)."""
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale, causal, window_size, softcap,
                           alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    """out (total_q, Hq, D), or (out, lse (Hq, total_q), None). With `block_table` k and v are pages."""
    common.refuse(NAME, dropout_p=dropout_p)
    common.settle(NAME, deterministic, q, k, v)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    result = common.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, page_table=block_table,
                           return_lse=return_attn_probs)
    return (*result, None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(
        q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """The same of kv (total_k, 2, Hkv, D)."""
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """The same of qkv (total, 3, H, D)."""
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False):
    """out (B, Sq, Hq, D) [, lse (B, Hq, Sq)]. k and v (B, new, Hkv, D), if given, are written into the cache behind its first
    `cache_seqlens` keys, which do not count them."""
    common.refuse(NAME, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return common.cached(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, mask, num_splits,
                         return_lse=return_softmax_lse)
