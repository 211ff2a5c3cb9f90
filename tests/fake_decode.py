"""What a decode kernel computes, from the Params of its launch alone: lengths, page table, pages and strides included."""

import ctypes

import numpy as np

from autotune.kernels.base import LOG2E
from autotune.kernels.forward.base import SINK_DTYPES
from autotune.check.numerics import array_dtype, from_float32, to_float32


def attend(p, dtype_name, head_dim, head_dim_v, kv_name=None):
    """Computes `out` and `lse`. Tickets must be 0 and are left so; what stands in unused slots and table entries is not read."""
    kv_name = kv_name or dtype_name

    def row(name, first, second, head, dim):
        dtype = array_dtype(kv_name if name in "kv" else dtype_name)
        at = p[name] + dtype.itemsize * (first * p[f"{name}_batch_stride"] + second * p[f"{name}_row_stride"]
                                         + head * p[f"{name}_head_stride"])
        return np.frombuffer((ctypes.c_char * (dim * dtype.itemsize)).from_address(at), dtype)

    def number(address, index, kind=ctypes.c_int32):
        return kind.from_address(address + ctypes.sizeof(kind) * index).value

    def place(batch, key):
        if not p["page_table"]:
            return batch, key
        magic, shift = p["page_magic"], p["page_shift"]
        assert key * magic >> 31 + shift == key // p["page_size"]
        return number(p["page_table"], batch * p["page_table_stride"] + key // p["page_size"]), key % p["page_size"]

    def numbers(rows, dim, name=kv_name):
        return to_float32(np.array(rows, array_dtype(name)).reshape(len(rows), dim), name).astype(np.float64)

    def scale(name, head):
        return number(p[f"{name}_scales"], head * p[f"{name}_scale_stride"], ctypes.c_float) if p[f"{name}_scales"] else 1.0

    for batch in range(p["batch"]):
        begin, sq = 0, p["seqlen_q"]
        if p["query_starts"]:
            begin = number(p["query_starts"], batch)
            sq = number(p["query_starts"], batch + 1) - begin
            sq = sq if p.get("min_queries", 0) <= sq <= p["seqlen_q"] else 0  # another kernel's
        length = min(number(p["lengths"], batch), p["seqlen_k"]) if p["lengths"] else p["seqlen_k"]
        for head in range(p["heads_q"]):
            kv = head // p["group"]
            keys = [place(batch, key) for key in range(length)]
            k = numbers([row("k", *at, kv, head_dim) for at in keys], head_dim) * scale("k", kv)
            v = numbers([row("v", *at, kv, head_dim_v) for at in keys], head_dim_v) * scale("v", kv) * p["v_scale"]
            sink = -np.inf if not p["sinks"] else _sink(p, head)
            for query in range(sq):
                at = batch, begin + query, head
                q = numbers([row("q", *at, head_dim)], head_dim, dtype_name)[0]
                scores = q @ k.T
                if "softcap_scale" in p:
                    scores = np.tanh(scores * p["softcap_scale"])
                scores = scores * p["scale_log2"] / LOG2E
                if "softcap_log2" in p:
                    cap = p["softcap_log2"] / LOG2E
                    scores = cap * np.tanh(scores / cap)
                middle, j = query + length - sq, np.arange(length)
                if "alibi_slopes" in p:
                    slope = number(p["alibi_slopes"], batch * p["alibi_batch_stride"] + head, ctypes.c_float)
                    scores = scores - slope * abs(middle - j)
                scores = np.where((j >= middle - p["window_left"]) & (j <= middle + p["window_right"]) | (j < p.get("prefix", 0)),
                                  scores, -np.inf)
                top = max(scores.max(initial=-np.inf), sink)
                weights = np.exp(scores - (0 if np.isinf(top) else top))
                total = weights.sum() + (0 if np.isinf(sink) else np.exp(sink - top))
                result = weights @ v / total if total else np.zeros(head_dim_v)
                row("out", *at, head_dim_v)[...] = from_float32(np, result.astype(np.float32), dtype_name)
                if p["lse"]:
                    at = batch * p["lse_batch_stride"] + head * p["lse_head_stride"] + begin + query
                    ctypes.c_float.from_address(p["lse"] + 4 * at).value = np.log(total) + top if total else -np.inf


def attend_pages(p, *compiled):
    """The same of a forward kernel over pages."""
    attend({**p, "query_starts": p["cu_seqlens_q"], "lengths": p["cache_seqlens"], "seqlen_q": 2**31, "lse_batch_stride": 0,
            "lse_head_stride": p["seqlen_q"], "k_scales": 0, "v_scales": 0, "v_scale": 1.0}, *compiled)


def _sink(p, head):
    name = {code: name for name, code in SINK_DTYPES.items()}[p["sink_dtype"]]
    dtype = array_dtype("bf16") if name == "bfloat16" else np.dtype(name)
    raw = (ctypes.c_char * dtype.itemsize).from_address(p["sinks"] + head * dtype.itemsize)
    return float(np.frombuffer(raw, dtype)[0])
