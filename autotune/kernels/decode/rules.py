"""Which configs of `decode_mma` are legal, and the registers and bytes that they take. A rule returns why a config is illegal."""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Value
from ...core.gpu import Gpu
from ...core.problem import DTYPE_BYTES, Problem, Static
from ..base import WARP_SIZE
from ..limits import block_exceeded, shared_memory_exceeded

PANEL = 64  # columns of a shared-memory panel: 128 bytes, all 32 banks once
STATISTICS_BYTES = 4096 * 8  # maximum and sum of every split and row


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(smem_bytes(static, v), gpu, v["min_blocks_per_sm"])


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return block_exceeded(v["num_warps"] * WARP_SIZE, live_registers(static, v), gpu, v["min_blocks_per_sm"])


def dependence(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["dependent_launch"] and gpu.arch < 90:
        return f"dependent_launch needs compute capability 9.0, the GPU has {gpu.arch / 10}"
    return None


def clusters(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["cluster_merges"] and gpu.arch < 90:
        return f"cluster_merges needs compute capability 9.0, the GPU has {gpu.arch / 10}"
    if v["cluster_merges"] and (static.kv != "dense" or static.packed):
        return "cluster_merges needs lengths that the host knows, so a cache without pages and as many queries of each sequence"
    return None


def speculation(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["speculative_start"] and not v["dependent_launch"]:
        return "speculative_start needs dependent_launch"
    if v["speculative_start"] and static.kv != "paged":
        return "speculative_start is for a cache of pages"
    return None


def whole_fragments(of: Problem | Static) -> bool:
    """Whether the 16 columns of a fragment are always of one head."""
    return of.head_dim % 16 == 0 and of.head_dim_v % 16 == 0


def pairs(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["block_heads_kv"] > 1 and not whole_fragments(static):
        return (f"block_heads_kv is {v['block_heads_kv']}; head dims of {static.head_dim} and {static.head_dim_v} allow 1, more "
                "need multiples of 16")
    widest = v["block_heads_kv"] * max(static.head_dim, static.head_dim_v) * DTYPE_BYTES[static.kv_dtype]
    if widest > WARP_SIZE * 16:
        return (f"block_heads_kv is {v['block_heads_kv']}, so a key has {widest} bytes; a warp copies up to {WARP_SIZE * 16} at "
                "a time")
    return None


def live_registers(static: Static, v: Mapping[str, Value]) -> int:
    """Registers that the tiles of one thread take, plus what addresses and statistics need at the least."""
    tiles_m, heads = v["block_m"] // 16, v["block_heads_kv"]
    scores = tiles_m * v["block_n"] // 8 * 4
    output = tiles_m * heads * math.ceil(static.head_dim_v / 16) * 2 * 4
    q = tiles_m * heads * math.ceil(static.head_dim / 16) * 4 if v["q_in_registers"] else 0
    return output + scores + q + 40


def tile_bytes(rows: int, columns: int) -> int:
    return rows * math.ceil(columns / PANEL) * PANEL * 2


def stage_bytes(static: Static, v: Mapping[str, Value]) -> int:
    """Of a tile of K and one of V. Tiles are counted in columns of 16 bits."""
    columns = (v["block_heads_kv"] * dim * DTYPE_BYTES[static.kv_dtype] // 2 for dim in (static.head_dim, static.head_dim_v))
    return sum(tile_bytes(v["block_n"], count) for count in columns)


def kv_bytes(static: Static, v: Mapping[str, Value]) -> int:
    """In global memory, of a tile of K and one of V."""
    return v["block_n"] * v["block_heads_kv"] * (static.head_dim + static.head_dim_v) * DTYPE_BYTES[static.kv_dtype]


def ring_bytes(static: Static, v: Mapping[str, Value]) -> int:
    """The same of all tiles that a block has in flight."""
    return v["num_warps"] * v["num_stages"] * kv_bytes(static, v)


def smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    q = 0 if v["q_in_registers"] else tile_bytes(v["block_m"], v["block_heads_kv"] * static.head_dim)
    streaming = q + v["num_warps"] * v["num_stages"] * stage_bytes(static, v)
    merging = v["num_warps"] * v["block_m"] * ((static.head_dim_v + 8) * 4 + 8) + 16
    return max(streaming, merging, STATISTICS_BYTES + v["block_m"] * static.head_dim_v * 4)


def key_bytes(of: Problem | Static) -> int:
    """Of one head's key in the cache, or of its value if that is shorter."""
    return min(of.head_dim, of.head_dim_v) * DTYPE_BYTES[of.kv_dtype]


RULES = dependence, clusters, speculation, pairs, shared_memory, registers
