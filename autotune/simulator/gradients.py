"""What a backward's launches take: the arrays in the simulator's memory, the bytes of Params, and the grid of each step."""

from __future__ import annotations

import struct
from typing import Sequence

import numpy as np

from ..check.gradients import GradientInputs, Gradients
from ..core.config import Config
from ..core.problem import Problem
from ..kernels.backward.base import GRADIENTS, TENSORS, BackwardKernel
from ..kernels.base import Step, params_format
from ..kernels.forward.base import SINK_DTYPES
from .memory import Memory, tensor_map


def gradient_arguments(kernel: BackwardKernel, problem: Problem, config: Config, given: GradientInputs, gradients: Gradients,
                       memory: Memory) -> tuple[Sequence[Step], bytes]:
    """(steps, Params) of a backward; adds its arrays to `memory`. Workspaces are full of NaN."""
    inputs, layout = given.inputs, given.layout
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": given.out, "dout": given.dout,
               **{name: getattr(gradients, name) for name in GRADIENTS}}
    others = {"lse": given.lse, "dlse": given.dlse, "sinks": inputs.sinks, "dsinks": gradients.dsinks}
    sizes = (problem.batch, *((inputs.q.shape[1], inputs.k.shape[1]) if problem.packed else (problem.seqlen_q, problem.seqlen_k)))
    spaces = dict(zip(("stats", "sink_sums", "dq_sums"), kernel.workspaces(problem, problem.batch, given.out.shape[1])))
    for name in ("stats", "sink_sums"):
        others[name] = np.full(max(spaces[name], 1), np.nan, np.float32)
    for name, array in {**tensors, **others}.items():
        if array is not None:
            memory.add(name, array, writable=name in (*GRADIENTS, "dsinks", *spaces))
    strides = [stride // tensors[name].itemsize for name in TENSORS for stride in tensors[name].strides[:3]]
    sink_dtype = 0 if inputs.sinks is None else SINK_DTYPES[inputs.sinks.dtype.name]
    grids, scalars = kernel.bind(problem, config)(*sizes, inputs.scale, sink_dtype, inputs.sinks is not None)
    places: tuple[int, ...] = ()
    if inputs.alibi_slopes is not None:
        memory.add("alibi_slopes", inputs.alibi_slopes, writable=False)
        places = memory.address["alibi_slopes"], inputs.slopes_batch_stride
    for name in ("query", "key") if problem.packed else ():
        memory.add(f"{name}_starts", layout.device_starts(name), writable=False)
        places += memory.address[f"{name}_starts"],
    if spaces["dq_sums"]:
        memory.add("dq_sums", np.full(spaces["dq_sums"], np.nan, np.float32), writable=True)
        places += memory.address["dq_sums"],
    maps = [tensor_map(shape, tensors[shape.tensor], memory.address[shape.tensor]) for shape in kernel.maps(problem, config)]
    pointers = [memory.address.get(name, 0) for name in (*TENSORS, *others)]
    steps = [step._replace(grid=grid) for step, grid in zip(kernel.plan(problem, config), grids) if grid]
    return steps, struct.pack(params_format(kernel.params(problem.static, config)), *maps, *pointers, *strides, *scalars,
                              *places)
