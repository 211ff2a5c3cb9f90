"""`forward_simt`: forward attention on the CUDA cores. The kernel to read first, and the one that always exists."""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import WARP_SIZE, Field, Step, header_if
from .base import FORWARD_FIELDS, ForwardKernel
from ..limits import registers_available, registers_exceeded, resident_blocks, shared_memory_exceeded
from .varlen import with_note


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(smem_bytes(static, v), gpu)


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    need = v["rows_per_warp"] * (math.ceil(static.head_dim_v / WARP_SIZE) + 4) + 40
    return registers_exceeded(need, registers_available(v["num_warps"] * WARP_SIZE, gpu))


def smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    size = static.element_bytes
    k_pitch = static.head_dim | 1 if size == 4 else (static.head_dim + 5) // 4 * 4 - 2
    q_bytes = v["num_warps"] * v["rows_per_warp"] * static.head_dim * 4
    k_bytes = math.ceil(WARP_SIZE * k_pitch * size / 4) * 4
    return with_note(static, q_bytes + k_bytes + WARP_SIZE * static.head_dim_v * size)


class ForwardSimt(ForwardKernel):
    name = "forward_simt"
    template = "forward_simt/kernel.cu.j2"
    summary = "CUDA cores; fp32, fp16 and bf16, any head dim, any arch"
    min_arch = 75
    aligned = False
    dtypes = ("bf16", "fp16", "fp32")
    sources = ("dense", "varlen", "paged")
    parameters = (
        Parameter("num_warps", (1, 2, 4, 8), "compile", "warps of a block"),
        Parameter("rows_per_warp", (1, 2, 4, 8), "compile", "query rows that a warp owns"),
        Parameter("smem_bytes", (), "compile", "dynamic shared memory that the launch requests", derived=True),
        Parameter("longest_first", (True, False), "launch", "start the last query rows first"),
        Parameter("head_group", (1, 4, 16, 64), "launch", "heads that run together, to share L2"),
    )
    rules = (shared_memory, registers)
    fields = FORWARD_FIELDS + (Field("int", "longest_first"), Field("int", "head_group"))

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().reject(problem, gpu):
            return reason
        smallest = {"num_warps": 1, "rows_per_warp": 1}
        too_large = shared_memory(problem.static, smallest, gpu) or registers(problem.static, smallest, gpu)
        if too_large:
            return f"head_dim {problem.head_dim} (head_dim_v {problem.head_dim_v}) is too large: {too_large}"
        return None

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"smem_bytes": smem_bytes(static, values)}

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """The most rows a block can own, because each row that shares a tile of K and V halves its cost."""
        values = dict(longest_first=not problem.packed, head_group=1)  # each block looks for its sequence: sooner in order
        for num_warps, rows_per_warp in ((4, 8), (4, 4), (4, 2), (2, 2), (1, 2), (1, 1)):
            config = self.config(problem.static, dict(values, num_warps=num_warps, rows_per_warp=rows_per_warp))
            if self.illegal(problem.static, config, gpu) is None:
                return config
        raise AssertionError(f"reject() let {problem} pass, but no config of {self.name} is legal on {gpu.name}")

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        return {**super().operands(static, config), "tanh_header": header_if(static.softcap, "lib/ptx/tanh.cuh"),
                "paged_rows_header": header_if(static.kv == "paged", "forward_simt/paged_rows.cuh")}

    def block_queries(self, config: Config) -> int:
        return config["num_warps"] * config["rows_per_warp"]

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        return [Step(self.name, self.blocks(problem, config), config["num_warps"] * WARP_SIZE, config["smem_bytes"])]

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Multiply-adds at the CUDA cores' rate, slowed by the shared-memory reads that feed them: for each key and column
        one read of K or V, and one of Q, serve rows_per_warp rows."""
        reads_per_fma = 1 + 1 / config["rows_per_warp"]
        clocks = problem.flops / gpu["fma_flops_per_clock_sm"] * (1 + 2 * reads_per_fma)
        threads = config["num_warps"] * WARP_SIZE
        blocks_per_sm = resident_blocks(gpu, threads, registers, config["smem_bytes"])
        blocks = self.plan(problem, config)[0].grid
        waves = math.ceil(blocks / (gpu.sms * blocks_per_sm))
        idle = waves * gpu.sms * blocks_per_sm / max(blocks, 1)
        starved = max(1.0, 8 / (blocks_per_sm * config["num_warps"]))
        compute_us = clocks / gpu.sms / gpu["sm_clock_mhz"] * idle * starved
        return max(compute_us, problem.compulsory_bytes / gpu["bandwidth_gb_s"] * 1e-3) + 3.0
