"""flash_attn_interface, of FlashAttention 3. fp8 inputs are refused; an fp8 cache is served, with a descale for each head."""

from __future__ import annotations

from . import common

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
           "get_scheduler_metadata"]
NAME = "flash_attn_interface (FlashAttention 3)"


def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    """out (B, Sq, Hq, Dv), or (out, lse (B, Hq, Sq)) with `return_attn_probs`."""
    common.refuse(NAME, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk,
                  sm_margin=sm_margin)
    common.settle(NAME, deterministic, q, k, v)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap)
    return common.dense(q, k, v, mask) if return_attn_probs else common.dense_out(q, k, v, mask)


def flash_attn_qkvpacked_func(
        qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False):
    """The same of qkv (B, S, 3, H, D), or with `num_heads_q` (B, S, Hq + 2 * Hkv, D)."""
    if num_heads_q is None:
        q, k, v = qkv.unbind(2)
    else:
        heads_kv = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], 2)
    return flash_attn_func(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
                           softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                           softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                           window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                           sm_margin=0, return_attn_probs=False):
    """out (total_q, Hq, Dv), or (out, lse (Hq, total_q)). Of sequence b the first seqused_k[b] keys are there, if given."""
    common.refuse(NAME, seqused_q=seqused_q, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
                  attention_chunk=attention_chunk, sm_margin=sm_margin)
    common.settle(NAME, deterministic, q, k, v)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap)
    return common.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, used_k=seqused_k,
                         return_lse=return_attn_probs)


def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
        cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None,
        sm_margin=0, return_softmax_lse=False):
    """out (B, Sq, Hq, Dv) [, lse (B, Hq, Sq)]; with `cu_seqlens_q` out (total_q, Hq, Dv) [, lse (Hq, total_q)]."""
    common.refuse(NAME, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cu_seqlens_k_new=cu_seqlens_k_new,
                  rotary_seqlens=rotary_seqlens, q_descale=q_descale, attention_chunk=attention_chunk, sm_margin=sm_margin)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap)
    return common.cached(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, mask, num_splits,
                         starts_q=cu_seqlens_q, longest_q=max_seqlen_q, k_descale=k_descale, v_descale=v_descale,
                         return_lse=return_softmax_lse)


def get_scheduler_metadata(*sizes, **more) -> None:
    """Nothing: launches of autotune plan on the device. To be passed as `scheduler_metadata`."""
    return None
