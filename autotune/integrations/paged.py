"""What serving engines ask alike: attention of packed queries over the pages of a cache, of 16 or of 8 bits.

    paged.attend(q, k_pages, v_pages, paged.Batch(starts, lengths, table, longest_q, longest_k), window=(127, None), out=out)

Everything is arithmetic on the device: an engine may capture it into a graph, and change starts, lengths and pages between
replays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..calls.kvcache import attention_with_kvcache
from ..kernels.decode.base import MAX_QUERIES


@dataclass
class Batch:
    """Sequences of a batch, whose new keys stand in the cache already. Tensors are int32, on the device."""

    starts: torch.Tensor  # (sequences + 1,): where queries begin, and the end of the last ones
    lengths: torch.Tensor  # (sequences,): keys of each, new ones included
    table: torch.Tensor  # (sequences, pages)
    longest_q: int
    longest_k: int
    _pieces: Batch | None = field(default=None, repr=False)  # the same in pieces; layers share it

    def pieces(self, queries: int) -> Batch:
        """The same `queries` in pieces of at most `MAX_QUERIES` that a decode kernel takes, each a sequence that ends at its last
        query's own key. As many as there can be: those behind the last one are empty."""
        if self._pieces is None:
            self._pieces = _cut(self, queries // MAX_QUERIES + self.lengths.shape[0])
        return self._pieces


def attend(q, k_pages, v_pages, batch: Batch, **mask):
    """Attention of q (tokens, Hq, D), causal unless `mask` says otherwise; `mask` is what `attention_with_kvcache` takes.

    Forward kernels do not read 8-bit caches, so prompts over one are cut into pieces for decode kernels, which read its keys
    once for every piece. Raises NotImplementedError for a prompt over an 8-bit cache that is not causal.
    """
    if batch.longest_q == 1 and q.shape[0] == batch.lengths.shape[0]:  # each has one: kernels for that need no starts
        out = mask.pop("out", None)
        result = attention_with_kvcache(q[:, None], k_pages, v_pages, cache_seqlens=batch.lengths, page_table=batch.table,
                                        max_seqlen_k=batch.longest_k, out=None if out is None else out[:, None], **mask)
        return result[:, 0]
    if k_pages.element_size() == 1 and batch.longest_q > MAX_QUERIES:
        if not mask.get("causal", True):
            raise NotImplementedError("autotune's attention over an 8-bit cache is causal: choose a cache of 16 bits")
        batch = batch.pieces(q.shape[0])
    return attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=batch.lengths, page_table=batch.table,
                                  cu_seqlens_q=batch.starts, max_seqlen_q=batch.longest_q, max_seqlen_k=batch.longest_k, **mask)


def _cut(batch: Batch, count: int) -> Batch:
    queries = batch.starts.diff()
    pieces = (queries + (MAX_QUERIES - 1)) // MAX_QUERIES
    ends = pieces.cumsum(0)
    at = torch.arange(count, device=ends.device)
    row = torch.searchsorted(ends, at, right=True)
    real = row < ends.shape[0]
    row = row.clamp(max=ends.shape[0] - 1)
    before = (at - (ends - pieces)[row]) * MAX_QUERIES  # queries of the same sequence in earlier pieces
    starts = torch.where(real, batch.starts[row] + before, batch.starts[-1])
    behind = queries[row] - torch.minimum(before + MAX_QUERIES, queries[row])  # in later pieces
    lengths = torch.where(real, batch.lengths[row] - behind, 0)
    return Batch(torch.cat([starts, batch.starts[-1:]]).to(torch.int32), lengths.to(torch.int32), batch.table[row], MAX_QUERIES,
                 batch.longest_k)
