"""`decode_mma`: a few queries over a long cache, dense or paged, on tensor cores with mma.sync, for sm_80 and later."""

from __future__ import annotations

from typing import Mapping

from ...core.config import Config, Parameter, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import WARP_SIZE, Step, header_if
from ..space import Space
from ..traits import Account
from . import account
from .account import L2_LINE_BYTES, MORE_REGISTERS, MORE_REGISTERS_E4M3
from .base import DECODE_FIELDS, MAX_CLUSTER, DecodeKernel, rows_of, unsplit_pieces
from .defaults import early_tiles, is_short, pieces, skeletons, speculates, stands_alone
from .rules import RULES, key_bytes, live_registers, ring_bytes, smem_bytes, whole_fragments
from ..limits import MAX_REGISTERS, registers_available, resident_blocks, shared_memory_exceeded

COMBINE_THREADS = 128
COMBINE_BYTES = 96 * 1024  # statistics of every split and row, 32 KB at the most, and O of some splits

# From one load into a buffer to the next, while all SMs read: with 32 KB in flight 128 blocks read 3.04 TB/s on an H200, 256 with
# 16 KB 2.86 (e4m3). For the share of the bandwidth that reading takes at best 46 KB an SM are enough. Of 67 winners 60 have 62 KB
# or more; the others read 25 MB or less, for which no default has more either.
RING_US, READ_SHARE = 1.4, 0.92


def paired(problem: Problem) -> bool:
    """Whether two key/value heads make a line of L2 full that one does not, and fit a tile of 16 rows and the registers."""
    fit = rows_of(problem) <= 8 and max(problem.head_dim, problem.head_dim_v) <= 128
    return fit and whole_fragments(problem) and key_bytes(problem) < L2_LINE_BYTES and problem.heads_kv > 1


def enough_bytes_in_flight(gpu: Gpu) -> float:
    """For each SM, by Little's law: 46 KB on an H200."""
    return READ_SHARE * gpu["bandwidth_gb_s"] * 1e3 * RING_US / gpu.sms


# What is compiled in by name, not as a constant: before sm_90 the source must not name their instructions.
NO_CONSTANTS = ("DEPENDENT_LAUNCH", "CLUSTER_MERGES", "SPECULATIVE_START")


