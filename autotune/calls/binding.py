"""From exact sizes and arrays to what a launch takes: the blocks of each step and the fields of Params. `Binding`.

The one place where Params are put together: tensor maps, if the kernel has any, then 6 pointers, 12 strides in elements, and
the scalars, as kernels/forward.py declares them; with ALiBi the slopes' pointer and batch stride; for kernels whose blocks may
draw their work the pointer to a counter; for configs that split keys the pointer to their workspace.
"""

from __future__ import annotations

import math
import struct
from typing import Callable, NamedTuple

from ..core.config import Config
from ..kernels import kernel_of
from ..kernels.base import Kernel, params_format
from ..kernels.forward.base import TENSORS
from ..core.problem import Problem
from ..device.tensormap import encode


class Binding(NamedTuple):
    """`fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes)` gives (blocks of each step, the fields of Params but
    for what is lent, whether blocks draw their work), for `packer` to pack with what is lent behind them.

    `arrays` is 6 pointers (q, k, v, out, lse, sinks), then 12 strides in elements (q, k, v, out by batch, row, head); `slopes` is
    (pointer, batch stride) of the ALiBi slopes, or empty for problems without. Lent are the pointer to a counter that is 0, where
    blocks draw, else `idle`, then the pointer to the workspace if there must be one. Raises `tensormap.Unmappable` for arrays
    that the kernel's maps cannot describe."""

    fields: Callable[[int, int, int, tuple, float, int, tuple], tuple[tuple, tuple, bool]]
    packer: struct.Struct
    idle: tuple  # in place of the counter where none is needed: 0, or nothing for kernels that never draw
    workspace: int  # float32 values of workspace for each query of each batch entry


def bind(problem: Problem, config: Config, sms: int) -> Binding:
    """The binding of `config` for problems like `problem` but for their batch and lengths, on a GPU with `sms` SMs."""
    kernel = kernel_of(config)
    first, *others = [step.blocks_per_sm * sms for step in kernel.plan(problem, config)]
    assert not any(others), f"{kernel.name}: only the blocks of the first step may draw"
    fields = (_mapped if kernel.mapped else _unmapped)(kernel, problem, config, first or math.inf)
    packer = struct.Struct(params_format(kernel.params(problem.static, config)))
    return Binding(fields, packer, (0,) if kernel.draws else (), kernel.workspace_floats(problem, config))


def _unmapped(kernel: Kernel, problem: Problem, config: Config, most: float) -> Callable:
    """The fields of a kernel without maps, with at most `most` blocks, which draw what is beyond that."""
    sized = kernel.bind(problem, config)

    def fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes=()):
        grids, scalars = sized(batch, seqlen_q, seqlen_k, scale, sink_dtype)
        if grids[0] > most:
            return (most, *grids[1:]), arrays + scalars + slopes, True
        return grids, arrays + scalars + slopes, False

    return fields


def _mapped(kernel: Kernel, problem: Problem, config: Config, most: float) -> Callable:
    """The same with a map for each of q, k, v and out. Written out, because every call runs it: 2 us instead of 3."""
    sized, dtype = kernel.bind(problem, config), problem.dtype
    maps = kernel.maps(problem, config)
    assert tuple(shape.tensor for shape in maps) == TENSORS, maps
    q_map, k_map, v_map, out_map = maps
    heads_q, heads_kv, head_dim, head_dim_v = problem.heads_q, problem.heads_kv, problem.head_dim, problem.head_dim_v

    def fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes=()):
        grids, scalars = sized(batch, seqlen_q, seqlen_k, scale, sink_dtype)
        q, k, v, out, _, _, q0, q1, q2, k0, k1, k2, v0, v1, v2, o0, o1, o2 = arrays
        values = (encode(q_map, dtype, q, head_dim, seqlen_q, heads_q, batch, q0, q1, q2),
                  encode(k_map, dtype, k, head_dim, seqlen_k, heads_kv, batch, k0, k1, k2),
                  encode(v_map, dtype, v, head_dim_v, seqlen_k, heads_kv, batch, v0, v1, v2),
                  encode(out_map, dtype, out, head_dim_v, seqlen_q, heads_q, batch, o0, o1, o2)) + arrays + scalars + slopes
        if grids[0] > most:
            return (most, *grids[1:]), values, True
        return grids, values, False

    return fields
