"""Padded and packed batches as kernels take them, by arithmetic on the device.

`spans` says of each row of a padded batch which keys are real, `starts` of packed rows where sequences begin. Both are int32
tensors of four dimensions, because transformers hands those on as they are. The rest turns spans into what a call takes; results
are kept with the spans, so that the layers of a model share them.
"""

from __future__ import annotations

import torch


def spans(attention_mask, batch: int, keys: int, q_offset, kv_offset: int, device):
    """(B, 3, 1, 1): first real key, the end of the real keys, and the key that is query 0's own, of the keys that a layer sees.
    Without `attention_mask`, (B, 2, 1, 1): the latter two.

    `attention_mask` (B, n) bool or int speaks of positions from 0, of which layers see kv_offset to kv_offset + keys.
    """
    own = torch.as_tensor(q_offset, device=device).to(torch.int32) - kv_offset
    if attention_mask is None:
        columns = torch.full((), keys, dtype=torch.int32, device=device), own
    else:
        real = attention_mask.to(torch.bool)
        at = torch.arange(real.shape[1], dtype=torch.int32, device=real.device)
        end = torch.where(real, at + 1, 0).amax(1)
        first = torch.where(real, at, real.shape[1]).amin(1).minimum(end)
        torch._assert_async((real.sum(1) == end - first).all(), "a row's attention_mask has padding between its tokens, which "
                            "autotune's attention does not serve")
        columns = (first - kv_offset).clamp(0, keys), (end - kv_offset).clamp(0, keys), own
    return torch.stack([column.to(torch.int32).expand(batch) for column in columns], 1)[:, :, None, None]


def starts(mask_function, batch: int, rows: int, most: int, device):
    """(1, 1, most + 1, 1): where the sequences of packed rows begin, all rows one behind the other, then their end.

    A sequence begins where a query does not see the key before it. More than `most` sequences stop the device with a message.
    """
    row, at = torch.arange(batch, device=device)[:, None], torch.arange(rows, device=device)[None]
    joined = mask_function(row, 0, at, (at - 1).clamp(min=0)).expand(batch, rows) & (at > 0)
    place = torch.arange(batch * rows, dtype=torch.int32, device=device)
    begins = torch.where(joined.flatten(), batch * rows, place).sort().values
    torch._assert_async((~joined).sum() <= most, "packed rows hold more sequences than autotune.integrations.transformers."
                        "TOKENS_A_SEQUENCE allows: lower it")
    begins = torch.nn.functional.pad(begins, (0, max(most + 1 - batch * rows, 0)), value=batch * rows)[:most + 1]
    begins = torch.cat([begins[:-1], begins.new_full((1,), batch * rows)])
    return begins.to(torch.int32)[None, None, :, None]


def as_rows(k, v, batch: int) -> tuple:
    """(k, v, rows between two batch entries): k and v (B, Sk, Hkv, D) whose batch entries lie a whole number of rows apart, the
    same number in both. Copies only what does not."""
    gaps = [_gap(x) for x in (k, v)]
    if batch == 1:
        return k, v, 0
    if gaps[0] is None or gaps[0] != gaps[1]:
        k, v, gaps = k.contiguous(), v.contiguous(), [0]
    return k, v, gaps[0]


def _gap(x) -> int | None:
    stride, row = x.stride(0), x.stride(1)
    return stride // row - x.shape[1] if row > 0 and stride % row == 0 and stride >= row * x.shape[1] else None


def joined(x):
    """x (B, Sk, H, D) of `as_rows` as rows (n, H, D), batch entry after batch entry, with what lies between them.

    Where heads are outermost (B, H, Sk, D), those rows overlap: row n of head h is row n + Sk of the head before it.
    """
    if x.shape[0] == 1:
        return x[0]
    if x.is_contiguous():
        return x.flatten(0, 1)
    apart = x.stride(0) // x.stride(1)
    return x.as_strided(((x.shape[0] - 1) * apart + x.shape[1], *x.shape[2:]), x.stride()[1:])


def sequences(spans, rows: int, keys: int, gap: int, causal: bool, windowed: bool) -> tuple:
    """(cu_seqlens_q, cu_seqlens_k), each (4 * B + 1,) int32, of `rows` queries and `keys` keys a batch entry.

    A batch entry is four sequences: padding before the tokens, the tokens, padding behind them, and the `gap` rows to the next
    entry, which no query sees. Padding attends to itself: what it gives is finite, and nobody's. Where neither `causal` nor a
    window asks for positions, all queries attend to the tokens.
    """
    return _kept(spans, ("sequences", rows, keys, gap, causal, windowed), _sequences)


def lengths(spans, causal: bool):
    """(B,) int32: how many keys of a cache that begins with a token one query sees."""
    return _kept(spans, ("lengths", causal), lambda spans, causal: _ends(spans, 1, causal).contiguous())


def pages(spans, keys: int, gap: int, causal: bool, size: int) -> tuple:
    """(page table (B, pages), lengths (B,)), int32: a cache whose sequences begin anywhere, as `overlapping` pages of rows."""
    return _kept(spans, ("pages", keys, gap, causal, size), _pages)


def overlapping(rows, size: int):
    """Pages (n, size, H, D) of rows (n + size - 1, H, D), of which page i begins at row i: a view. A page that begins behind the
    last of them ends outside of `rows`; decode kernels are given its number, too, and read no more keys of it than a sequence
    has, which lie inside. (Not so TMA of forward kernels, whose maps end with the last page.)"""
    row, *rest = rows.stride()
    return rows.as_strided((rows.shape[0] - size + 1, size, *rows.shape[1:]), (row, row, *rest))


def _kept(spans, key: tuple, make):
    if torch.compiler.is_compiling():  # a compiler sees for itself that layers do the same
        return make(spans, *key[1:])
    known = spans.__dict__.setdefault("_autotune", {})
    if key not in known:
        known[key] = make(spans, *key[1:])
    return known[key]


def _firsts(spans):
    return spans[:, 0, 0, 0] if spans.shape[1] == 3 else torch.zeros_like(spans[:, 0, 0, 0])


def _ends(spans, rows: int, causal: bool):
    """Ends of the keys that are real and, with `causal`, not behind the last query."""
    ends = spans[:, -2, 0, 0]
    return torch.minimum(ends, spans[:, -1, 0, 0] + rows) if causal else ends


def _sequences(spans, rows, keys, gap, causal, windowed):
    first, end = _firsts(spans), _ends(spans, rows, causal)
    first = torch.minimum(first, end)
    none = torch.zeros_like(first)
    of_keys = first, end - first, keys - end, none + gap
    if causal or windowed:
        before = (first - spans[:, -1, 0, 0]).clamp(0, rows)
        until = (end - spans[:, -1, 0, 0]).clamp(0, rows).maximum(before)
        of_queries = before, until - before, rows - until, none
    else:
        of_queries = none, none + rows, none, none
    return tuple(torch.nn.functional.pad(torch.stack(sizes, 1).flatten().cumsum(0, dtype=torch.int32), (1, 0))
                 for sizes in (of_queries, of_keys))


def _pages(spans, keys, gap, causal, size):
    first, end = _firsts(spans), _ends(spans, 1, causal)
    base = torch.arange(spans.shape[0], dtype=torch.int32, device=spans.device) * (keys + gap) + first
    steps = torch.arange(0, keys, size, dtype=torch.int32, device=spans.device)
    last = (spans.shape[0] - 1) * (keys + gap) + keys - 1
    return (base[:, None] + steps).clamp(max=last), (end - first).clamp(min=0)
