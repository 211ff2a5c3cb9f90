"""Launches of decode kernels: fields of Params, workspace, tickets. What `verify`, the simulator and calls share.

    plan = plans.make(problem, device)                       # a DecodePlan
    plan.run(library, q, Sizes(...), pointers, strides, ...) # one call
"""

from __future__ import annotations

import struct
from typing import Callable, Mapping, Sequence

from ..device import counters, launch
from ..kernels import kernel_of
from ..kernels.base import Step, params_format
from ..kernels.decode.base import DECODE_POINTERS, DECODE_TENSORS, Launches
from ..core.problem import Problem, bucket_batch, bucket_length


def params(launches: Launches, pointers: Mapping[str, int], strides: Mapping[str, Sequence[int]], table_stride: int = 0,
           slopes: tuple = ()) -> tuple:
    """All fields in order. `pointers` by name (absent: none); `strides` of q, k, v and out by (batch or page, row, head), of lse
    by (batch, head), in elements; `slopes` is (pointer, batch stride) of the ALiBi slopes, if there are any."""
    return (*(pointers.get(name, 0) for name in DECODE_POINTERS), *(s for name in DECODE_TENSORS for s in strides[name]),
            *strides["lse"], table_stride, *launches.scalars, *slopes)


def strides_of(layout, arrays: Mapping[str, object]) -> dict[str, Sequence[int]]:
    """For `params`: strides of q, k, v and out, given by name, and of their lse without gaps. By batch packed queries have 0."""
    outer, rows = layout.rows
    strides = {name: [stride // array.itemsize for stride in array.strides[:3]] for name, array in arrays.items()}
    if layout.problem.packed:
        strides["q"][0] = strides["out"][0] = 0
    return {**strides, "lse": (0 if layout.problem.packed else layout.problem.heads_q * rows, rows)}


def workspace(launches: Launches, head_dim_v: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the float32 arrays that a launch needs, empty if it needs none."""
    if not launches.slots:
        return {}
    return {"partial_o": (launches.slots, launches.rows, head_dim_v), "partial_statistics": (launches.slots, launches.rows, 2)}


def key_of(problem: Problem, device: int) -> tuple:
    """The key of a simplified decode problem's bucket. `attention_with_kvcache` writes the same tuple out."""
    p = problem
    return ("decode", device, p.dtype, p.kv_dtype, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v, p.window_left, p.window_right,
            float(p.softcap), p.alibi, p.sinks, p.page_size, bucket_batch(p.batch), p.seqlen_q, bucket_length(p.seqlen_k))


class DecodePlan:
    """A decode kernel, its config and its loaded binary, for every problem of one bucket on one device."""

    __slots__ = ("match", "kernel", "scale", "aligned", "unmapped", "calls", "sized", "_head_dim_v", "_packer", "_main",
                 "_combine", "_main_beside")

    def __init__(self, match, loaded: launch.Loaded):
        problem, config = match.problem, match.config
        self.match, self.kernel = match, kernel_of(config)
        self.scale = problem.head_dim**-0.5
        self.aligned = self.kernel.aligned
        self.calls = 0
        self.unmapped = None
        self.sized = self.kernel.bind(problem, config)
        self._head_dim_v = problem.head_dim_v
        self._packer = struct.Struct(params_format(self.kernel.params(problem.static, config)))
        steps = self.kernel.plan(problem, config)
        self._main, self._combine = _bound(loaded, steps, self.kernel.most_cluster(config))
        self._main_beside, _ = _bound(loaded, [step._replace(dependent=False) for step in steps], 1)

    def run(self, launches: Launches, library, like, device: int, stream: int, capturing: Callable[[int], bool],
            pointers: tuple, strides: tuple, slopes: tuple = (), beside: bool = False) -> None:
        """Launches on `stream`. `beside`: of two launches that begin together this is the one that waits for SMs, so that it does
        not come into place while what ran before them still runs. `pointers` are the first 11 of DECODE_POINTERS, `strides` all
        15 in order, `slopes` is as in `params`. Workspace comes from `library`, for `like`'s device; it may be used again once
        the call has returned, by later work on the stream."""
        partial_o = partial_statistics = tickets = 0
        if launches.slots:
            floats = launches.slots * launches.rows * self._head_dim_v
            space = library.workspace(like, floats + launches.slots * launches.rows * 2, capturing(stream))
            partial_o = library.pointer(space)
            partial_statistics = partial_o + 4 * floats
            if launches.tickets:
                tickets, keep = counters.take(library, like, device, stream, launches.tickets, capturing(stream))
        fields = (*pointers, partial_o, partial_statistics, tickets, *strides, *launches.scalars, *slopes)
        (self._main_beside if beside else self._main)[launches.cluster](launches.grid, stream, self._packer, fields)
        if launches.combine:
            self._combine(launches.combine, stream, self._packer, fields)
        self.calls += 1


def _bound(loaded: launch.Loaded, steps: Sequence[Step], most_cluster: int):
    """(launches of the main step by the size of a cluster, launch of the step that merges splits or None)"""
    main = {size: loaded.bound(steps[0]._replace(cluster=size)).launch for size in range(1, most_cluster + 1)}
    return main, loaded.bound(steps[1]).launch if len(steps) > 1 else None


def runner(problem: Problem, config, binary, device: int) -> Callable:
    """``run(inputs, out, lse)`` on CuPy arrays, on CuPy's current stream, as `verify.runner` has it.

    A paged cache's lengths are always read on the device, a dense one's unless all are full. Where `lse` is asked for, which is
    when results are checked, the workspace is poisoned first and the tickets must come back to 0.
    """
    import cupy

    kernel = kernel_of(config)
    main, combine = _bound(launch.load(binary, device), kernel.plan(problem, config), kernel.most_cluster(config))
    packer = struct.Struct(params_format(kernel.params(problem.static, config)))
    spaces: dict[tuple[bool, int], tuple] = {}

    def space(uniform: bool, scale: float, pages: int):
        if (uniform, pages) not in spaces:
            launches = kernel.launches(problem, config, uniform, scale, scale_strides=(1, 1), pages=pages)
            arrays = {name: cupy.empty(shape, cupy.float32) for name, shape in workspace(launches, problem.head_dim_v).items()}
            tickets = cupy.zeros(max(launches.tickets, 1), cupy.uint32)
            spaces[uniform, pages] = launches, arrays, tickets
        return spaces[uniform, pages]

    def run(inputs, out, lse) -> None:
        layout = inputs.layout
        uniform = layout.table is None and not problem.packed and bool((layout.lengths == problem.seqlen_k).all())
        launches, arrays, tickets = space(uniform, inputs.scale, inputs.k.shape[0])
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}
        pointers = {**tensors, "lse": lse, "sinks": inputs.sinks, "page_table": layout.table,
                    "k_scales": inputs.k_scales, "v_scales": inputs.v_scales, **arrays}
        if not uniform:
            pointers["lengths"] = layout.device_lengths()
        if problem.packed:
            pointers["query_starts"] = layout.device_starts("query")
        if launches.tickets:
            pointers["tickets"] = tickets
        if lse is not None:
            for array in arrays.values():
                array.fill(cupy.nan)
        slopes = () if inputs.alibi_slopes is None else (inputs.alibi_slopes.data.ptr, inputs.slopes_batch_stride)
        fields = params(launches, {name: array.data.ptr for name, array in pointers.items() if array is not None},
                        strides_of(layout, tensors), 0 if layout.table is None else layout.table.strides[0] // 4, slopes)
        stream = cupy.cuda.get_current_stream().ptr
        main[launches.cluster](launches.grid, stream, packer, fields)
        if launches.combine:
            combine(launches.combine, stream, packer, fields)
        if lse is not None and bool(tickets.any()):
            raise launch.LaunchError(f"{config} left tickets that are not 0 behind, so the next launch would be wrong")

    return run
