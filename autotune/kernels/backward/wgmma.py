"""`backward_wgmma`: gradients of attention for Hopper, with TMA, warpgroup multiplies and specialised warps."""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import Field, Map, Step, header_if
from ..forward.base import visited_tiles
from ..forward.wgmma import MOST_LOADER_REGISTERS, MOST_REGISTERS, WARPGROUP_SIZE, _multiply
from ..limits import registers_exceeded, shared_memory_exceeded
from .base import BACKWARD_FIELDS, BackwardKernel, steps_of
from .mma import PANEL, _tiles

GROUP_ROWS = 64  # M of wgmma
SHORT_KEYS = 1024  # to which tiles of 96 keys win for D 128; beyond, 64 are 1.05 to 1.28 times as fast (docs/log.md)
MAPPED = ("q", "k", "v", "dout")
WGMMA_TYPES = {"bf16": "bf16", "fp16": "f16"}
AHEAD = Parameter("ahead", (2, 1, 0), "compile", "products of the next tile, S and dP, that start before this one's gradients "
                  "end")
# Of the loader at the least: with 24 it spills where sequences are packed, and in backward_queries where tiles have many panels.
LOADER_REGISTERS, WIDE_LOADER_REGISTERS, PACKED_LOADER_REGISTERS = 24, 40, 48


