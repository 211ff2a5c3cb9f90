"""What a launch takes: a problem's arrays in the simulator's memory, the bytes of Params, and the grid of each step."""

from __future__ import annotations

import struct
from typing import Sequence

import numpy as np

from ..calls import decoding, packed
from ..core.config import Config
from ..check.inputs import Inputs
from ..kernels import kernel_of
from ..kernels.backward.base import BackwardKernel
from ..kernels.base import Step, params_format
from ..kernels.decode.base import DecodeKernel
from ..kernels.forward.base import SINK_DTYPES, TENSORS, ForwardKernel
from ..core.problem import Problem
from .gradients import gradient_arguments
from .memory import Memory, tensor_map

RESIDENT_BLOCKS = 2  # blocks of a launch whose blocks draw their work, so that each has several turns


def arguments(problem: Problem, config: Config, inputs: Inputs, out: np.ndarray, lse: np.ndarray | None,
              memory: Memory) -> tuple[Sequence[Step], bytes]:
    """(steps, Params) of a call; adds its arrays to `memory`."""
    kernel = kernel_of(config)
    if isinstance(kernel, BackwardKernel):
        return gradient_arguments(kernel, problem, config, inputs, out, memory)
    for name, array in {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "lse": lse, "sinks": inputs.sinks}.items():
        if array is not None:
            memory.add(name, array, writable=name in ("out", "lse"))
    if inputs.alibi_slopes is not None:
        memory.add("alibi_slopes", inputs.alibi_slopes, writable=False)
    strides = {name: [stride // array.itemsize for stride in array.strides[:3]]
               for name, array in {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}.items()}
    make = _decode if isinstance(kernel, DecodeKernel) else _forward
    steps, fields = make(kernel, problem, config, inputs, out, strides, memory)
    return steps, struct.pack(params_format(kernel.params(problem.static, config)), *fields)


def _forward(kernel: ForwardKernel, problem: Problem, config: Config, inputs: Inputs, out, strides, memory: Memory):
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}
    maps = [tensor_map(shape, arrays[shape.tensor], memory.address[shape.tensor]) for shape in kernel.maps(problem, config)]
    pointers = [memory.address.get(name, 0) for name in (*TENSORS, "lse", "sinks")]
    sizes = packed.sizes_of(inputs) if problem.packed else (problem.batch, problem.seqlen_q, problem.seqlen_k)
    grids, scalars = kernel.bind(problem, config)(*sizes, inputs.scale, _sink_dtype(inputs))
    steps = [step._replace(grid=min(grid, RESIDENT_BLOCKS) if step.blocks_per_sm else grid)
             for step, grid in zip(kernel.plan(problem, config), grids)]
    if any(step.blocks_per_sm for step in steps):
        memory.add("tickets", np.zeros(1, np.uint32), writable=True)
    lent = (memory.address.get("tickets", 0),) if kernel.draws else ()
    if floats := kernel.workspace_bytes(problem, config) // 4:
        whole = -(-floats // 4) * 4  # so that it begins at a multiple of 16 bytes, as every library's arrays do
        memory.add("workspace", np.full(whole, np.nan, np.float32), writable=True)
        lent += memory.address["workspace"],
    places = ()
    if problem.packed:
        places = (*_sequences(inputs, memory).fields, *packed.page_constants(problem, kernel.maps(problem, config)))
    return steps, (*maps, *pointers, *(stride for name in TENSORS for stride in strides[name]), *scalars,
                   *_slopes(inputs, memory), *lent, *places)


def _sequences(inputs: Inputs, memory: Memory) -> packed.Lengths | packed.Pages:
    def address(array: np.ndarray) -> int:
        name = f"integers {len(memory.arrays)}"
        memory.add(name, array, writable=False)
        return memory.address[name]

    return packed.sequences_of(inputs.layout, address)


def _decode(kernel: DecodeKernel, problem: Problem, config: Config, inputs: Inputs, out, strides, memory: Memory):
    layout = inputs.layout
    uniform = layout.table is None and not problem.packed and bool((layout.lengths == problem.seqlen_k).all())
    launches = kernel.bind(problem, config)(problem.batch, problem.seqlen_q, problem.seqlen_k, uniform, inputs.scale,
                                            _sink_dtype(inputs), 0, problem.page_size, (1, 1), pages=inputs.k.shape[0])
    if not uniform:
        memory.add("lengths", layout.device_lengths(), writable=False)
    if problem.packed:
        memory.add("query_starts", layout.device_starts("query"), writable=False)
    for name, array in {"page_table": layout.table, "k_scales": inputs.k_scales, "v_scales": inputs.v_scales}.items():
        if array is not None:
            memory.add(name, array, writable=False)
    for name, shape in decoding.workspace(launches, problem.head_dim_v).items():
        memory.add(name, np.full(shape, np.nan, np.float32), writable=True)
    if launches.tickets:
        memory.add("tickets", np.zeros(launches.tickets, np.uint32), writable=True)
    table_stride = 0 if layout.table is None else layout.table.shape[1]
    strides = decoding.strides_of(layout, {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out})
    fields = decoding.params(launches, memory.address, strides, table_stride, _slopes(inputs, memory))
    grids, clusters = (launches.grid, launches.combine), (launches.cluster, 1)
    return [step._replace(grid=grid, cluster=cluster)
            for step, grid, cluster in zip(kernel.plan(problem, config), grids, clusters) if grid], fields


def _slopes(inputs: Inputs, memory: Memory) -> tuple[int, ...]:
    if inputs.alibi_slopes is None:
        return ()
    return memory.address["alibi_slopes"], inputs.slopes_batch_stride


def _sink_dtype(inputs: Inputs) -> int:
    return 0 if inputs.sinks is None else SINK_DTYPES[inputs.sinks.dtype.name]
