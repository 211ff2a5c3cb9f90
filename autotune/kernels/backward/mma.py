"""`backward_mma`: gradients of attention on tensor cores with mma.sync, for sm_80 and later, the same bits every time."""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import WARP_SIZE, Field, Step
from ..forward.base import visited_tiles
from ..limits import block_exceeded, resident_blocks, shared_memory_exceeded
from .base import BACKWARD_FIELDS, BackwardKernel, steps_of

PANEL = 64  # columns of a shared-memory panel: 128 bytes, all 32 banks once


def columns_per_warp(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["column_parts"] > 1 and max(static.head_dim, static.head_dim_v) <= 64:
        return f"column_parts of {v['column_parts']} halve gradients of more than 64 columns only"
    return None


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(max(key_smem_bytes(static, v), query_smem_bytes(static, v)), gpu, 1)


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    threads = v["key_rows"] // 16 * v["column_parts"] * WARP_SIZE
    return block_exceeded(threads, key_registers(static, v), gpu, 1) or \
        block_exceeded(v["query_rows"] // 16 * WARP_SIZE, query_registers(static, v), gpu, 1)


def key_registers(static: Static, v: Mapping[str, Value]) -> int:
    """Registers that the tiles of a thread take in backward_keys, plus 50 for addresses and fragments in flight."""
    gradients = sum(math.ceil(math.ceil(d / 16) / v["column_parts"]) * 8 for d in (static.head_dim, static.head_dim_v))
    return gradients + v["key_queries"] + 50


def query_registers(static: Static, v: Mapping[str, Value]) -> int:
    """The same in backward_queries."""
    return math.ceil(static.head_dim / 16) * 8 + v["query_keys"] + 50


def _tiles(rows: int, static: Static) -> int:
    """Bytes of a tile of rows of Q or K, and one of V or dO."""
    return sum(rows * math.ceil(columns / PANEL) * PANEL * 2 for columns in (static.head_dim, static.head_dim_v))


def key_smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    return _tiles(v["key_rows"], static) + v["key_stages"] * (_tiles(v["key_queries"], static) + v["key_queries"] * 8)


def query_smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    return _tiles(v["query_rows"], static) + v["query_stages"] * _tiles(v["query_keys"], static)


class BackwardMma(BackwardKernel):
    name = "backward_mma"
    template = "backward_mma/kernel.cu.j2"
    summary = "tensor cores through mma.sync, fp16 and bf16; each block owns what it writes, so results repeat bit for bit"
    min_arch = 80
    dtypes = ("bf16", "fp16")
    parameters = (
        Parameter("key_rows", (64, 128), "compile", "keys of a block of backward_keys, 16 a warp"),
        Parameter("key_queries", (16, 32, 64, 128), "compile", "queries of its tiles"),
        Parameter("column_parts", (1, 2), "compile", "warps that share 16 keys, each with a part of their gradients' columns"),
        Parameter("key_stages", (1, 2), "compile", "buffers of Q and dO; 1: nothing loads while it is used"),
        Parameter("query_rows", (64, 128), "compile", "queries of a block of backward_queries, 16 a warp"),
        Parameter("query_keys", (16, 32, 48, 64, 96, 128), "compile", "keys of its tiles"),
        Parameter("query_stages", (1, 2), "compile", "buffers of K and V; 1: nothing loads while it is used"),
        Parameter("key_smem_bytes", (), "compile", "dynamic shared memory of backward_keys", derived=True),
        Parameter("query_smem_bytes", (), "compile", "dynamic shared memory of backward_queries", derived=True),
        Parameter("longest_first", (True, False), "launch", "start the last query rows first"),
        Parameter("head_group", (1, 2, 4, 8, 16, 32, 64), "launch", "heads that run together, to share L2"),
    )
    rules = (columns_per_warp, shared_memory, registers)
    fields = BACKWARD_FIELDS + (Field("int", "head_group"), Field("int", "longest_first"))

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        for name in ("head_dim", "head_dim_v"):
            value = getattr(problem, name)
            if value % 8 or not 16 <= value <= 256:
                return f"{name} is {value}; it takes multiples of 8 from 16 to 256"
        return super().reject(problem, gpu)

    def constants(self, static: Static, config: Config) -> list[tuple[str, str, Value]]:
        return [*super().constants(static, config), ("bool", "TURING", False)]  # the copies of lib/ that it shares are of sm_80

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"key_smem_bytes": key_smem_bytes(static, values), "query_smem_bytes": query_smem_bytes(static, values)}

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """Tiles near those that FlashAttention-2 ships for mma.sync (csrc/flash_attn/src/flash_bwd_launch_template.h): 128 keys
        to D 64, 64 above, where a warp of 16 keys has room for both gradients to D 128 and for halves of them above. Smaller
        where a GPU cannot hold it."""
        head_dim = max(problem.head_dim, problem.head_dim_v)
        small = head_dim <= 64 and problem.mask != "window"
        tile = dict(key_rows=128 if small else 64, key_queries=64 if head_dim <= 96 else 32,
                    column_parts=2 if head_dim > 128 else 1, key_stages=2,
                    query_rows=128 if small else 64, query_keys=64 if head_dim <= 128 else 32, query_stages=2)
        fixed = dict(longest_first=True, head_group=8)
        shapes = ({}, dict(key_stages=1, query_stages=1), dict(key_rows=64, key_queries=32, query_rows=64, query_keys=32),
                  *(dict(key_rows=64, key_queries=n, key_stages=1, query_rows=64, query_keys=n, query_stages=1)
                    for n in (32, 16)))
        configs = [self.config(problem.static, {**fixed, **tile, **shape}) for shape in shapes]
        return next((c for c in configs if self.illegal(problem.static, c, gpu) is None), configs[-1])

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        keys, queries = config["key_rows"] // 16 * config["column_parts"] * WARP_SIZE, config["query_rows"] // 16 * WARP_SIZE
        return steps_of(self, problem, config, keys, queries)

    def block_rows(self, config: Config) -> tuple[int, int]:
        return config["query_rows"], config["key_rows"]

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Clocks of an SM for the tiles of both kernels, each those of the busier of tensor cores and shared memory, with what a
        warp takes alone divided by the warps there are. Only ranks configs: nothing of it is fitted to measurements."""
        d, dv, heads, batch = problem.head_dim, problem.head_dim_v, problem.heads_q, problem.batch
        total = 0.0
        for rows, tile, parts, smem, live, units in (
                (config["key_rows"], config["key_queries"], config["column_parts"], config["key_smem_bytes"],
                 key_registers(problem.static, config.values), (config["column_parts"] + 1) * (d + dv)),
                (config["query_rows"], config["query_keys"], 1, config["query_smem_bytes"],
                 query_registers(problem.static, config.values), 2 * d + dv)):
            threads = rows // 16 * parts * WARP_SIZE
            warps = threads // WARP_SIZE * resident_blocks(gpu, threads, live, smem)
            tiles = visited_tiles(problem, rows, tile) * heads * batch
            product = 1.6 * 2 * rows * tile * units / gpu["mma_flops_per_clock_sm"]
            operands = (2 * tile * units + 4 * rows * (d + dv)) * (rows // 16) / 128  # bytes of fragments a clock, by each warp
            total += tiles * max(product, operands, (2 * product + 900) / max(warps / 4, 1))
        bytes_us = problem.compulsory_bytes / gpu["bandwidth_gb_s"] * 1e-3
        return max(total / gpu.sms / (0.9 * gpu["sm_clock_mhz"]), bytes_us) + 8.0