class DecodeMma(DecodeKernel):
    name = "decode_mma"
    template = "decode_mma/kernel.cu.j2"
    summary = "tensor cores through mma.sync, split over keys; fp16 and bf16, e4m3 caches"
    min_arch = 80
    sized = ("pieces",)
    dtypes = ("bf16", "fp16")
    parameters = (
        Parameter("block_m", (16, 32, 64), "compile", "(query, head) rows of a block, of all its key/value heads"),
        Parameter("block_heads_kv", (1, 2), "compile", "key/value heads of which a block reads the same keys, side by side",
                  absent=1),
        Parameter("block_n", (16, 32, 64), "compile", "keys of a warp's tile"),
        Parameter("num_warps", (1, 2, 4, 8), "compile", "warps of a block, which deal out the tiles"),
        Parameter("num_stages", (2, 3, 4, 6, 8), "compile", "buffers of K and V that each warp has in flight"),
        Parameter("q_in_registers", (True, False), "compile", "keep Q in registers; no barrier before the first tile"),
        Parameter("l2_prefetch", (128, 256), "compile", "bytes that a 16-byte copy has L2 fetch"),
        Parameter("min_blocks_per_sm", (1, 2, 3, 4), "compile", "blocks per SM that the register allocator makes room for"),
        Parameter("dependent_launch", (False, True), "compile", "put blocks in place while the kernel before still runs",
                  absent=False),
        Parameter("cluster_merges", (False, True), "compile",
                  "where the host cuts sequences: merge splits in a cluster, through its shared memory", absent=False),
        Parameter("speculative_start", (False, True), "compile",
                  "over pages: begin with what stands there while the kernel before still runs, then look again", absent=False),
        Parameter("smem_bytes", (), "compile", "dynamic shared memory that the launch requests", derived=True),
        Parameter("pieces", (64, 96, 132, 216, 264, 396, 512, 792, 1056, 2112, 4096), "launch",
                  "about how many blocks share the work"),
        Parameter("last_block_merges", (True, False), "launch", "the last block to arrive merges splits, not a second kernel",
                  barred="cluster_merges"),
        Parameter("prefetch_tiles", (0, 1, 2, 4, 8), "launch",
                  "tiles of each warp that L2 fetches before the kernel before has ended", absent=0, needs="dependent_launch",
                  optional=True),
        Parameter("trigger_tiles", (0, 1, 2, 4, 8), "launch",
                  "tiles that each warp still has when it lets the next kernel come into place", absent=0,
                  needs="dependent_launch", optional=True),
    )
    rules = RULES
    fields = DECODE_FIELDS

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        for name in ("head_dim", "head_dim_v"):
            value = getattr(problem, name)
            if value % 8 or not 16 <= value <= 256:
                return f"{name} is {value}; it takes multiples of 8 from 16 to 256"
            if problem.kv_dtype == "e4m3" and value % 16:
                return f"{name} is {value}; in an e4m3 cache it takes multiples of 16"
        return super().reject(problem, gpu)

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        return {"smem_bytes": smem_bytes(static, values)}

    def searched(self, static: Static, values: Mapping[str, Value], gpu: Gpu) -> bool:
        """Without what never was among the fastest: launches that are not dependent, two lines at once, pairs of whole lines."""
        return (values["dependent_launch"] or gpu.arch < 90) and values["l2_prefetch"] == 128 and \
            (values["block_heads_kv"] == 1 or key_bytes(static) <= L2_LINE_BYTES)

    def space(self, problem: Problem, gpu: Gpu) -> Space:
        """Without configs whose blocks may stand unevenly: a search may miss the graphs in which they are slow."""
        configs = super().space(problem, gpu)
        if not stands_alone(problem, 1, gpu):
            return configs
        return configs.compiling(lambda config: not self.uneven(problem, config, gpu))

    def constants(self, static: Static, config: Config) -> list[tuple[str, str, Value]]:
        return [constant for constant in super().constants(static, config) if constant[1] not in NO_CONSTANTS]

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        chosen = {name.lower(): config[name.lower()] for name in (*NO_CONSTANTS, "BLOCK_HEADS_KV")}
        dependent, clusters, speculative = (config[name.lower()] for name in NO_CONSTANTS)
        start = "decode_mma/start/guess.cuh" if speculative else "decode_mma/prefetch/own.cuh"
        steps = "speculative" if speculative else "dependent" if dependent else "plain"
        pairs = config["block_heads_kv"] > 1 and static.kv_dtype == "e4m3"
        changes = (("head_scales", pairs), ("softcap", static.softcap), ("alibi", static.alibi))
        return {**super().operands(static, config), **chosen,
                "dependent_header": header_if(dependent, "lib/ptx/dependent.cuh"),
                "prefetch_header": header_if(dependent, f"decode_mma/prefetch/{static.kv}.cuh"),
                "start_header": header_if(dependent, start), "start_steps": f"decode_mma/start/{steps}.cuh.j2",
                "score_steps": [f"decode_mma/scores/{name}.cuh.j2" for name, there in changes if there],
                "piece_header": f"decode_mma/piece/{'clustered' if clusters else 'neighbours'}.cuh",
                "cluster_header": header_if(clusters, "decode_mma/cluster_merge.cuh")}

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """As many bytes in flight as an SM can hold with room to spare (notes on Little's law: 25 KB are the least for an
        H200, 40 KB good), and room for a second block beside it, of the next kernel."""
        block_m = 16 if rows_of(problem) <= 16 or problem.head_dim_v > 128 or problem.kv_dtype == "e4m3" else 32
        heads = 2 if paired(problem) else 1
        dependent, unsplit = gpu.arch >= 90, unsplit_pieces(problem, block_m // heads, heads)
        narrow = block_m > 16 or heads > 1 or problem.head_dim_v > 128
        short = is_short(problem, unsplit, gpu)
        for block_n, num_warps, num_stages, blocks in skeletons(problem, unsplit, narrow, gpu):
            prefetch_tiles, trigger_tiles = early_tiles(problem, unsplit, block_n, gpu) if dependent else (0, 0)
            values = dict(block_m=block_m, block_heads_kv=heads, block_n=block_n, num_warps=num_warps, num_stages=num_stages,
                          q_in_registers=block_m == 16 and problem.head_dim + problem.head_dim_v <= 384 and not short,
                          l2_prefetch=128, min_blocks_per_sm=blocks, dependent_launch=dependent, cluster_merges=False,
                          speculative_start=dependent and speculates(problem, unsplit, gpu),
                          pieces=0, last_block_merges=True,
                          prefetch_tiles=prefetch_tiles, trigger_tiles=trigger_tiles)
            config = self.fitted(problem, self.config(problem.static, values), gpu)
            if self.illegal(problem.static, config, gpu) is None:
                break
        return config

    def suited(self, problem: Problem, config: Config, gpu: Gpu) -> dict[str, Value]:
        """As many pieces as suit so many sequences."""
        return {"pieces": self.nearest("pieces", pieces(problem, self.unsplit(problem, config), gpu), config)}

    def uneven(self, problem: Problem, config: Config, gpu: Gpu) -> bool:
        """Whether blocks should stand alone, but an SM has room for two."""
        return not shared_memory_exceeded(config["smem_bytes"], gpu, 2) and \
            stands_alone(problem, self.unsplit(problem, config), gpu)

    def unsplit(self, problem: Problem, config: Config) -> int:
        """Pieces of which none is split."""
        return unsplit_pieces(problem, self.block_rows(config), self.block_heads_kv(config))

    def bytes_in_flight(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """Of keys and values, for each SM on average: a ring for each block that it holds whatever registers a thread takes, as
        far as there are blocks and bytes for them, if all sequences have seqlen_k keys."""
        blocks, threads = self.launches(problem, config).grid, config["num_warps"] * WARP_SIZE
        registers = min(MAX_REGISTERS, registers_available(threads, gpu, config["min_blocks_per_sm"]))
        resident = resident_blocks(gpu, threads, registers, config["smem_bytes"])
        ring = ring_bytes(problem.static, config.values)
        return min(blocks / gpu.sms, resident) * min(ring, problem.compulsory_bytes / max(blocks, 1))

    def block_rows(self, config: Config) -> int:
        return config["block_m"] // config["block_heads_kv"]

    def block_heads_kv(self, config: Config) -> int:
        return config["block_heads_kv"]

    def tile_keys(self, config: Config) -> int:
        return config["block_n"]

    def least_tiles(self, config: Config) -> int:
        return config["num_warps"]

    def most_cluster(self, config: Config) -> int:
        return MAX_CLUSTER if config["cluster_merges"] else 1

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        """The pieces, and their merger if any block of it is needed."""
        launches = self.launches(problem, config)
        dependent = config["dependent_launch"]
        steps = [Step(self.name, launches.grid, config["num_warps"] * WARP_SIZE, config["smem_bytes"], dependent=dependent,
                      cluster=launches.cluster)]
        if not config["last_block_merges"]:
            steps.append(Step("decode_combine", launches.combine, COMBINE_THREADS, COMBINE_BYTES, dependent=dependent))
        return steps

    def expected_registers(self, problem: Problem, config: Config, gpu: Gpu) -> int:
        """What tiles take, and what the rest of the kernel was seen to add."""
        v = config.values
        more = MORE_REGISTERS_E4M3 * v["block_n"] // 16 if problem.kv_dtype == "e4m3" else MORE_REGISTERS
        available = registers_available(v["num_warps"] * WARP_SIZE, gpu, v["min_blocks_per_sm"])
        return min(live_registers(problem.static, v) + more, available, MAX_REGISTERS)

    def account(self, problem: Problem, config: Config, gpu: Gpu) -> Account:
        return self._account(problem, config, gpu, self.expected_registers(problem, config, gpu))

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Bytes over the bandwidth in rounds of blocks, what a block takes by itself, and latencies: see `account`."""
        return self._account(problem, config, gpu, registers).time_us

    def _account(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> Account:
        launches = self.launches(problem, config)
        empty = 0 if problem.kv == "dense" else self.launches(problem, config, uniform=False).grid - launches.grid
        resident = resident_blocks(gpu, config["num_warps"] * WARP_SIZE, registers, config["smem_bytes"])
        return account.account(problem, config.values, launches, empty, max(1, self.unsplit(problem, config)), resident, gpu)
