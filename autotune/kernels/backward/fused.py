"""`backward_fused`: gradients of attention for Hopper in five products: blocks of keys add their part of dQ to sums in fp32."""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import WARP_SIZE, Field, Map, Step
from ..forward.base import visited_tiles
from ..forward.wgmma import WARPGROUP_SIZE, _multiply
from ..limits import registers_exceeded, shared_memory_exceeded
from .base import ROWS_THREADS
from .mma import PANEL, _tiles
from .wgmma import (AHEAD, EXPOSED, GROUP_ROWS, HopperBackward, group_registers, key_tile_registers, loader_registers, stages,
                    waiting_clocks)

KEY_QUERIES = 64  # queries of a tile: M of the product that gives dQ
CONVERT_THREADS = 128
SUMS_FIELD = Field("float*", "dq_sums", "dQ before it is scaled and rounded, a place for each head and 64 queries")


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(smem_bytes(static, v), gpu, 1)


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    """What is live at once, plus 24 for addresses and statistics, 56 of packed sequences: dK and dV with a tile, or with dS, the
    part of dQ and what is ahead."""
    tile, ahead = key_tile_registers(static, KEY_QUERIES, v["ahead"]), v["ahead"] * KEY_QUERIES // 2
    live = (static.head_dim + static.head_dim_v) // 2 + max(tile, KEY_QUERIES // 4 + dq_columns(static, v) // 2 + ahead)
    available = group_registers(static, v["key_groups"], gpu["registers_per_sm"])
    return registers_exceeded(live + (56 if static.packed else 24), available)


def dq_columns(static: Static, v: Mapping[str, Value]) -> int:
    """Columns of dQ that a group multiplies at once."""
    return static.head_dim if v["dq_parts"] == 1 else math.ceil(static.head_dim / PANEL) // v["dq_parts"] * PANEL


def parts_of(static: Static) -> int:
    """Into how many parts two groups divide dQ's columns, if there are enough."""
    return 2 if math.ceil(static.head_dim / PANEL) % 2 == 0 else 1


