"""Attention of torch tensors in float64, one line a step, and inputs for it."""

import torch


def qkv(batch=2, rows=5, keys=7, heads=4, heads_kv=2, dim=64, dim_v=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return make(batch, rows, heads, dim), make(batch, keys, heads_kv, dim), make(batch, keys, heads_kv, dim_v)


def plain(q, k, v, causal=False, window=(None, None), scale=None, softcap=0.0, sinks=None):
    """Attention in float64; q (B, Sq, Hq, D)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(len(i), len(j), dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1).nan_to_num()[..., :len(j)] @ v).transpose(1, 2)


def close(out, expected):
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
