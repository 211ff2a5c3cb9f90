"""flash_attn.cute, of FlashAttention 4: results are always (out, lse), where lse is None unless `return_lse`."""

from __future__ import annotations

from . import common

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
NAME = "flash_attn.cute (FlashAttention 4)"


def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
                    learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
                    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
                    block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None):
    """(out (B, Sq, Hq, Dv), lse (B, Hq, Sq) or None)"""
    common.refuse(NAME, qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
                  mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
                  block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_recompute_p=gather_bwd_recompute_p,
                  gather_bwd_token_chunk=gather_bwd_token_chunk)
    common.settle(NAME, deterministic, q, k, v)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap, sinks=learnable_sink)
    return common.dense(q, k, v, mask) if return_lse else (common.dense_out(q, k, v, mask), None)


def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
        seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
        return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
        gather_bwd_recompute_p=False, gather_bwd_token_chunk=None):
    """(out (total_q, Hq, Dv), lse (Hq, total_q) or None). With `page_table` k and v are pages, of any size."""
    common.refuse(NAME, qv=qv, seqused_q=seqused_q, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
                  score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
                  aux_tensors=aux_tensors, aux_scalars=aux_scalars, seqlen_k_per_split=seqlen_k_per_split,
                  gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk)
    common.settle(NAME, deterministic, q, k, v)
    mask = common.mask_of(softmax_scale, causal, window_size, softcap, sinks=learnable_sink)
    result = common.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, used_k=seqused_k,
                           page_table=page_table, return_lse=return_lse)
    return result if return_lse else (result, None)
