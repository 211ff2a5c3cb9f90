"""What a launch takes: a problem's arrays in the simulator's memory, the bytes of Params, and the grid of each step."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ..calls.binding import bind
from ..check.calls import call_of, parts_of
from ..core.config import Config
from ..core.problem import DTYPE_BYTES, Problem
from ..kernels import kernel_of
from ..kernels.base import Step
from .memory import Memory, tensor_map

RESIDENT_BLOCKS = 2  # blocks of a launch whose blocks draw their work, so that each has several turns
RESULTS = {"backward": ("dq", "dk", "dv", "dsinks")}  # what a launch may write; of other operations out and lse


def arguments(problem: Problem, config: Config, given, results, lse: np.ndarray | None, memory: Memory) -> tuple[Sequence[Step],
                                                                                                                 bytes]:
    """(steps, Params) of a launch on `check.calls.parts_of` these; adds its arrays to `memory`. What is lent is full of NaN."""
    writable = RESULTS.get(problem.op, ("out", "lse"))

    def address(name: str, array: np.ndarray) -> int:
        memory.add(name, array, writable=name in writable)
        return memory.address[name]

    def encode(shape, dtype, pointer, columns, rows, heads, batch, *strides) -> bytes:
        return tensor_map(shape, DTYPE_BYTES[dtype], pointer, (batch, rows, heads, columns), strides)

    call = call_of(problem, *parts_of(problem, given, results, lse), address)
    call.lent, call.counters, call.cluster, call.tickets = (), 0, 1, 0
    sized, pack, _, packer = bind(problem, config, lambda _: RESIDENT_BLOCKS, encode)
    grids = sized(call)
    for name, floats in call.lent:
        # Whole multiples of 16 bytes, as the workspaces of a call are.
        memory.add(name, np.full(floats + -floats % 4, np.nan, np.float32), writable=True)
        setattr(call, name, memory.address[name])
    if call.counters:
        memory.add("tickets", np.zeros(call.counters, np.uint32), writable=True)
        call.tickets = memory.address["tickets"]
    params = bytearray(packer.size)
    pack(call, params)
    steps = kernel_of(config).plan(problem, config)
    clusters = (call.cluster, *(step.cluster for step in steps[1:]))
    return [step._replace(grid=grid, cluster=cluster) for step, grid, cluster in zip(steps, grids, clusters) if grid], \
        bytes(params)
