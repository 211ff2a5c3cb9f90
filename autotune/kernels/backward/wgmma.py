"""`backward_wgmma`: gradients of attention for Hopper, with the copy engine, warpgroup multiplies and specialised warps."""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import Field, Map, Step
from ..forward.base import visited_tiles
from ..forward.wgmma import MOST_LOADER_REGISTERS, MOST_REGISTERS, WARPGROUP_SIZE, _multiply
from ..limits import registers_exceeded, shared_memory_exceeded
from .base import BACKWARD_FIELDS, BackwardKernel, steps_of
from .mma import PANEL, _tiles

GROUP_ROWS = 64  # M of wgmma
MAPPED = ("q", "k", "v", "dout")
LOADER_REGISTERS, PACKED_LOADER_REGISTERS = 24, 48  # at the least: of packed sequences with 24 the loader spills


def group_registers(static: Static, groups: int, registers_per_sm: int = 65536) -> int:
    """What setmaxnreg gives each thread of the multiplying groups."""
    entry = min(256, registers_per_sm // ((1 + groups) * WARPGROUP_SIZE) // 8 * 8)
    least = PACKED_LOADER_REGISTERS if static.packed else LOADER_REGISTERS
    return min(MOST_REGISTERS, (entry * (1 + groups) - least) // groups // 8 * 8)


def loader_registers(static: Static, groups: int, registers_per_sm: int = 65536) -> int:
    """What each thread of the loader's group keeps of what is left."""
    entry = min(256, registers_per_sm // ((1 + groups) * WARPGROUP_SIZE) // 8 * 8)
    return min(MOST_LOADER_REGISTERS, entry * (1 + groups) - groups * group_registers(static, groups, registers_per_sm))


def key_rows(v: Mapping[str, Value]) -> int:
    return v["key_groups"] // v["column_parts"] * GROUP_ROWS


def parts(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    count = v["column_parts"]
    if v["key_groups"] % count:
        return f"key_groups of {v['key_groups']} are no multiple of the {count} that share keys"
    if count > 1 and (static.head_dim % (PANEL * count) or static.head_dim_v % (PANEL * count)):
        return f"{count} groups that share keys each need whole panels of {PANEL} columns of both head dims"
    return None


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(max(key_smem_bytes(static, v), query_smem_bytes(static, v)), gpu, 1)


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    """What is live at once, plus 24 for addresses and statistics, 32 of packed sequences: gradients, scores and dP of a tile, and P or dS as the operand of
    a multiply that is still under way; with the soft cap its derivative too."""
    tile, others = 5 + (2 if static.softcap else 0), 32 if static.packed else 24
    keys = (static.head_dim + static.head_dim_v) // 2 // v["column_parts"] + v["key_queries"] * tile // 4
    queries = static.head_dim // 2 + v["query_keys"] * tile // 4
    return registers_exceeded(keys + others, group_registers(static, v["key_groups"], gpu["registers_per_sm"])) or \
        registers_exceeded(queries + others, group_registers(static, v["query_groups"], gpu["registers_per_sm"]))


def key_smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    stage = _tiles(v["key_queries"], static) + v["key_queries"] * 8
    return _tiles(key_rows(v), static) + v["key_stages"] * stage + 16 * (v["key_stages"] + 1)


def query_smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    stage = _tiles(v["query_keys"], static)
    return _tiles(v["query_groups"] * GROUP_ROWS, static) + v["query_stages"] * stage + 16 * (v["query_stages"] + 1)


class HopperBackward(BackwardKernel):
    """What the backward kernels for Hopper share."""

    template = "backward_wgmma/kernel.cu.j2"
    min_arch = 90
    dtypes = ("bf16", "fp16")
    fields = (*(Field("TensorMap", f"{tensor}_map") for tensor in MAPPED), *BACKWARD_FIELDS, Field("int", "head_group"),
              Field("int", "longest_first"))

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        if gpu.arch != 90:
            return f"it is for compute capability 9.0, the GPU has {gpu.arch / 10}"
        if not problem.seqlen_k or not problem.seqlen_q:
            return "there are no keys or no queries, and the copy engine maps no array of nothing"
        for name in ("head_dim", "head_dim_v"):
            value = getattr(problem, name)
            if value % 8 or not 16 <= value <= 256:
                return f"{name} is {value}; it takes multiples of 8 from 16 to 256"
        return super().reject(problem, gpu)

    def target(self, gpu: Gpu) -> str:
        return "sm_90a"


class BackwardWgmma(HopperBackward):
    name = "backward_wgmma"
    summary = "Hopper: TMA, wgmma, specialised warps; each block owns what it writes, so results repeat bit for bit"
    parameters = (
        Parameter("key_groups", (1, 2, 3), "compile", "multiplying warpgroups of a block of backward_keys, 64 keys each"),
        Parameter("key_queries", (16, 32, 48, 64, 80, 96, 112, 128), "compile", "queries of its tiles"),
        Parameter("column_parts", (1, 2), "compile", "groups that share 64 keys, each with a part of their gradients' columns"),
        Parameter("key_stages", (1, 2, 3), "compile", "buffers of Q and dO"),
        Parameter("query_groups", (1, 2, 3), "compile", "multiplying warpgroups of a block of backward_queries, 64 queries each"),
        Parameter("query_keys", (32, 48, 64, 80, 96, 112, 128, 144, 160), "compile", "keys of its tiles"),
        Parameter("query_stages", (1, 2, 3), "compile", "buffers of K and V"),
        Parameter("key_smem_bytes", (), "compile", "dynamic shared memory of backward_keys", derived=True),
        Parameter("query_smem_bytes", (), "compile", "dynamic shared memory of backward_queries", derived=True),
        Parameter("longest_first", (True, False), "launch", "start the last query rows first"),
        Parameter("head_group", (1, 2, 4, 8, 16, 32, 64), "launch", "heads that run together, to share L2"),
    )
    rules = (parts, shared_memory, registers)

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        total = problem.head_dim + problem.head_dim_v
        if total > 320 and (problem.head_dim % 128 or problem.head_dim_v % 128):
            return f"head_dim and head_dim_v are {total} together; it takes 320, or more if both are multiples of 128"
        return super().reject(problem, gpu)

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"key_smem_bytes": key_smem_bytes(static, values), "query_smem_bytes": query_smem_bytes(static, values)}

    def constants(self, static: Static, config: Config) -> list[tuple[str, str, Value]]:
        keys, queries = config["key_groups"], config["query_groups"]
        return [*super().constants(static, config), ("int", "KEY_REGISTERS", group_registers(static, keys)),
                ("int", "KEY_LOADER_REGISTERS", loader_registers(static, keys)),
                ("int", "QUERY_REGISTERS", group_registers(static, queries)),
                ("int", "QUERY_LOADER_REGISTERS", loader_registers(static, queries)),
                *(("int", f"{name}_BOX_ROWS", rows) for name, rows in zip(("QUERY", "KEY"), self.box_rows(config)))]

    def box_rows(self, config: Config) -> tuple[int, int]:
        """Rows of a box of queries, and of keys: such that boxes fill the tiles of both kernels."""
        return math.gcd(config["key_queries"], GROUP_ROWS), math.gcd(config["query_keys"], GROUP_ROWS)

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        count = config["column_parts"]
        scores = list(dict.fromkeys((config["key_queries"], config["query_keys"])))
        columns = list(dict.fromkeys((static.head_dim // count, static.head_dim_v // count, static.head_dim)))
        return {**super().operands(static, config), "wgmma_type": {"bf16": "bf16", "fp16": "f16"}[static.dtype],
                "fused": False, "qk": _multiply(scores[0]), "pv": _multiply(columns[0]), "more_qk": [_multiply(n) for n in scores[1:]],
                "more_pv": [_multiply(n) for n in columns[1:]]}

    def maps(self, problem: Problem, config: Config) -> tuple[Map, ...]:
        queries, keys = self.box_rows(config)
        return Map("q", queries, PANEL), Map("k", keys, PANEL), Map("v", keys, PANEL), Map("dout", queries, PANEL)

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """Tiles for which products of shared memory and registers balance (r below 0.9 in the model of docs/log.md): 128 keys by
        64 queries to D 128 for dK and dV, fewer queries above, and 128 queries by as many keys as registers hold for dQ."""
        head_dim = max(problem.head_dim, problem.head_dim_v)
        total = problem.head_dim + problem.head_dim_v
        wide = total > 320
        tile = dict(key_groups=2, key_queries=64 if total <= 256 else 32, column_parts=2 if wide else 1, key_stages=2,
                    query_groups=2, query_keys=128 if head_dim <= 64 else 96 if head_dim <= 128 else 48, query_stages=2)
        fixed = dict(longest_first=True, head_group=4)
        shapes = ({}, dict(query_keys=64), dict(query_keys=64, key_queries=48), dict(query_keys=48, key_queries=32),
                  dict(query_keys=32, key_queries=32, query_stages=1), dict(query_keys=32, key_queries=16, key_stages=1, query_stages=1))
        configs = [self.config(problem.static, {**fixed, **tile, **shape}) for shape in shapes]
        return next((c for c in configs if self.illegal(problem.static, c, gpu) is None), configs[-1])

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        threads = [(1 + config[groups]) * WARPGROUP_SIZE for groups in ("key_groups", "query_groups")]
        return steps_of(self, problem, config, *threads)

    def block_rows(self, config: Config) -> tuple[int, int]:
        return config["query_groups"] * GROUP_ROWS, key_rows(config.values)

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Clocks of an SM for the tiles of both kernels, each those of the busiest of tensor cores, exp2 and shared memory. Only
        ranks configs: nothing of it is fitted to measurements."""
        d, dv, count, total = problem.head_dim, problem.head_dim_v, config["column_parts"], 0.0
        for rows, tile, units in ((key_rows(config.values), config["key_queries"], (1 + count) * (d + dv)),
                                  (config["query_groups"] * GROUP_ROWS, config["query_keys"], 2 * d + dv)):
            tiles = visited_tiles(problem, rows, tile) * problem.heads_q * problem.batch
            product = 2 * rows * tile * units / gpu["tensor_flops_per_clock_sm"]
            exponents = 2.2 * rows * tile / gpu["exp_per_clock_sm"]
            total += tiles * (max(product * (1 + 16 / tile), exponents) + 0.5 * min(product, exponents) + 250)
        bytes_us = problem.compulsory_bytes / gpu["bandwidth_gb_s"] * 1e-3
        return max(total / gpu.sms / (0.85 * gpu["sm_clock_mhz"]), bytes_us) + 8.0
