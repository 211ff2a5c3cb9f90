"""A flash-attn cache in autotune's words: where new keys go, and which page table says the same as an index or a left padding.

All of it is arithmetic on the device; nothing waits for a length.
"""

from __future__ import annotations

import torch


def lengths_of(cache_seqlens, batch: int, k_cache):
    """`cache_seqlens`, which may be one int, as (batch,) int32 on the device, or None."""
    if isinstance(cache_seqlens, int):
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    return cache_seqlens


def appended(k_cache, v_cache, k, v, lengths, cache_batch_idx, page_table):
    """Writes k and v (B, new, Hkv, D) into the caches behind the first `lengths`; returns the lengths with them."""
    batch, new = k.shape[:2]
    at = lengths[:, None].long() + torch.arange(new, device=k.device)
    if page_table is None:
        rows = torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx.long()
        place = rows[:, None], at
    else:
        page_size = k_cache.shape[1]
        place = page_table.gather(1, at // page_size).long(), at % page_size
    k_cache.index_put_(place, k.to(k_cache.dtype))
    v_cache.index_put_(place, v.to(v_cache.dtype))
    return lengths + new


def one_page_a_sequence(cache_batch_idx):
    """The page table under which sequence b has the keys of entry cache_batch_idx[b] of a dense cache: pages as long as it."""
    return cache_batch_idx.to(torch.int32)[:, None]


def gathered(k, v, first, most: int) -> tuple:
    """(k and v as pages of one key, page table (B, most) int32) for sequences whose keys are the rows first[b], first[b] + 1, ...
    of k and v (rows, Hkv, D). Entries beyond the last row stay on it."""
    steps = torch.arange(most, dtype=torch.int32, device=k.device)
    table = (first.to(torch.int32)[:, None] + steps).clamp_(max=max(k.shape[0] - 1, 0))
    return k[:, None], v[:, None], table
