"""`forward_wgmma`: forward attention for Hopper, with TMA, warpgroup multiplies and specialised warps."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from . import account, defaults, splits
from ..base import RECENT_SIZES, Field, Map, Resized, Sizer, Step, header_if
from ..space import Space
from ..traits import Account
from .base import FORWARD_FIELDS, TENSORS, ForwardKernel
from .mma import PANEL
from ..limits import registers_exceeded, resident_blocks, shared_memory_exceeded
from .defaults import GROUP_ROWS

WARPGROUP_SIZE = 128

TASK_BYTES = 64  # what the loader tells the groups of a block
BOX_ROWS_FIELD = Field("int", "box_rows", "of a box of K or V: the most that divide a page and a tile")
LOADER_REGISTERS = 32  # at the least; with the 24 that setmaxnreg would take the loader spills
MOST_REGISTERS, MOST_LOADER_REGISTERS = 240, 64  # an H200 stopped at a group that was alone and handed over none of its 256
PACKED_LOADER_REGISTERS = 48  # of one that looks for the sequences of its work: with 40 it spills
SPLIT_LOADER_REGISTERS = 40  # of one that works out its part of the keys and serves one group: with 32 one in ten spills


def multiplier_registers(static: Static, v: Mapping[str, Value], registers_per_sm: int = 65536) -> int:
    """What setmaxnreg can give each thread of the multiplying groups once the loader's group has handed over its own."""
    groups = v["num_warpgroups"]
    dense = SPLIT_LOADER_REGISTERS if v["split_keys"] and groups == 1 else LOADER_REGISTERS
    least = PACKED_LOADER_REGISTERS if static.packed else dense
    return min(MOST_REGISTERS, (entry_registers(v, registers_per_sm) * (1 + groups) - least) // groups // 8 * 8)


def loader_registers(static: Static, v: Mapping[str, Value], registers_per_sm: int = 65536) -> int:
    """What each thread of the loader's group keeps of what is left."""
    groups, entry = v["num_warpgroups"], entry_registers(v, registers_per_sm)
    return min(MOST_LOADER_REGISTERS, entry * (1 + groups) - groups * multiplier_registers(static, v, registers_per_sm))


def entry_registers(v: Mapping[str, Value], registers_per_sm: int) -> int:
    """Registers with which each thread begins."""
    threads = (1 + v["num_warpgroups"]) * WARPGROUP_SIZE * v["min_blocks_per_sm"]
    return min(256, registers_per_sm // threads // 8 * 8)


def turns_need_groups(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["ping_pong"] and v["num_warpgroups"] < 2:
        return "ping_pong needs two groups to take turns"
    return None


def shared_memory(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return shared_memory_exceeded(smem_bytes(static, v), gpu, v["min_blocks_per_sm"])


def room_for_blocks(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    if v["min_blocks_per_sm"] > 1 and v["num_warpgroups"] > 1:
        return "several blocks on an SM are for one group each; more groups in a block do the same with one loader"
    return None


def dense_splits(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    return "keys of packed sequences are not split" if v["split_keys"] and static.packed else None


def registers(static: Static, v: Mapping[str, Value], gpu: Gpu) -> str | None:
    """Scores, output, and probabilities of the last tile are live at once: N / 2 + Dv / 2 + N / 4. Addresses and statistics
    take about 24 more, and 12 for each panel of a head beyond the second. Of what this lets pass, 5 % spill. ptxas also wants the
    accumulators of one multiply and 30 registers within what a thread begins with (C7602: 158 where 128 accumulate)."""
    entry = entry_registers(v, gpu["registers_per_sm"])
    if exceeded := registers_exceeded(max(v["block_n"], static.head_dim_v) // 2 + 30, entry):
        return exceeded
    panels = math.ceil(max(static.head_dim, static.head_dim_v) / PANEL)
    need = v["block_n"] // 2 + static.head_dim_v // 2 + v["block_n"] // 4 + 24 + 12 * max(0, panels - 2)
    return registers_exceeded(need, multiplier_registers(static, v, gpu["registers_per_sm"]))


def smem_bytes(static: Static, v: Mapping[str, Value]) -> int:
    def tile(rows: int, columns: int) -> int:
        return rows * math.ceil(columns / PANEL) * PANEL * 2

    rows = v["num_warpgroups"] * GROUP_ROWS
    return (v["q_stages"] * max(tile(rows, static.head_dim), tile(rows, static.head_dim_v))
            + v["num_stages"] * (tile(v["block_n"], static.head_dim) + tile(v["block_n"], static.head_dim_v))
            + math.ceil((v["q_stages"] + 2 * v["num_stages"]) / 4) * 64 + TASK_BYTES * v["q_stages"])


class ForwardWgmma(ForwardKernel):
    name = "forward_wgmma"
    template = "forward_wgmma/kernel.cu.j2"
    summary = "Hopper: TMA, wgmma, specialised warps; fp16 and bf16"
    min_arch = 90
    aligned = draws = True
    sized = ("num_splits",)
    dtypes = ("bf16", "fp16")
    sources = ("dense", "varlen", "paged")
    parameters = (
        Parameter("num_warpgroups", (1, 2, 3), "compile", "multiplying warpgroups of a block, 64 query rows each"),
        Parameter("block_heads", (1, 2, 4, 8), "compile", "query heads that share a block's rows, and K and V"),
        Parameter("block_n", tuple(range(32, 257, 16)), "compile", "keys of a tile"),
        Parameter("num_stages", (2, 3, 4), "compile", "buffers of K and of V"),
        Parameter("q_stages", (1, 2), "compile", "buffers of Q: with 2 the next block's queries load while this one's are used"),
        Parameter("overlap", (False, True), "compile", "softmax works while the last tile's P V is multiplied"),
        Parameter("ping_pong", (False, True), "compile", "groups take turns to multiply, so that one's softmax hides another's"),
        Parameter("rescale_slack", (-1, 8), "compile",
                  "rescale O when a row maximum grows by more than this (log2); -1: at every tile"),
        Parameter("integer_max", (False, True), "compile", "row maxima by three-way integer comparisons, half the instructions",
                  absent=False),
        Parameter("min_blocks_per_sm", (1, 2, 3, 4), "compile", "blocks per SM that the register allocation makes room for"),
        Parameter("split_keys", (False, True), "compile", "several blocks share the keys of a block of queries, and a second "
                  "kernel puts together what they leave", absent=False),
        Parameter("smem_bytes", (), "compile", "dynamic shared memory that the launch requests", derived=True),
        Parameter("longest_first", (True, False), "launch", "start the last query rows first"),
        Parameter("head_group", (1, 2, 4, 8, 16, 32, 64), "launch", "heads that run together, to share L2"),
        Parameter("persistent", (False, True), "launch", "one block for each place on the GPU, which draws its work"),
        Parameter("num_splits", splits.NUM_SPLITS, "launch", "blocks that share the keys of a block of queries", absent=1,
                  needs="split_keys"),
    )
    rules = (turns_need_groups, room_for_blocks, dense_splits, shared_memory, registers)
    fields = (*(Field("TensorMap", f"{tensor}_map") for tensor in TENSORS), *FORWARD_FIELDS, Field("int", "head_group"),
              Field("int", "longest_first"))

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        if gpu.arch != 90:
            return f"it is for compute capability 9.0, the GPU has {gpu.arch / 10}"
        if not problem.seqlen_k:
            return "there are no keys, and TMA maps no array of nothing"
        for name in ("head_dim", "head_dim_v"):
            value = getattr(problem, name)
            if value % 8 or not 16 <= value <= 256:
                return f"{name} is {value}; it takes multiples of 8 from 16 to 256"
        if problem.page_size % 16:
            return f"page_size is {problem.page_size}; TMA takes pages of a multiple of 16 keys"
        return super().reject(problem, gpu)

    def target(self, gpu: Gpu) -> str:
        return "sm_90a"

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"smem_bytes": smem_bytes(static, values)}

    def searched(self, static: Static, values: Mapping[str, Value], gpu: Gpu) -> bool:
        return not values["split_keys"]  # `space` adds those for problems that gain

    def space(self, problem: Problem, gpu: Gpu) -> Space:
        return super().space(problem, gpu) + splits.space(self, problem, gpu)

    def constants(self, static: Static, config: Config) -> list[tuple[str, str, Value]]:
        """Without split_keys, which chooses text: it needs an entry and fields that are not there without it."""
        constants = [constant for constant in super().constants(static, config) if constant[1] != "SPLIT_KEYS"]
        return [*constants, ("int", "LOADER_REGISTERS", loader_registers(static, config.values)),
                ("int", "REGISTERS", multiplier_registers(static, config.values))]

    def launch_fields(self, config: Config) -> tuple[Field, ...]:
        return super().launch_fields(config) + ((splits.NUM_SPLITS_FIELD,) if config["split_keys"] else ())

    def params(self, static: Static, config: Config) -> tuple[Field, ...]:
        fields = super().params(static, config) + ((BOX_ROWS_FIELD,) if static.packed and static.kv == "paged" else ())
        return fields + ((splits.WORKSPACE_FIELD,) if config["split_keys"] else ())

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        tiles = "aligned.cuh" if static.packed and static.kv == "paged" else "tight.cuh.j2"
        results = "partial.cuh" if config["split_keys"] else "finished.cuh.j2"
        return {**super().operands(static, config), "tiles_header": f"forward_wgmma/tiles/{tiles}",
                "split_keys": config["split_keys"],
                "results_header": f"forward_wgmma/results/{results}",
                "loads_header": "forward_wgmma/loads/packed.cuh" if static.packed else "forward_wgmma/loads/dense.cuh.j2",
                "boxes_header": header_if(static.packed, f"forward_wgmma/boxes/{static.kv}.cuh"),
                "key_steps": f"forward_wgmma/keys/{static.kv}.cuh.j2",
                **{f"{name}_header": header_if(config["split_keys"], f"forward_wgmma/split/{file}.cuh")
                   for name, file in (("split_machine", "machine"), ("split_tiles", "tiles"), ("combine", "combine"))},
                "wgmma_type": {"bf16": "bf16", "fp16": "f16"}[static.dtype], "qk": _multiply(config["block_n"]),
                "pv": _multiply(static.head_dim_v)}

    def maps(self, problem: Problem, config: Config) -> tuple[Map, ...]:
        unit = GROUP_ROWS // config["block_heads"], PANEL, config["block_heads"]
        keys = math.gcd(config["block_n"], problem.page_size) if problem.packed and problem.page_size else config["block_n"]
        return Map("q", *unit), Map("k", keys, PANEL), Map("v", keys, PANEL), Map("out", *unit)

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        values = defaults.values(problem, gpu)
        num_splits = splits.filling(self, problem, self.config(problem.static, values), gpu)
        if num_splits > 1:
            values.update(head_group=splits.HEAD_GROUP, min_blocks_per_sm=1)  # the loader of splits takes more registers
        return self.config(problem.static, {**values, "split_keys": num_splits > 1, "num_splits": num_splits})

    def suited(self, problem: Problem, config: Config, gpu: Gpu) -> dict[str, Value]:
        """As many splits as one round of blocks has room for; of blocks that fill the GPU already, two."""
        return {"num_splits": max(2, splits.filling(self, problem, config, gpu))} if config["split_keys"] else {}

    def block_queries(self, config: Config) -> int:
        return config["num_warpgroups"] * GROUP_ROWS // config["block_heads"]

    def block_heads(self, config: Config) -> int:
        return config["block_heads"]

    def workspace_floats(self, problem: Problem, config: Config) -> int:
        return config["num_splits"] * problem.heads_q * (problem.head_dim_v + 2) if config["split_keys"] else 0

    def known(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {**super().known(problem, config), "box_rows": self.maps(problem, config)[1].rows}

    def bind(self, problem: Problem, config: Config, resized: Resized | None = None) -> Sizer:
        sized, heads_q = super().bind(problem, config), problem.heads_q
        rows, floats = _combined_rows(problem), self.workspace_floats(problem, config) // config["num_splits"]

        @lru_cache(RECENT_SIZES)
        def splits_of(*sizes):
            return (resized(*sizes) if resized else config)["num_splits"]

        def split(call):
            (blocks,) = sized(call)
            call.num_splits = num_splits = splits_of(call.batch, call.seqlen_q, call.seqlen_k)
            call.lent = ("workspace", floats * num_splits * call.batch * call.seqlen_q),
            return blocks * num_splits, -(-call.seqlen_q // rows) * heads_q * call.batch

        return split if config["split_keys"] else sized

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        """The blocks, and those that put splits together."""
        threads = (1 + config["num_warpgroups"]) * WARPGROUP_SIZE
        blocks = self.blocks(problem, config) * config["num_splits"]
        step = Step(self.name, blocks, threads, config["smem_bytes"],
                    blocks_per_sm=config["min_blocks_per_sm"] if config["persistent"] else 0)
        if not config["split_keys"]:
            return [step]
        combine = -(-problem.seqlen_q // _combined_rows(problem)) * problem.heads_q * problem.batch
        return [step, Step("forward_combine", combine, splits.COMBINE_THREADS, 0, dependent=True)]

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        return account.time_us_of(*self._launched(problem, config, gpu))  # registers are those of the launch bounds

    def account(self, problem: Problem, config: Config, gpu: Gpu) -> Account:
        """Tiles in rounds of blocks, loads, and what blocks begin with: see `account`."""
        return account.account(*self._launched(problem, config, gpu))

    def _launched(self, problem: Problem, config: Config, gpu: Gpu) -> tuple:
        """What `account` needs to know."""
        v = config.values
        threads = (1 + v["num_warpgroups"]) * WARPGROUP_SIZE
        resident = resident_blocks(gpu, threads, entry_registers(v, gpu["registers_per_sm"]), v["smem_bytes"])
        workspace_bytes = self.workspace_bytes(problem, config)
        return problem, v, self.blocks(problem, config), self.block_queries(config), resident, workspace_bytes, gpu


def _combined_rows(problem: Problem) -> int:
    """Rows of a block that puts splits together."""
    return splits.COMBINE_THREADS * splits.COMBINE_COLUMNS // problem.head_dim_v


def _multiply(n: int) -> dict[str, object]:
    """Operand texts of one wgmma with an accumulator of 64 x n: 4 registers for each 16 x 8 tile, then the inputs."""
    tiles = n // 8
    registers = [", ".join(f"%{4 * tile + i}" for i in range(4)) for tile in range(tiles)]
    bindings = [", ".join(f'"+f"(c[{tile}][{i}])' for i in range(4)) for tile in range(tiles)]
    return {"n": n, "tiles": tiles, "registers": [line + ", " for line in registers[:-1]] + registers[-1:],
            "bindings": [line + "," for line in bindings[:-1]] + bindings[-1:], "inputs": [4 * tiles + i for i in range(6)]}
