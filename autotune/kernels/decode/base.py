"""What all decode kernels share: the arguments of a call, how a grid is sized, and the checks that any of them makes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Callable

from ...core.config import Config, Value
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ..base import LEAST_ALIBI_SCALE, RECENT_SIZES, Field, Kernel, Resized, Sizer, bounded, mask_fields, reciprocal, header_if
from ..forward.base import ALIBI_FIELDS, ELEMENTS

DECODE_TENSORS = ("q", "k", "v", "out")
MAX_QUERIES = 16  # of a sequence: more are a matter for the forward kernels
MAX_CLUSTER = 16  # blocks of a cluster; more than 8 must be asked for

DECODE_FIELDS = (
    Field("const Element*", "q", "(batch, seqlen_q, heads_q, head_dim), or packed, (queries, heads_q, head_dim)"),
    Field("const KvElement*", "k", "(batch, seqlen_k, heads_kv, head_dim), or (pages, page_size, heads_kv, head_dim)"),
    Field("const KvElement*", "v", "(batch, seqlen_k, heads_kv, head_dim_v), or (pages, page_size, heads_kv, head_dim_v)"),
    Field("Element*", "out", "(batch, seqlen_q, heads_q, head_dim_v), or packed as q is"),
    Field("float*", "lse", "(batch, heads_q, seqlen_q), or (heads_q, queries), or null"),
    Field("const void*", "sinks", "(heads_q), or null"),
    Field("const int*", "lengths", "(batch): keys of each sequence, or null: all have seqlen_k", of="cache_seqlens"),
    Field("const int*", "query_starts", "(batch + 1): where queries of a sequence begin among packed ones, or null: none are",
          of="cu_seqlens_q"),
    Field("const int*", "page_table", "(batch, pages of a sequence): numbers of pages; null unless paged"),
    Field("const float*", "k_scales", "of an 8-bit cache, one or (heads_kv), or null"),
    Field("const float*", "v_scales"),
    Field("float*", "partial_o", "(slots, rows, head_dim_v): what pieces leave behind, if any sequence is split"),
    Field("float*", "partial_statistics", "(slots, rows, 2): maximum and sum"),
    Field("u32*", "tickets", "one for each sequence, key/value head and tile of rows, 0 between launches; null: merged later"),
    *(Field("long long", f"{tensor}_{axis}_stride", "of pages, in a paged cache" if tensor + axis == "kbatch" else "")
      for tensor in DECODE_TENSORS for axis in ("batch", "row", "head")),
    Field("long long", "lse_batch_stride"),
    Field("long long", "lse_head_stride"),
    Field("long long", "page_table_stride", "from one sequence to the next"),
    Field("int", "batch"),
    Field("int", "heads_q"),
    Field("int", "heads_kv"),
    Field("int", "group", "query heads per key/value head"),
    Field("int", "seqlen_q", "queries of a sequence, the most where query_starts tells"),
    Field("int", "seqlen_k", "the most keys that a sequence can have"),
    Field("int", "window_left"),
    Field("int", "window_right"),
    Field("int", "sink_dtype"),
    Field("float", "scale_log2", "softmax scale * log2(e), above 0", of="max(scale, least_scale) * LOG2E"),
    Field("int", "page_size"),
    Field("unsigned", "page_magic", "2^(31 + page_shift) / page_size, rounded up"),
    Field("int", "page_shift"),
    Field("unsigned", "group_magic", "the same of group"),
    Field("int", "group_shift"),
    Field("int", "num_splits", "of each sequence, as far as its length allows; 0: by its length. Above 0 if nothing tells it"),
    Field("int", "pieces", "about how many blocks share the work"),
    Field("int", "k_scale_stride", "0 or 1"),
    Field("int", "v_scale_stride"),
    Field("float", "v_scale", "of an 8-bit cache, beside v_scales"),
)

# With `dependent_launch`: what a block may have L2 fetch before the kernels before it have ended.
EARLY_FIELDS = (Field("int", "prefetch_tiles", "tiles of each warp that are prefetched, 0: none",
                      of="prefetch_tiles if pages else 0"),
                Field("int", "trigger_tiles", "tiles that each warp has left when the next kernel may come, 0: none"),
                Field("int", "pages", "of the cache: numbers of pages below it are taken for right"))


class Launches:
    """What launching a decode problem of exact sizes takes: grids of the two steps, slots of the workspace.

    `combine` is the grid of the second step, 0 if there is none. `slots` and `rows` size the workspace: `slots * rows *
    (head_dim_v + 2)` floats, 0 slots if no sequence can be split; `tickets` is how many counters may be used. `splits` is into
    how many each sequence is cut, 0 where the device cuts them by their lengths. Of `cluster` blocks is a cluster, 1: there are
    none.
    """

    __slots__ = ("grid", "combine", "slots", "rows", "tickets", "splits", "cluster")

    def __init__(self, grid: int, combine: int, slots: int, rows: int, tickets: int, splits: int, cluster: int):
        self.grid, self.combine, self.slots, self.rows, self.tickets = grid, combine, slots, rows, tickets
        self.splits, self.cluster = splits, cluster

    def __str__(self) -> str:
        """How the keys are cut, and who merges the pieces, in words."""
        if self.cluster > 1:
            return (f"keys of each sequence are cut into {self.splits}, {self.grid} blocks in all; the {self.cluster} blocks "
                    "of a cluster merge their pieces through shared memory")
        if not self.slots:
            return f"keys are not cut: {self.grid} blocks, each with all keys of its rows"
        parts = f"into {self.splits}, {self.grid} blocks in all" if self.splits else \
            f"on the device by the lengths that stand there, at most {self.grid} blocks in all"
        merger = "the last block of a sequence to arrive" if self.tickets else f"a second kernel of {self.combine} blocks"
        return f"keys of each sequence are cut {parts}; {merger} merges the pieces"


class DecodeKernel(Kernel):
    """Base of the decode kernels."""

    op = "decode"
    aligned = True
    sources = ("dense", "paged")

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().reject(problem, gpu):
            return reason
        if problem.seqlen_q > MAX_QUERIES:
            return f"seqlen_q is {problem.seqlen_q}; it takes up to {MAX_QUERIES} queries of a sequence"
        return None

    def reject_dtypes(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.out_dtype != problem.dtype:
            return "the output must have the dtype of the queries"
        if problem.kv_dtype not in (problem.dtype, "e4m3"):
            return f"keys and values must have the dtype of the queries or be e4m3, not {problem.kv_dtype}"
        if problem.kv_dtype == "e4m3" and gpu.arch < 89:
            return f"an e4m3 cache needs compute capability 8.9, the GPU has {gpu.arch / 10}"
        return None

    def params(self, static: Static, config: Config) -> tuple[Field, ...]:
        softcap = (Field("float", "softcap_log2", "soft cap * log2(e)", of="softcap * LOG2E"),) if static.softcap else ()
        early = EARLY_FIELDS if config["dependent_launch"] else ()
        return self.fields + mask_fields(static) + softcap + early + (ALIBI_FIELDS if static.alibi else ())

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        e4m3 = static.kv_dtype == "e4m3"
        return {"kv_header": f"decode_mma/kv/{static.kv}.cuh", "kv_dtype": static.kv_dtype,
                "multiply_header": "decode_mma/products/e4m3.cuh.j2" if e4m3 else "decode_mma/products/same.cuh",
                "query_steps": f"decode_mma/products/{'e4m3' if e4m3 else 'same'}_queries.cuh.j2",
                "alibi_header": header_if(static.alibi, "attention/alibi.cuh"),
                "fp8_header": header_if(e4m3, "lib/ptx/fp8.cuh"), "element_header": header_if(e4m3, "lib/tile/element.cuh"),
                "shared_queries_header": header_if(not e4m3, "decode_mma/shared_queries.cuh"),
                "kv_element": "e4m3" if e4m3 else ELEMENTS[static.kv_dtype]}

    def block_rows(self, config: Config) -> int:
        """(query, head) rows of each key/value head that a block owns."""
        raise NotImplementedError

    def block_heads_kv(self, config: Config) -> int:
        """Key/value heads that a block takes side by side."""
        return 1

    def tile_keys(self, config: Config) -> int:
        """Keys of a tile, the unit in which sequences are cut."""
        raise NotImplementedError

    def least_tiles(self, config: Config) -> int:
        """Tiles of a piece at the least, unless a number of splits is asked for."""
        raise NotImplementedError

    def known(self, problem: Problem, config: Config) -> dict[str, Value]:
        magic, shift = reciprocal(problem.group)
        least = LEAST_ALIBI_SCALE if problem.alibi and not problem.softcap else 0.0
        return {**super().known(problem, config), "group_magic": magic, "group_shift": shift, "least_scale": least}

    def bind(self, problem: Problem, config: Config, resized: Resized | None = None) -> Sizer:
        """Reads `uniform`: every sequence has seqlen_q queries and seqlen_k keys; else that many at most, and the device reads
        how many; and `num_splits`, 0 for the config's choice, which becomes what Params has. How many pieces there are follows
        from how long sequences are about; how many can be launched, and what they are lent, from how long they can be."""
        cut, columns = self._cut(problem, config), problem.head_dim_v

        @lru_cache(RECENT_SIZES)
        def launch(batch, seqlen_q, seqlen_k, uniform, num_splits, longest_q, longest_k):
            pieces = (resized(batch, longest_q, longest_k) if resized else config)["pieces"]
            grid, combine, slots, rows, tickets, splits, cluster = cut(batch, seqlen_q, seqlen_k, uniform, num_splits, pieces)
            lent = (("partial_o", slots * rows * columns), ("partial_statistics", slots * rows * 2)) if slots else ()
            return (grid, combine), lent, tickets, splits, cluster, pieces

        def sized(call):
            grids, call.lent, call.counters, call.num_splits, call.cluster, call.pieces = launch(
                call.batch, call.seqlen_q, call.seqlen_k, call.uniform, call.num_splits, call.longest_q, call.longest_k)
            call.partial_o = call.partial_statistics = 0
            return grids

        return sized

    def _cut(self, problem: Problem, config: Config) -> Callable[[int, int, int, bool, int, int], tuple]:
        """A function of (batch, seqlen_q, seqlen_k, uniform, num_splits, pieces) that gives the fields of `Launches`."""
        heads_kv, group = problem.heads_kv, problem.group
        block_rows, tile, least = self.block_rows(config), self.tile_keys(config), self.least_tiles(config)
        block_heads, combines = self.block_heads_kv(config), not config["last_block_merges"]
        most_splits, most_cluster = 4096 // (block_rows * block_heads), self.most_cluster(config)
        left = None if problem.window_left is None else bounded(problem.window_left)

        def cut(batch, seqlen_q, seqlen_k, uniform, num_splits, pieces):
            rows = group * seqlen_q
            unsplit = -(-heads_kv // block_heads) * -(-rows // block_rows)
            # Tiles that queries see: those of all keys, or of the window and one more, as it need not begin at a tile.
            tiles = -(-seqlen_k // tile)
            if left is not None:
                tiles = min(tiles, (left + seqlen_q) // tile + 2)
            splits = min(num_splits, tiles) if num_splits else tiles // least
            if uniform and not num_splits:
                splits = min(splits, pieces // max(batch * unsplit, 1))
            splits = max(1, min(splits, most_splits))
            cluster = 1
            if uniform and most_cluster > 1:
                cluster = splits = min(splits, most_cluster)
            grid = batch * unsplit * splits
            if uniform:
                num_splits = splits
            elif not num_splits:  # pieces of long sequences, and one for each that is too short to share
                grid = min(grid, pieces + batch * unsplit)
            split = splits > cluster
            slots = 0 if not split else grid if num_splits else min(grid, pieces)
            return (grid, batch * unsplit if split and combines else 0, slots,
                    (block_heads - 1) * block_rows + min(rows, block_rows),
                    batch * unsplit if split and not combines else 0, num_splits, cluster)

        return cut

    def launches(self, problem: Problem, config: Config, uniform: bool = True, num_splits: int = 0) -> Launches:
        """How the keys of `problem` itself are cut: `uniform` and `num_splits` as in `bind`."""
        sizes = problem.batch, problem.seqlen_q, problem.seqlen_k
        return Launches(*self._cut(problem, config)(*sizes, uniform, num_splits, config["pieces"]))

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        launches = self.launches(problem, config, uniform=False)
        return launches.slots * launches.rows * (problem.head_dim_v + 2) * 4 + launches.tickets * 4


def unsplit_pieces(problem: Problem, block_rows: int, block_heads_kv: int) -> int:
    """Pieces of a problem whose sequences are not split."""
    return problem.batch * math.ceil(problem.heads_kv / block_heads_kv) * row_tiles(problem, block_rows)


def rows_of(problem: Problem) -> int:
    """(query, head) rows that share one key/value head."""
    return problem.group * problem.seqlen_q


def row_tiles(problem: Problem, block_rows: int) -> int:
    return math.ceil(rows_of(problem) / block_rows)