def group_registers(static: Static, groups: int, registers_per_sm: int = 65536, queries: bool = False) -> int:
    """What setmaxnreg gives each thread of the multiplying groups, of backward_queries or of backward_keys."""
    entry = min(256, registers_per_sm // ((1 + groups) * WARPGROUP_SIZE) // 8 * 8)
    wide = queries and static.head_dim + static.head_dim_v > 320
    least = PACKED_LOADER_REGISTERS if static.packed else WIDE_LOADER_REGISTERS if wide else LOADER_REGISTERS
    return min(MOST_REGISTERS, (entry * (1 + groups) - least) // groups // 8 * 8)


def loader_registers(static: Static, groups: int, registers_per_sm: int = 65536, queries: bool = False) -> int:
    """What each thread of the loader's group keeps of what is left."""
    entry = min(256, registers_per_sm // ((1 + groups) * WARPGROUP_SIZE) // 8 * 8)
    return min(MOST_LOADER_REGISTERS, entry * (1 + groups) - groups * group_registers(static, groups, registers_per_sm, queries))


def key_rows(v: Mapping[str, Value]) -> int:
    return v["key_groups"] // v["roles"] * GROUP_ROWS


def roles(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["roles"] == 2 and (v["key_groups"], v["key_stages"]) != (2, 2):
        return f"two roles need key_groups and key_stages of 2, not {v['key_groups']} and {v['key_stages']}"
    return None


def stages(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    few = [name for name in ("key_stages", "query_stages") if v.get(name) == 1]
    return f"scores of the next tile cannot start with {few[0]} of 1" if v["ahead"] and few else None


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(max(key_smem_bytes(static, v), query_smem_bytes(static, v)), gpu, 1)


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    """What is live at once, plus 24 for addresses and statistics, 32 of packed sequences or with both products ahead: gradients,
    a tile's scores or dP or both, and P or dS as the operand of a multiply that is under way; with the soft cap its derivative
    too."""
    softcap, others = static.softcap, 32 if static.packed or v["ahead"] == 2 else 24
    if v["roles"] == 2:
        keys = max(static.head_dim, static.head_dim_v) // 2 + v["key_queries"] * (6 if softcap else 4) // 4
    else:
        keys = (static.head_dim + static.head_dim_v) // 2 + key_tile_registers(static, v["key_queries"], v["ahead"])
    queries = static.head_dim // 2 + v["query_keys"] * (7 if softcap else 5) // 4
    return registers_exceeded(keys + others, group_registers(static, v["key_groups"], gpu["registers_per_sm"])) or \
        registers_exceeded(queries + 24, group_registers(static, v["query_groups"], gpu["registers_per_sm"], queries=True))


def key_tile_registers(static: Static, queries: int, ahead: int) -> int:
    """Of a tile of 64 keys: scores and dP, which have no place at the same time if only scores are ahead, and P or dS rounded."""
    return queries * ((4 if ahead == 1 else 5) + (2 if static.softcap else 0)) // 4


def key_smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    stage = _tiles(v["key_queries"], static) + v["key_queries"] * 8
    handed = 2 * v["key_queries"] * 128 if v["roles"] == 2 else 0
    return _tiles(key_rows(v), static) + v["key_stages"] * stage + handed + 16 * (v["key_stages"] + 1)


def query_smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    stage = _tiles(v["query_keys"], static)
    return _tiles(v["query_groups"] * GROUP_ROWS, static) + v["query_stages"] * stage + 16 * (v["query_stages"] + 1)


L2_BYTES_PER_CLOCK_SM = 24  # 5.5 TB/s of 132 SMs at 1.75 GHz
EXPOSED = (0.5, 0.35, 0.25)  # of exp2 beside products, or products beside exp2, with so many products ahead
WAIT_CLOCKS = 700  # of a tile, where the tile at work and the next one's products leave no buffer to load into


def waiting_clocks(stages: int, ahead: int) -> int:
    """Of a tile, with so many buffers."""
    return WAIT_CLOCKS * (stages - 1 - (ahead > 0) < 1)


def tile_clocks(problem: Problem, config: Config, gpu: Gpu, rows: int, tile: int, stages: int, columns: int, by_registers: int,
                more_bytes: int) -> float:
    """Clocks of all tiles of `tile` queries or keys that blocks of `rows` meet, for products of `columns` columns together, of
    which those of `by_registers` have one operand in registers; others read 128 bytes of shared memory a clock. What exp2 does
    not hide behind products is less with products ahead."""
    loaded = 2 * tile * (problem.head_dim + problem.head_dim_v)
    smem = loaded + more_bytes + rows // GROUP_ROWS * 2 * ((columns - by_registers) * (GROUP_ROWS + tile) + by_registers * tile)
    product = 2 * rows * tile * columns / gpu["tensor_flops_per_clock_sm"]
    exponents = 2.2 * rows * tile / gpu["exp_per_clock_sm"]
    clocks = max(product, exponents, smem / 128, loaded / L2_BYTES_PER_CLOCK_SM)
    clocks += EXPOSED[config["ahead"]] * min(product, exponents) + 250 + waiting_clocks(stages, config["ahead"])
    return visited_tiles(problem, rows, tile) * problem.heads_q * problem.batch * clocks


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
            return "there are no keys or no queries, and TMA maps no array of nothing"
        for name in ("head_dim", "head_dim_v"):
            value = getattr(problem, name)
            if value % 8 or not 16 <= value <= 256:
                return f"{name} is {value}; it takes multiples of 8 from 16 to 256"
        return super().reject(problem, gpu)

    def target(self, gpu: Gpu) -> str:
        return "sm_90a"

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        folder = f"backward_wgmma/{'fused' if self.fused else 'owned'}"
        return {**super().operands(static, config), "wgmma_type": WGMMA_TYPES[static.dtype],
                "key_steps": f"{folder}/steps.cuh.j2",
                "roles_header": header_if(not self.fused, f"{folder}/roles.cuh.j2"),
                "sums_header": header_if(self.fused, f"{folder}/sums/{static.kv}.cuh"),
                "query_part_header": header_if(self.fused, f"{folder}/query_part.cuh"),
                "dq_header": f"{folder}/convert.cuh" if self.fused else f"{folder}/queries.cuh.j2"}


class BackwardWgmma(HopperBackward):
    name = "backward_wgmma"
    summary = "Hopper: TMA, wgmma, specialised warps; each block owns what it writes, so results repeat bit for bit"
    parameters = (
        Parameter("key_groups", (1, 2, 3), "compile", "multiplying warpgroups of a block of backward_keys, 64 keys each"),
        Parameter("key_queries", (16, 32, 48, 64, 80, 96, 112, 128), "compile", "queries of its tiles"),
        Parameter("roles", (1, 2), "compile", "2: a pair of groups shares 64 keys, one has P and dV, the other dS and dK"),
        Parameter("key_stages", (1, 2, 3), "compile", "buffers of Q and dO"),
        Parameter("query_groups", (1, 2, 3), "compile", "multiplying warpgroups of a block of backward_queries, 64 queries each"),
        Parameter("query_keys", (32, 48, 64, 80, 96, 112, 128, 144, 160), "compile", "keys of its tiles"),
        Parameter("query_stages", (1, 2, 3), "compile", "buffers of K and V"),
        AHEAD,
        Parameter("key_smem_bytes", (), "compile", "dynamic shared memory of backward_keys", derived=True),
        Parameter("query_smem_bytes", (), "compile", "dynamic shared memory of backward_queries", derived=True),
        Parameter("longest_first", (True, False), "launch", "start the last query rows first"),
        Parameter("head_group", (1, 2, 4, 8, 16, 32, 64), "launch", "heads that run together, to share L2"),
    )
    rules = (roles, stages, shared_memory, registers)

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"key_smem_bytes": key_smem_bytes(static, values), "query_smem_bytes": query_smem_bytes(static, values)}

    def constants(self, static: Static, config: Config) -> list[tuple[str, str, Value]]:
        keys, queries = config["key_groups"], config["query_groups"]
        return [*super().constants(static, config), ("int", "KEY_REGISTERS", group_registers(static, keys)),
                ("int", "KEY_LOADER_REGISTERS", loader_registers(static, keys)),
                ("int", "QUERY_REGISTERS", group_registers(static, queries, queries=True)),
                ("int", "QUERY_LOADER_REGISTERS", loader_registers(static, queries, queries=True)),
                *(("int", f"{name}_BOX_ROWS", rows) for name, rows in zip(("QUERY", "KEY"), self.box_rows(config)))]

    def box_rows(self, config: Config) -> tuple[int, int]:
        """Rows of a box of queries, and of keys: such that boxes fill the tiles of both kernels."""
        return math.gcd(config["key_queries"], GROUP_ROWS), math.gcd(config["query_keys"], GROUP_ROWS)

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        scores = list(dict.fromkeys((config["key_queries"], config["query_keys"])))
        columns = list(dict.fromkeys((static.head_dim, static.head_dim_v)))
        return {**super().operands(static, config),
                "qk": _multiply(scores[0]), "pv": _multiply(columns[0]), "more_qk": [_multiply(n) for n in scores[1:]],
                "more_pv": [_multiply(n) for n in columns[1:]]}

    def maps(self, problem: Problem, config: Config) -> tuple[Map, ...]:
        queries, keys = self.box_rows(config)
        return Map("q", queries, PANEL), Map("k", keys, PANEL), Map("v", keys, PANEL), Map("dout", queries, PANEL)

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """Tiles for which products of shared memory and registers balance (r below 0.9 in the model of docs/log.md): 128 keys by
        64 queries to D 128 for dK and dV, fewer queries above, 64 keys and two roles beyond D 192 with 128, and 128 queries by as
        many keys as registers hold for dQ. A third buffer, where it fits, is worth up to 1.4 times the speed."""
        head_dim, total = max(problem.head_dim, problem.head_dim_v), problem.head_dim + problem.head_dim_v
        few = 256 < total <= 320  # registers are left for few queries
        wide = 96 if problem.seqlen_k <= SHORT_KEYS else 64
        roles = dict(roles=2, key_stages=2) if total > 320 else dict(roles=1, key_stages=3)
        tile = dict(key_groups=2, key_queries=32 if few else 64, query_groups=2, query_stages=3, **roles,
                    query_keys=128 if head_dim <= 64 else wide if head_dim <= 128 else 48 if few else 32,
                    ahead=1 if few or 64 < head_dim <= 128 else 2)
        fixed = dict(longest_first=True, head_group=4)
        fewer = [dict(key_stages=3, query_stages=2), dict(key_stages=2, query_stages=3), dict(key_stages=2, query_stages=2)]
        small = (dict(ahead=1), dict(ahead=1, query_keys=64), dict(ahead=1, query_keys=64, key_queries=48),
                 dict(ahead=1, query_keys=48, key_queries=48), dict(ahead=1, query_keys=48, key_queries=32),
                 dict(query_keys=32, key_queries=32, query_stages=1, ahead=0),
                 dict(query_keys=32, key_queries=16, key_stages=1, query_stages=1, ahead=0))
        less = [*fewer[tile["roles"] - 1:], *({**stages, **shape} for shape in small for stages in ({}, *fewer))]
        configs = [self.config(problem.static, {**fixed, **tile, **shape}) for shape in ({}, *less)]
        return next((c for c in configs if self.illegal(problem.static, c, gpu) is None), configs[-1])

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        threads = [(1 + config[groups]) * WARPGROUP_SIZE for groups in ("key_groups", "query_groups")]
        return steps_of(self, problem, config, *threads)

    def block_rows(self, config: Config) -> tuple[int, int]:
        return config["query_groups"] * GROUP_ROWS, key_rows(config.values)

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Clocks of an SM for the tiles of both kernels, each those of the busiest of tensor cores, exp2, shared memory and L2.
        Only ranks configs: for short sequences half of what is measured."""
        d, dv, keys, queries = problem.head_dim, problem.head_dim_v, config["key_queries"], config["query_keys"]
        handed = 4 * keys * GROUP_ROWS if config["roles"] == 2 else 0
        key_side, query_side = key_rows(config.values), config["query_groups"] * GROUP_ROWS
        total = tile_clocks(problem, config, gpu, key_side, keys, config["key_stages"], 2 * (d + dv), d + dv, handed)
        total += tile_clocks(problem, config, gpu, query_side, queries, config["query_stages"], 2 * d + dv, d, 0)
        bytes_us = problem.compulsory_bytes / gpu["bandwidth_gb_s"] * 1e-3
        return max(total / gpu.sms / (0.85 * gpu["sm_clock_mhz"]), bytes_us) + 8.0
