"""From exact sizes and arrays to what a launch takes: the blocks of each step and the fields of Params. `Binding`.

The one place where Params are put together: tensor maps, if the kernel has any, then 6 pointers, 12 strides in elements, and
the scalars, as kernels/forward.py declares them; with ALiBi the slopes' pointer and batch stride; for kernels whose blocks may
draw their work the pointer to a counter; for configs that split keys the pointer to their workspace.
"""

from __future__ import annotations

import struct
from typing import Callable, NamedTuple

from .config import Config
from .kernels import kernel_of
from .kernels.base import Kernel, Map, params_format
from .kernels.forward import TENSORS
from .problem import Problem
from .tensormap import encode


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
    fields = _mapped(kernel, problem, config) if kernel.mapped else _unmapped(kernel, problem, config)
    limits = [step.blocks_per_sm * sms for step in kernel.plan(problem, config)]
    packer = struct.Struct(params_format(kernel.params(problem.static, config)))
    return Binding(_limited(fields, limits) if any(limits) else fields, packer, (0,) if kernel.draws else (),
                   kernel.workspace_floats(problem, config))


def _unmapped(kernel: Kernel, problem: Problem, config: Config) -> Callable:
    sized = kernel.bind(problem, config)

    def fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes=()):
        grids, scalars = sized(batch, seqlen_q, seqlen_k, scale, sink_dtype)
        return grids, arrays + scalars + slopes, False

    return fields


def _mapped(kernel: Kernel, problem: Problem, config: Config) -> Callable:
    sized, dtype = kernel.bind(problem, config), problem.dtype
    described = [describe(shape, problem) for shape in kernel.maps(problem, config)]

    def fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes=()):
        grids, scalars = sized(batch, seqlen_q, seqlen_k, scale, sink_dtype)
        lengths = seqlen_q, seqlen_k
        maps = [encode(shape, dtype, arrays[pointer], columns, lengths[length], heads, batch, arrays[stride], arrays[stride + 1],
                       arrays[stride + 2]) for shape, pointer, stride, length, heads, columns in described]
        return grids, (*maps, *arrays, *scalars, *slopes), False

    return fields


def describe(shape: Map, problem: Problem) -> tuple[Map, int, int, int, int, int]:
    """(map, where its tensor's pointer and first stride stand in `arrays`, 0 or 1 for the length of q or k, heads, columns)"""
    n = TENSORS.index(shape.tensor)
    of_keys = shape.tensor in ("k", "v")
    columns = problem.head_dim_v if shape.tensor in ("v", "out") else problem.head_dim
    return shape, n, 6 + 3 * n, int(of_keys), problem.heads_kv if of_keys else problem.heads_q, columns


def _limited(fields: Callable, limits: list[int]) -> Callable:
    """`fields` with at most `limits` blocks for each step, which draw what is beyond that; 0: no limit."""

    def limited(*arguments):
        grids, values, _ = fields(*arguments)
        fewer = tuple(min(grid, limit) if limit else grid for grid, limit in zip(grids, limits))
        return fewer, values, fewer != grids

    return limited
