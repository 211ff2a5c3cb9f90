"""What all forward kernels share: the arguments of a call and the checks that any of them makes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from ...core.config import Config
from ...core.gpu import Gpu
from ...core.problem import Problem, Static
from . import varlen
from ..base import Field, Kernel, Resized, Sizer, mask_fields
from ..space import Space

# Codes of the sink logits' dtype in Params.sink_dtype.
SINK_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float64": 3}

TENSORS = ("q", "k", "v", "out")

SIZE_FIELDS = (  # of backward kernels, too
    Field("int", "batch"),
    Field("int", "heads_q"),
    Field("int", "group", "query heads per key/value head"),
    Field("int", "seqlen_q"),
    Field("int", "seqlen_k"),
    Field("int", "window_left"),
    Field("int", "window_right"),
    Field("int", "sink_dtype"),
)
FORWARD_FIELDS = (
    Field("const Element*", "q", "(batch, seqlen_q, heads_q, head_dim)"),
    Field("const Element*", "k", "(batch, seqlen_k, heads_kv, head_dim)"),
    Field("const Element*", "v", "(batch, seqlen_k, heads_kv, head_dim_v)"),
    Field("Element*", "out", "(batch, seqlen_q, heads_q, head_dim_v)"),
    Field("float*", "lse", "(batch, heads_q, seqlen_q), or null"),
    Field("const void*", "sinks", "(heads_q), or null"),
    *(Field("long long", f"{tensor}_{axis}_stride") for tensor in TENSORS for axis in ("batch", "row", "head")),
    *SIZE_FIELDS,
    Field("float", "scale_log2", "softmax scale * log2(e), above 0"),
)

SOFTCAP_FIELD = Field("float", "softcap_scale", "softmax scale / soft cap", of="min(scale / softcap, MAX_FLOAT)")
ALIBI_FIELDS = (
    Field("const float*", "alibi_slopes", "(heads_q), or (batch, heads_q)"),
    Field("long long", "alibi_batch_stride", "0: the slopes of all batch entries"),
)
TICKETS_FIELD = Field("u32*", "tickets",
                      "a counter, 0 between launches, from which blocks draw their work; null: each has its own")
ELEMENTS = {"bf16": "bf16", "fp16": "fp16", "fp32": "float"}


class ForwardKernel(Kernel):
    """Base of the forward kernels."""

    op = "forward"
    sources = ("dense",)

    def launch_fields(self, config: Config) -> tuple[Field, ...]:
        """The fields of Params that hold launch parameters; they follow FORWARD_FIELDS."""
        return self.fields[self.fields.index(FORWARD_FIELDS[-1]) + 1:]

    def params(self, static: Static, config: Config) -> tuple[Field, ...]:
        fields = self.fields[:self.fields.index(FORWARD_FIELDS[-1])] + (scale_field(static),) + self.launch_fields(config)
        fields += mask_fields(static) + ((SOFTCAP_FIELD,) if static.softcap else ())
        fields += (ALIBI_FIELDS if static.alibi else ()) + ((TICKETS_FIELD,) if self.draws else ())
        return varlen.documented(fields, static) + varlen.FIELDS[static.kv] if static.packed else fields

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        changes = [name for name in ("softcap", "alibi") if getattr(static, name)]
        return {**varlen.headers(static), "score_steps": [f"{self.name}/scores/{name}.cuh.j2" for name in changes]}

    def space(self, problem: Problem, gpu: Gpu) -> Space:
        """Every legal config for `problem` on `gpu`, without those whose blocks own more heads than share keys: rows of theirs
        would be idle."""
        most = 1 << (problem.group - 1).bit_length()
        return super().space(problem, gpu).compiling(lambda config: self.block_heads(config) <= most)

    def bind(self, problem: Problem, config: Config, resized: Resized | None = None) -> Sizer:
        queries, sets = self.block_queries(config), problem.heads_kv * -(-problem.group // self.block_heads(config))

        def blocks(call):
            return (-(-call.seqlen_q // queries) * sets * call.batch,)

        def most(call):  # for the worst that lengths on the device can be
            total = call.seqlen_q
            return (min(total, (total + call.batch * (queries - 1)) // queries) * sets,)

        return most if problem.packed else blocks

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
        if problem.packed:
            return query_blocks(problem, self.block_queries(config)) * sets * problem.batch // max(len(problem.sequences), 1)
        return -(-problem.seqlen_q // self.block_queries(config)) * sets * problem.batch

    def tiles(self, problem: Problem, config: Config) -> float:
        """Key tiles that all blocks load together."""
        sets = problem.heads_kv * -(-problem.group // self.block_heads(config))
        return visited_tiles(problem, self.block_queries(config), config["block_n"]) * sets * problem.batch


def scale_field(static: Static) -> Field:
    """`scale_log2` of these problems: under a soft cap the cap is what scales tanh."""
    of = "softcap * LOG2E" if static.softcap else "max(scale, LEAST_ALIBI_SCALE) * LOG2E" if static.alibi else "scale * LOG2E"
    return replace(FORWARD_FIELDS[-1], of=of)


@lru_cache(maxsize=1024)
def query_blocks(problem: Problem, block_queries: int) -> int:
    """Blocks of so many queries that the sequences of a packed problem have together."""
    return sum(-(-length // block_queries) for length, _ in problem.sequences)


@lru_cache(maxsize=1024)
def visited_tiles(problem: Problem, block_queries: int, block_n: int) -> float:
    """(block of queries, key tile) pairs of one head that a kernel loads, of a sequence on average: visible area plus half a tile
    along each mask edge."""
    bounds = problem.bounds
    total = 0.0
    for queries, keys in problem.sequences:
        rows = math.ceil(queries / block_queries) * block_queries
        area = bounds.visible_pairs(queries, keys) * rows / max(queries, 1) + bounds.edges * rows * (block_queries + block_n) / 2
        total += min(area, rows * math.ceil(keys / block_n) * block_n)
    return total / max(len(problem.sequences), 1) / (block_queries * block_n)
