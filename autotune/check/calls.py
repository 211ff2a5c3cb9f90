"""The `Call` of a problem's inputs, for `verify`, timing and the simulator."""

from __future__ import annotations

from typing import Callable, Mapping

from ..calls.call import Call
from ..core.problem import Problem
from ..kernels.forward.base import SINK_DTYPES
from .inputs import Inputs


def call_of(problem: Problem, inputs: Inputs, arrays: Mapping[str, object], address: Callable[[str, object], int]) -> Call:
    """The call of `problem` on `inputs` and further `arrays`, given by the name of their field (None: absent): results, and what
    a backward is given. `address` gives that of an array, by its name.

    The lengths of a paged cache are always read on the device, those of a dense one unless all are full.
    """
    layout, call = inputs.layout, Call.of(problem, 0)
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **arrays}
    others = {"sinks": inputs.sinks, "alibi_slopes": inputs.alibi_slopes, "page_table": layout.table, "k_scales": inputs.k_scales,
              "v_scales": inputs.v_scales}
    call.uniform = layout.table is None and not problem.packed and bool((layout.lengths == problem.seqlen_k).all())
    if problem.packed:
        others["cu_seqlens_q"] = layout.device_starts("query")
        if problem.kv == "varlen":
            others["cu_seqlens_k"] = layout.device_starts("key")
    if problem.op == "decode" and not call.uniform or problem.kv == "paged":
        others["cache_seqlens"] = layout.device_lengths()
    for name in ("cache_seqlens", "cu_seqlens_q", "dlse", "dsinks", "lse"):
        setattr(call, name, 0)
    for name, array in {**tensors, **others}.items():
        setattr(call, name, 0 if array is None else address(name, array))
        if f"{name}_row_stride" in Call.__slots__:
            call.set_strides(name, *(stride // array.itemsize for stride in array.strides[:3]))
    outer, rows = layout.rows
    call.batch, call.seqlen_q, call.seqlen_k = problem.batch, problem.seqlen_q, problem.seqlen_k
    call.lse_batch_stride, call.lse_head_stride = problem.heads_q * rows, rows
    if problem.packed:
        call.q_batch_stride = call.out_batch_stride = call.lse_batch_stride = 0
        if problem.op != "decode":
            call.seqlen_q = rows
            call.seqlen_k = int(layout.key_starts[-1]) if problem.kv == "varlen" else problem.seqlen_k
    call.scale, call.k_scale, call.v_scale = inputs.scale, 1.0, 1.0
    call.k_scale_stride = call.v_scale_stride = 1
    call.sink_dtype = 0 if inputs.sinks is None else SINK_DTYPES[inputs.sinks.dtype.name]
    call.alibi_batch_stride = 0 if inputs.alibi_slopes is None else inputs.slopes_batch_stride
    call.page_table_stride = 0 if layout.table is None else layout.table.shape[1]
    call.pages, call.min_queries, call.num_splits = inputs.k.shape[0], layout.min_queries, 0
    return call


def parts_of(problem: Problem, given, results, lse) -> tuple[Inputs, dict[str, object]]:
    """(inputs, further arrays) for `call_of`, of what a launch is given and what it writes: `Inputs`, out and lse, or of a
    backward `GradientInputs` and `Gradients`."""
    if problem.op != "backward":
        return given, {"out": results, "lse": lse}
    arrays = {"out": given.out, "dout": given.dout, "lse": given.lse, "dlse": given.dlse}
    return given.inputs, {**arrays, **{name: getattr(results, name) for name in ("dq", "dk", "dv", "dsinks")}}
