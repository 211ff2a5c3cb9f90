"""What all forward kernels share: the arguments of a call and the checks that any of them makes."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Callable

from ...core.config import Config
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from ...core.sequences import visible_pairs
from . import varlen
from ..base import Field, Kernel, legal_configs

# Codes of the sink logits' dtype in Params.sink_dtype.
SINK_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}

UNBOUNDED = 2**30 - 2**16  # a window side that hides nothing

TENSORS = ("q", "k", "v", "out")

FORWARD_FIELDS = (
    Field("const Element*", "q", "(batch, seqlen_q, heads_q, head_dim)"),
    Field("const Element*", "k", "(batch, seqlen_k, heads_kv, head_dim)"),
    Field("const Element*", "v", "(batch, seqlen_k, heads_kv, head_dim_v)"),
    Field("Element*", "out", "(batch, seqlen_q, heads_q, head_dim_v)"),
    Field("float*", "lse", "(batch, heads_q, seqlen_q), or null"),
    Field("const void*", "sinks", "(heads_q), or null"),
    *(Field("long long", f"{tensor}_{axis}_stride") for tensor in TENSORS for axis in ("batch", "row", "head")),
    Field("int", "batch"),
    Field("int", "heads_q"),
    Field("int", "group", "query heads per key/value head"),
    Field("int", "seqlen_q"),
    Field("int", "seqlen_k"),
    Field("int", "window_left"),
    Field("int", "window_right"),
    Field("int", "sink_dtype"),
    Field("float", "scale_log2", "softmax scale * log2(e), above 0"),
)

ALIBI_FIELDS = (
    Field("const float*", "alibi_slopes", "(heads_q), or (batch, heads_q)"),
    Field("long long", "alibi_batch_stride", "0: the slopes of all batch entries"),
)
TICKETS_FIELD = Field("u32*", "tickets",
                      "a counter, 0 between launches, from which blocks draw their work; null: each has its own")
LEAST_ALIBI_SCALE = 1e-30  # slopes are divided by the scale, and must stay floats; scores this small are 0 beside any slope

LOG2E = 1.4426950408889634
MAX_FLOAT = 3.4e38  # what a float of Params can hold
ELEMENTS = {"bf16": "bf16", "fp16": "fp16", "fp32": "float"}


class ForwardKernel(Kernel):
    """Base of the forward kernels."""

    aligned: bool  # needs 16-byte aligned bases and strides that are multiples of 16 bytes
    dtypes: tuple[str, ...]
    sources: tuple[str, ...] = ("dense",)  # of keys and values
    draws = False  # whether Params ends with `TICKETS_FIELD`, for plans whose blocks draw their work

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.op != "forward":
            return f"it computes forward problems, not {problem.op}"
        if gpu.arch < self.min_arch:
            return f"it needs compute capability {self.min_arch / 10}, the GPU has {gpu.arch / 10}"
        if problem.dtype not in self.dtypes:
            return f"it computes {', '.join(self.dtypes)}, not {problem.dtype}"
        if problem.kv_dtype != problem.dtype or problem.out_dtype != problem.dtype:
            return "keys, values and output must have the dtype of the queries"
        if problem.kv not in self.sources:
            return f"it reads {' and '.join(self.sources)} keys and values, not {problem.kv} ones"
        return None

    def launch_fields(self, config: Config) -> tuple[Field, ...]:
        """The fields of Params that hold launch parameters; they follow FORWARD_FIELDS."""
        return self.fields[self.fields.index(FORWARD_FIELDS[-1]) + 1:]

    def params(self, static: Static, config: Config) -> tuple[Field, ...]:
        fields = self.fields[:self.fields.index(FORWARD_FIELDS[-1]) + 1] + self.launch_fields(config)
        fields += (Field("float", "softcap_scale", "softmax scale / soft cap"),) if static.softcap else ()
        fields += (ALIBI_FIELDS if static.alibi else ()) + ((TICKETS_FIELD,) if self.draws else ())
        return varlen.documented(fields, static) + varlen.FIELDS[static.kv] if static.packed else fields

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        return varlen.headers(static)

    def space(self, problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
        """Every legal config for `problem` on `gpu`, without those whose blocks own more heads than share keys: rows of theirs
        would be idle."""
        return () if self.reject(problem, gpu) else _sharing(self, problem.static, gpu, 1 << (problem.group - 1).bit_length())

    def arguments(self, problem: Problem, config: Config, scale: float, sink_dtype: int = 0) -> tuple:
        """The scalar fields of Params, in order, for exact (not bucketed) sizes.

        They follow 6 pointers (q, k, v, out, lse, sinks; 0 for none) and 12 strides in elements (q, k, v, out by batch,
        row, head). With ALiBi the fields of `ALIBI_FIELDS` follow them, then the counter of kernels that draw, and for packed
        sequences those of kernels/varlen.py. `scale` multiplies scores and must be above 0.
        """
        return self.bind(problem, config)(problem.batch, problem.seqlen_q, problem.seqlen_k, scale, sink_dtype)[1]

    def bind(self, problem: Problem, config: Config) -> Callable[[int, int, int, float, int], tuple[tuple, tuple]]:
        """A function of (batch, seqlen_q, seqlen_k, scale, sink_dtype) that gives (the grid of each step of `plan`, what
        `arguments` says) for problems with those sizes that are like `problem` otherwise. Of packed sequences the lengths are
        those of all together, and the grid is made for the worst that they can be. A warm call runs it: 0.3 us, where a Problem
        of new sizes, its plan and its arguments take 2 even without validation."""
        heads_q, group, queries, heads = problem.heads_q, problem.group, self.block_queries(config), self.block_heads(config)
        sets = problem.heads_kv * -(-group // heads)
        left = UNBOUNDED if problem.window_left is None else min(problem.window_left, UNBOUNDED)
        right = UNBOUNDED if problem.window_right is None else min(problem.window_right, UNBOUNDED)
        launch_values = tuple(int(config[field.name]) for field in self.launch_fields(config))
        softcap = problem.softcap

        def capped(batch, seqlen_q, seqlen_k, scale, sink_dtype):
            grids, values = bound(batch, seqlen_q, seqlen_k, softcap, sink_dtype)  # the cap is what scales tanh
            return grids, values + (min(scale / softcap, MAX_FLOAT),)

        def bound(batch, seqlen_q, seqlen_k, scale, sink_dtype):
            blocks = -(-seqlen_q // queries) * sets * batch
            return (blocks,), (batch, heads_q, group, seqlen_q, seqlen_k, left, right, sink_dtype, scale * LOG2E) + launch_values

        def floored(batch, seqlen_q, seqlen_k, scale, sink_dtype):
            return bound(batch, seqlen_q, seqlen_k, max(scale, LEAST_ALIBI_SCALE), sink_dtype)

        sized = capped if softcap else floored if problem.alibi else bound

        def spread(batch, seqlen_q, seqlen_k, scale, sink_dtype):
            return (varlen.most_blocks(batch, seqlen_q, queries) * sets,), sized(batch, seqlen_q, seqlen_k, scale, sink_dtype)[1]

        return spread if problem.packed else sized

    def workspace_floats(self, problem: Problem, config: Config) -> int:
        """float32 values of workspace that a launch needs for each query of each batch entry."""
        return 0

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        return 4 * self.workspace_floats(problem, config) * problem.batch * problem.seqlen_q

    def block_queries(self, config: Config) -> int:
        """Consecutive queries that a block owns."""
        raise NotImplementedError

    def block_heads(self, config: Config) -> int:
        """Query heads of one key/value head that a block owns, `block_queries` queries of each."""
        return 1

    def blocks(self, problem: Problem, config: Config) -> int:
        """Blocks of the grid; of packed sequences, those that have work."""
        sets = problem.heads_kv * -(-problem.group // self.block_heads(config))
        queries = self.block_queries(config)
        if problem.packed:
            blocks = sum(-(-length // queries) for length, _ in problem.sequences)
            return blocks * sets * problem.batch // max(len(problem.sequences), 1)
        return -(-problem.seqlen_q // queries) * sets * problem.batch

    def tiles(self, problem: Problem, config: Config) -> float:
        """Key tiles that all blocks load together."""
        sets = problem.heads_kv * -(-problem.group // self.block_heads(config))
        return visited_tiles(problem, self.block_queries(config), config["block_n"]) * sets * problem.batch


@lru_cache(maxsize=4)  # of some ten to a hundred MB
def _sharing(kernel: ForwardKernel, static: Static, gpu: Gpu, most: int) -> tuple[Config, ...]:
    return tuple(config for config in legal_configs(kernel, static, gpu) if kernel.block_heads(config) <= most)


@lru_cache(maxsize=1024)
def visited_tiles(problem: Problem, block_queries: int, block_n: int) -> float:
    """(block of queries, key tile) pairs of one head that a kernel loads, of a sequence on average: visible area plus half a tile
    along each mask edge."""
    window = problem.window_left, problem.window_right
    edges = sum(bound is not None for bound in window)
    total = 0.0
    for queries, keys in problem.sequences:
        rows = math.ceil(queries / block_queries) * block_queries
        area = visible_pairs(queries, keys, *window) * rows / max(queries, 1) + edges * rows * (block_queries + block_n) / 2
        total += min(area, rows * math.ceil(keys / block_n) * block_n)
    return total / max(len(problem.sequences), 1) / (block_queries * block_n)