def parts_of_dq(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    count = v["dq_parts"]
    if count > 1 and (v["key_groups"] != count or math.ceil(static.head_dim / PANEL) % count):
        return f"dq_parts of {count} need as many key_groups and a multiple of so many panels of {PANEL} columns"
    return None


def smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    stage = _tiles(KEY_QUERIES, static) + KEY_QUERIES * 8
    ds = KEY_QUERIES * v["key_groups"] * GROUP_ROWS * 2
    return _tiles(v["key_groups"] * GROUP_ROWS, static) + v["key_stages"] * stage + 2 * ds + 16 * (v["key_stages"] + 1)


class BackwardFused(HopperBackward):
    name = "backward_fused"
    summary = "Hopper: TMA, wgmma, specialised warps; dQ by sums in fp32, whose last bits differ from call to call"
    fused = True
    parameters = (
        Parameter("key_groups", (1, 2, 3), "compile", "multiplying warpgroups of a block, 64 keys each"),
        Parameter("dq_parts", (1, 2), "compile", "groups that each multiply a part of dQ's columns; 1: one group, by turns"),
        Parameter("key_stages", (1, 2, 3), "compile", "buffers of Q and dO"),
        AHEAD,
        Parameter("key_smem_bytes", (), "compile", "dynamic shared memory of backward_keys", derived=True),
        Parameter("longest_first", (True, False), "launch", "start the last query rows first"),
        Parameter("head_group", (1, 2, 4, 8, 16, 32, 64), "launch", "heads that run together, to share L2"),
    )
    rules = (parts_of_dq, stages, shared_memory, registers)

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().reject(problem, gpu):
            return reason
        if problem.deterministic:
            return "the order in which blocks add to dQ is not always the same, so its last bits are not either"
        tile = dict(key_groups=2, dq_parts=parts_of(problem.static))
        reasons = [registers(problem.static, {**tile, "ahead": ahead}, gpu) for ahead in (0, 1)]
        if reason := all(reasons) and reasons[0]:
            return f"gradients of {problem.head_dim + problem.head_dim_v} columns leave no room for a tile of scores: {reason}"
        return None

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"key_smem_bytes": smem_bytes(static, values)}

    def constants(self, static: Static, config: Config) -> list[tuple[str, str, Value]]:
        groups = config["key_groups"]
        return [*super().constants(static, config), ("int", "KEY_QUERIES", KEY_QUERIES), ("int", "ROLES", 1),
                ("int", "KEY_REGISTERS", group_registers(static, groups)),
                ("int", "KEY_LOADER_REGISTERS", loader_registers(static, groups)),
                ("int", "QUERY_BOX_ROWS", GROUP_ROWS), ("int", "KEY_BOX_ROWS", GROUP_ROWS)]

    def params(self, static: Static, config: Config) -> tuple[Field, ...]:
        return (*super().params(static, config), SUMS_FIELD)

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        columns = list(dict.fromkeys((static.head_dim, static.head_dim_v)))
        return {**super().operands(static, config), "qk": _multiply(KEY_QUERIES), "pv": _multiply(columns[0]),
                "more_qk": [], "more_pv": [_multiply(n) for n in columns[1:]], "ds": _multiply(dq_columns(static, config.values))}

    def maps(self, problem: Problem, config: Config) -> tuple[Map, ...]:
        return tuple(Map(tensor, GROUP_ROWS, PANEL) for tensor in ("q", "k", "v", "dout"))

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """128 keys by 64 queries, as FlashAttention-3 ships for D 128 (hopper/flash_bwd_launch_template.h), with both products of
        the next tile ahead where registers and a third buffer allow it, else none: one ahead is slower on an H200."""
        tile = dict(key_groups=2, longest_first=True, head_group=4)
        parts = (1, 2) if problem.head_dim % (2 * PANEL) else (2, 1)  # half of D 80 would be multiplied as 64 columns
        shapes = [dict(dq_parts=parts[0], ahead=2, key_stages=3)]
        shapes += [dict(dq_parts=count, ahead=0, key_stages=2) for count in parts]
        shapes += [dict(dq_parts=count, ahead=1, key_stages=stages) for stages in (3, 2) for count in parts]  # fewest registers
        shapes += [dict(dq_parts=count, ahead=0, key_stages=1) for count in parts]
        configs = [self.config(problem.static, {**tile, **shape}) for shape in shapes]
        return next((c for c in configs if self.illegal(problem.static, c, gpu) is None), configs[-1])

    def workspaces(self, problem: Problem, batch: int, seqlen_q: int) -> tuple[int, int, int]:
        stats, sums, _ = super().workspaces(problem, batch, seqlen_q)
        places = seqlen_q // KEY_QUERIES + batch if problem.packed else batch * -(-seqlen_q // KEY_QUERIES)
        return stats, sums, places * problem.heads_q * KEY_QUERIES * problem.head_dim

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        rows, keys, convert, sinks = self.typical_grids(problem, config)
        return [Step("backward_rows", rows, ROWS_THREADS, ROWS_THREADS // WARP_SIZE * 4),
                Step("backward_keys", keys, (1 + config["key_groups"]) * WARPGROUP_SIZE, config["key_smem_bytes"]),
                Step("backward_convert", convert, CONVERT_THREADS, 0), Step("backward_sinks", sinks, WARP_SIZE, 0)]

    def block_rows(self, config: Config) -> tuple[int, int]:
        return KEY_QUERIES, config["key_groups"] * GROUP_ROWS

    def preferred(self, problem: Problem, gpu: Gpu) -> bool:
        """Where two products less a score are worth more than clearing, adding up and reading 4 bytes for each element of dQ:
        where queries see some 1200 keys on an H200 (benchmarks/backward-h200.yaml: beyond 2048 tokens under a causal mask)."""
        products_us = 4 * problem.visible_pairs / max(problem.seqlen_q, 1) / (0.6 * gpu.mma_tflops * 1e6)
        return products_us > 30 / (0.85 * gpu["bandwidth_gb_s"] * 1e3)

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Clocks of an SM for the tiles, each those of the busier of tensor cores and exp2 with a part of the other, and bytes of
        the sums. Only ranks configs: for short sequences half of what is measured."""
        d, dv, rows = problem.head_dim, problem.head_dim_v, config["key_groups"] * GROUP_ROWS
        tiles = visited_tiles(problem, rows, KEY_QUERIES) * problem.heads_q * problem.batch
        product = 2 * rows * KEY_QUERIES * (3 * d + 2 * dv) / gpu["tensor_flops_per_clock_sm"]
        exponents = 2.2 * rows * KEY_QUERIES / gpu["exp_per_clock_sm"]
        exposed = EXPOSED[config["ahead"]] * min(product, exponents)
        total = tiles * (max(product, exponents) * 1.15 + exposed + 500 + waiting_clocks(config["key_stages"], config["ahead"]))
        sums_bytes = problem.batch * problem.heads_q * problem.seqlen_q * d * 10  # cleared before, converted after
        bytes_us = problem.compulsory_bytes / gpu["bandwidth_gb_s"] * 1e-3
        return max(total / gpu.sms / (0.85 * gpu["sm_clock_mhz"]), bytes_us) + sums_bytes / gpu["bandwidth_gb_s"] * 1e-3 + 10.0
