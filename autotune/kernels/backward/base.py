"""What all backward kernels share: the arguments of a launch and the checks that any of them makes.

A backward gets what the forward had and gave (q, k, v, out, lse), the gradients of its results (dout, and dlse where the lse was
used) and the sinks, and gives dq, dk, dv and dsinks.
"""

from __future__ import annotations

from typing import Callable

from ...core.config import Config
from ...core.problem import Problem, Static
from ..base import WARP_SIZE, Field, Kernel, Resized, Sizer, Step, header_if, mask_fields
from ..forward.base import ALIBI_FIELDS, SIZE_FIELDS, SOFTCAP_FIELD
from ..forward import varlen

INPUTS = ("q", "k", "v", "out", "dout")
GRADIENTS = ("dq", "dk", "dv")
TENSORS = INPUTS + GRADIENTS

BACKWARD_FIELDS = (
    Field("const Element*", "q", "(batch, seqlen_q, heads_q, head_dim)"),
    Field("const Element*", "k", "(batch, seqlen_k, heads_kv, head_dim)"),
    Field("const Element*", "v", "(batch, seqlen_k, heads_kv, head_dim_v)"),
    Field("const Element*", "out", "(batch, seqlen_q, heads_q, head_dim_v)"),
    Field("const Element*", "dout", "as out; strides may be 0"),
    Field("Element*", "dq", "as q"),
    Field("Element*", "dk", "as k"),
    Field("Element*", "dv", "as v"),
    Field("const float*", "lse", "(batch, heads_q, seqlen_q)"),
    Field("const float*", "dlse", "as lse, or null"),
    Field("const void*", "sinks", "(heads_q), or null"),
    Field("void*", "dsinks", "as sinks, or null"),
    Field("float*", "stats", "(batch, heads_q, seqlen_q, 2): of each query, its lse in log2 units and D"),
    Field("float*", "sink_sums", "(heads_q, batch, blocks of 64 queries): parts of dsinks"),
    *(Field("long long", f"{tensor}_{axis}_stride") for tensor in TENSORS for axis in ("batch", "row", "head")),
    *SIZE_FIELDS,
    Field("float", "scale_log2", "what scores, after the soft cap if there is one, are multiplied by for exp2",
          of="(softcap or scale) * LOG2E"),
    Field("float", "scale", "softmax scale, above 0"),
)

ROWS_THREADS = 256  # of a block of backward_rows
ROWS_PER_BLOCK = 64  # queries of a block that computes D, and of a part of the sinks' gradient


class BackwardKernel(Kernel):
    """Base of the backward kernels."""

    op = "backward"
    aligned = True
    sources = ("dense", "varlen")
    fused = False  # whether blocks of keys add to dQ; else blocks of queries own it

    def params(self, static: Static, config: Config) -> tuple[Field, ...]:
        fields = self.fields + mask_fields(static) + ((SOFTCAP_FIELD,) if static.softcap else ())
        fields += ALIBI_FIELDS if static.alibi else ()
        return fields + varlen.FIELDS["varlen"] if static.packed else fields

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        return {"sequence_header": f"lib/sequences/{static.kv}.cuh",
                "sequence_mask_header": f"lib/masks/packed/{static.mask}.cuh",
                "observers_header": f"backward/queries/{static.mask}.cuh", "share_header": f"backward/share/{static.kv}.cuh",
                "rows_steps": f"backward/rows/{static.kv}.cuh.j2",
                "unused_header": header_if(static.packed, "backward/rows/unused.cuh"),
                "fused": self.fused, "clear_header": header_if(self.fused, "backward_wgmma/fused/clear_sums.cuh")}

    def bind(self, problem: Problem, config: Config, resized: Resized | None = None) -> Sizer:
        """Reads `dsinks`, which is 0 if the sinks' gradient is not wanted. Of packed sequences grids are made for the worst that
        lengths on the device can be."""
        grids = self.grids(problem, config)

        def sized(call):
            stats, sums, of_dq = self.workspaces(problem, call.batch, call.seqlen_q)
            sinks, call.sink_sums = bool(call.dsinks), 0
            call.lent = (("stats", stats), *((("sink_sums", sums),) if sinks else ()), *((("dq_sums", of_dq),) if of_dq else ()))
            return grids(call.batch, call.seqlen_q, call.seqlen_k, sinks)

        return sized

    def block_rows(self, config: Config) -> tuple[int, int]:
        """(queries of a block that owns dQ, keys of one that owns dK and dV)."""
        raise NotImplementedError

    def grids(self, problem: Problem, config: Config) -> Callable[[int, int, int, bool], tuple[int, ...]]:
        """The grid of each step of `plan`, 0 for one that is not needed, as a function of (batch, seqlen_q, seqlen_k, sinks)."""
        heads_q, heads_kv, (query_rows, key_rows) = problem.heads_q, problem.heads_kv, self.block_rows(config)

        def dense(batch, seqlen_q, seqlen_k, sinks):
            return (-(-seqlen_q // ROWS_PER_BLOCK) * heads_q * batch, -(-seqlen_k // key_rows) * heads_kv * batch,
                    -(-seqlen_q // query_rows) * heads_q * batch, heads_q if sinks else 0)

        def packed(batch, seqlen_q, seqlen_k, sinks):
            return (-(-seqlen_q // ROWS_PER_BLOCK) * heads_q + -(-seqlen_k // ROWS_PER_BLOCK) * heads_kv,
                    varlen.most_blocks(batch, seqlen_k, key_rows) * heads_kv,
                    varlen.most_blocks(batch, seqlen_q, query_rows) * heads_q, heads_q if sinks else 0)

        return packed if problem.packed else dense

    def typical_grids(self, problem: Problem, config: Config) -> tuple[int, ...]:
        """Those for the sizes of `problem`; of packed sequences, for such as are usual."""
        lengths = problem.seqlen_q, problem.seqlen_k
        if problem.packed:
            count = max(len(problem.sequences), 1)
            lengths = tuple(sum(each[n] for each in problem.sequences) * problem.batch // count for n in (0, 1))
        return self.grids(problem, config)(problem.batch, *lengths, problem.sinks)

    def workspaces(self, problem: Problem, batch: int, seqlen_q: int) -> tuple[int, int, int]:
        """float32 values of `stats`, `sink_sums` and, of kernels that have them, `dq_sums`, for these sizes; of packed sequences
        seqlen_q is of all together."""
        entries = 1 if problem.packed else batch
        return 2 * entries * problem.heads_q * seqlen_q, entries * problem.heads_q * -(-seqlen_q // ROWS_PER_BLOCK), 0

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        return 4 * sum(self.workspaces(problem, problem.batch, problem.seqlen_q * (problem.batch if problem.packed else 1)))


def steps_of(kernel: BackwardKernel, problem: Problem, config: Config, key_threads: int, query_threads: int) -> list[Step]:
    """The launches of kernels that compute dK and dV apart from dQ, with blocks of so many threads."""
    rows, keys, queries, sinks = kernel.typical_grids(problem, config)
    return [Step("backward_rows", rows, ROWS_THREADS, ROWS_THREADS // WARP_SIZE * 4),
            Step("backward_keys", keys, key_threads, config["key_smem_bytes"]),
            Step("backward_queries", queries, query_threads, config["query_smem_bytes"]),
            Step("backward_sinks", sinks, WARP_SIZE, 0)]
