"""What a kernel over packed sequences computes, from its Params alone: each sequence as a dense problem of its own."""

import ctypes

import numpy as np


def attend(p, dtype_name, head_dim, head_dim_v, attend_dense, decode_map):
    """`attend_dense(params, dtype name, head_dim, head_dim_v)` computes a dense problem, `decode_map` reads a tensor map."""
    size = 4 if dtype_name == "fp32" else 2
    q_starts, k_starts = (integers(p[name], p["batch"] + 1) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    heads_kv, lengths = p["heads_q"] // p["group"], {"q": p["seqlen_q"], "k": p["seqlen_k"]}
    for name, of, heads, dim in (("q", "q", p["heads_q"], head_dim), ("k", "k", heads_kv, head_dim),
                                 ("v", "k", heads_kv, head_dim_v), ("out", "q", p["heads_q"], head_dim_v)):
        if f"{name}_map" in p:  # TMA sees one batch entry
            pointer, shape, strides, _, _ = decode_map(p[f"{name}_map"])
            assert pointer == p[name] and shape == (1, lengths[of], heads, dim)
            assert shape[1] == 1 or strides[1] == p[f"{name}_row_stride"] * size
    for b in range(p["batch"]):
        rows, keys = int(q_starts[b + 1] - q_starts[b]), int(k_starts[b + 1] - k_starts[b])
        if not rows:
            continue
        alone = {name: value for name, value in p.items() if not name.endswith("_map")}
        for name, start in (("q", q_starts[b]), ("k", k_starts[b]), ("v", k_starts[b]), ("out", q_starts[b])):
            alone[name] += int(start) * p[f"{name}_row_stride"] * size
        if "alibi_slopes" in p:
            alone["alibi_slopes"] += b * p["alibi_batch_stride"] * 4
        lse = np.full((p["heads_q"], rows), np.nan, np.float32)
        alone.update(batch=1, seqlen_q=rows, seqlen_k=keys, lse=lse.ctypes.data)
        nothing = np.zeros(heads_kv * max(head_dim, head_dim_v), np.float32)
        if not keys:  # an array of no keys has no address: one key, which nobody sees
            alone.update(seqlen_k=1, window_left=-1, window_right=-1, prefix=0, k=nothing.ctypes.data, v=nothing.ctypes.data,
                         k_head_stride=head_dim, v_head_stride=head_dim_v)
        attend_dense(alone, dtype_name, head_dim, head_dim_v)
        if p["lse"]:
            for head in range(p["heads_q"]):
                at = p["lse"] + 4 * (head * p["seqlen_q"] + int(q_starts[b]))
                ctypes.memmove(at, lse[head].ctypes.data, 4 * rows)


def integers(address, count):
    return np.frombuffer((ctypes.c_char * (4 * count)).from_address(address), np.int32).copy()
