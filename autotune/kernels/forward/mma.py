"""`forward_mma`: forward attention on tensor cores with mma.sync, for sm_80 and later, in half precision for sm_75."""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import WARP_SIZE, Field, Step, header_if
from .base import FORWARD_FIELDS, ForwardKernel
from ..limits import block_exceeded, resident_blocks, shared_memory_exceeded
from .varlen import with_note

PANEL = 64  # columns of a shared-memory panel: 128 bytes, all 32 banks once


def instructions(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if not v["turing"] and gpu.arch < 80:
        return f"without turing it needs compute capability 8.0, the GPU has {gpu.arch / 10}"
    if v["turing"] and static.dtype != "fp16":
        return f"with turing it computes fp16, not {static.dtype}"
    return None


def rows_per_warp(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    rows = v["block_m"] / v["num_warps"]
    if rows not in (16, 32):
        return f"each warp would own {rows:g} query rows; it can own 16 or 32"
    return None


def overlap_needs_stages(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["overlap"] and v["num_stages"] < 2:
        return "overlap needs num_stages of at least 2, because the next K and this V are in use at once"
    return None


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(smem_bytes(static, v), gpu, v["min_blocks_per_sm"])


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return block_exceeded(v["num_warps"] * WARP_SIZE, live_registers(static, v), gpu, v["min_blocks_per_sm"])


def live_registers(static: Static, v: Mapping[str, Value]) -> int:
    """Registers that the tiles of one thread take, plus 60 for addresses, statistics and fragments in flight, and 10 more where
    two tiles of scores are in flight. An estimate: of 241 configs, at random over D, mask and values, that it let pass 25
    spilled, and of 97 that it refused 18 did not. ptxas has the last word, and a spill is a failure."""
    tiles_m = v["block_m"] // v["num_warps"] // 16
    scores = tiles_m * v["block_n"] // 8 * 4
    output = tiles_m * math.ceil(static.head_dim_v / 16) * 2 * 4
    q = tiles_m * math.ceil(static.head_dim / 16) * 4 if v["q_in_registers"] else 0
    return output + scores * (2 if v["overlap"] else 1) + q + (70 if v["overlap"] else 60)


def smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    def tile(rows: int, columns: int) -> int:
        return rows * math.ceil(columns / PANEL) * PANEL * 2

    rows = max(tile(v["block_m"], static.head_dim), tile(v["block_m"], static.head_dim_v))
    stages = v["num_stages"] * (tile(v["block_n"], static.head_dim) + tile(v["block_n"], static.head_dim_v))
    return with_note(static, max(rows, stages) if v["q_in_registers"] else rows + stages)


class ForwardMma(ForwardKernel):
    name = "forward_mma"
    template = "forward_mma/kernel.cu.j2"
    summary = "tensor cores through mma.sync, fp16 and bf16"
    min_arch = 75
    aligned = True
    dtypes = ("bf16", "fp16")
    sources = ("dense", "varlen", "paged")
    parameters = (
        Parameter("block_m", (64, 128, 256), "compile", "query rows of a block"),
        Parameter("block_heads", (1, 2, 4, 8), "compile", "query heads that share a block's rows, and K and V"),
        Parameter("block_n", (16, 32, 48, 64, 80, 96, 112, 128), "compile", "keys of a tile"),
        Parameter("num_warps", (4, 8), "compile", "warps of a block"),
        Parameter("num_stages", (1, 2, 3, 4), "compile", "buffers of K and V; 1: one loads while the other is used"),
        Parameter("q_in_registers", (False, True), "compile", "keep Q in registers, and lend its shared memory to K and V"),
        Parameter("overlap", (False, True), "compile", "multiply the next Q K^T while softmax works on this one"),
        Parameter("rescale_slack", (-1, 0, 8), "compile",
                  "rescale O when a row maximum grows by more than this (log2); -1: at every tile"),
        Parameter("min_blocks_per_sm", (1, 2, 3), "compile", "blocks per SM that the register allocator makes room for"),
        Parameter("turing", (False, True), "compile", "only instructions of sm_75: multiplies of half the depth, copies through "
                  "registers", absent=False),
        Parameter("smem_bytes", (), "compile", "dynamic shared memory that the launch requests", derived=True),
        Parameter("longest_first", (True, False), "launch", "start the last query rows first"),
        Parameter("head_group", (1, 2, 4, 8, 16, 32, 64), "launch", "heads that run together, to share L2"),
        Parameter("smem_carveout", (-1, 100), "launch", "percent of L1 set aside as shared memory; -1: the driver's choice"),
    )
    rules = (instructions, rows_per_warp, overlap_needs_stages, shared_memory, registers)
    fields = FORWARD_FIELDS + (Field("int", "head_group"), Field("int", "longest_first"))

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        for name in ("head_dim", "head_dim_v"):
            value = getattr(problem, name)
            if value % 8 or not 16 <= value <= 256:
                return f"{name} is {value}; it takes multiples of 8 from 16 to 256"
        if gpu.arch < 80 and problem.dtype != "fp16":
            return f"on compute capability {gpu.arch / 10} it computes fp16, not {problem.dtype}"
        return super().reject(problem, gpu)

    def searched(self, static: Static, values: Mapping[str, Value], gpu: Gpu) -> bool:
        return values["turing"] == (gpu.arch < 80) and (values["block_n"] > 16 or values["turing"])

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"smem_bytes": smem_bytes(static, values)}

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """The tile that FlashAttention-2 ships for mma.sync (csrc/flash_attn/src/flash_fwd_launch_template.h): D to 64
        128 x 128, D to 128 128 x 64, causal 64 x 64 (theirs on 99 KB parts; 128 rows spill here and are no faster on an
        H200), above 64 x 64 on Hopper and small parts and 128 x 64 with 8 warps on A100; under a window 64 x 64, because
        wider tiles visit keys that nobody sees. Smaller where a GPU cannot hold it, and under a soft cap or ALiBi, whose
        scores take more registers, and of packed sequences, whose places do. On sm_75, where nothing copies while a warp
        multiplies, what lets two blocks share the 64 KB of an SM, to D 128."""
        head_dim = max(problem.head_dim, problem.head_dim_v)
        plain = not (problem.softcap or problem.alibi or problem.packed)
        tile = dict(block_m=64, block_n=64, num_warps=4, num_stages=2 if head_dim <= 128 else 1, rescale_slack=-1)
        if head_dim > 128 and not plain:
            tile.update(block_n=48)
        elif problem.mask != "window" and head_dim <= 64 and plain:
            tile.update(block_m=128, block_n=128)
        elif problem.mask == "full" and head_dim <= 128 and plain:  # what else it would take spills, 48 to 64 bytes
            tile.update(block_m=128, block_n=48 if head_dim > 80 else 64, rescale_slack=8 if head_dim > 112 else -1)
        elif head_dim > 128 and gpu.arch == 80:
            tile.update(block_m=128, num_warps=8)
        if gpu.arch < 80:
            tile.update(block_m=64, block_n=64 if head_dim <= 64 else 32, num_stages=1, turing=True)
            if head_dim > 128:  # what else it would take spills
                tile.update(rescale_slack=8, block_n=32 if plain or problem.mask != "window" else 16)
        # Each block looks for its sequence: in order, that takes a fifth as long. head_group: 4 to 16 gain 10 to 25 % on an H200.
        fixed = dict(block_heads=1, q_in_registers=False, overlap=False, min_blocks_per_sm=1, turing=False,
                     longest_first=not problem.packed, head_group=4, smem_carveout=-1)
        shapes = ({}, dict(num_stages=1), *(dict(block_m=64, block_n=n, num_warps=4, num_stages=1) for n in (64, 32, 16)))
        configs = [self.config(problem.static, {**fixed, **tile, **shape}) for shape in shapes]
        return next((c for c in configs if self.illegal(problem.static, c, gpu) is None), configs[-1])

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        return {**super().operands(static, config),
                "paged_loader_header": header_if(static.kv == "paged", "forward_mma/paged_loader.cuh")}

    def block_queries(self, config: Config) -> int:
        return config["block_m"] // config["block_heads"]

    def block_heads(self, config: Config) -> int:
        return config["block_heads"]

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        threads = config["num_warps"] * WARP_SIZE
        return [Step(self.name, self.blocks(problem, config), threads, config["smem_bytes"], config["smem_carveout"])]

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Clocks of an SM for the tiles that its warps work on, in turn: those of the busiest of tensor cores, exp2 and
        shared memory, or what a warp takes alone divided by the warps there are. The constants are fitted to 297 configs that
        were timed on an H200, 4 problems with D 64, 128, 256: rank correlation 0.80 to 0.92, errors of 4 to 10 %.
        """
        num_warps, n, d, dv = config["num_warps"], config["block_n"], problem.head_dim, problem.head_dim_v
        rows, threads = config["block_m"] // num_warps, num_warps * WARP_SIZE
        blocks = max(self.blocks(problem, config), 1)
        registers = min(registers, gpu["registers_per_sm"] // (threads * config["min_blocks_per_sm"]))
        resident = min(resident_blocks(gpu, threads, registers, config["smem_bytes"]), math.ceil(blocks / gpu.sms))
        warps = num_warps * resident

        mma = 1.52 * 2 * rows * n * (d + dv) / gpu["mma_flops_per_clock_sm"]
        softmax = 1.34 * rows * n / gpu["exp_per_clock_sm"]
        operands = 0.9 * 2 * (n * (d + dv) + (0 if config["q_in_registers"] else rows * d)) / 128  # bytes a clock
        alone = 2 * (mma + softmax) + 650 + (280 if config["num_stages"] == 1 else 0) + (1000 if config["turing"] else 0)
        clocks = (mma**3 + softmax**3 + operands**3 + (alone / warps)**3)**(1 / 3) + 133 / warps

        waves = blocks / (gpu.sms * resident)
        idle = 1 / waves if problem.mask == "causal" and waves > 1 else math.ceil(waves) / waves - 1  # of the last wave, in waves
        total = (self.tiles(problem, config) * num_warps * clocks + blocks * 5150 / resident) * (1 + 0.8 * idle)
        compute_us = total / gpu.sms / (0.9 * gpu["sm_clock_mhz"])
        return max(compute_us, problem.compulsory_bytes / gpu["bandwidth_gb_s"] * 1e-3) + 3.0
