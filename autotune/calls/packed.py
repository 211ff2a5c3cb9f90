"""Launches of forward kernels over packed sequences: fields of Params and tickets. What `verify`, the simulator and calls share.

    plan = plans.make(problem, device)                   # a PackedPlan
    plan.run(library, like, device, stream, arrays.is_capturing, batch, total_q, total_k, arrays, scale, sink_dtype, slopes,
             Lengths(cu_seqlens_q, cu_seqlens_k))        # one call
"""

from __future__ import annotations

import struct
from typing import Callable, NamedTuple

from ..device import launch, counters
from ..kernels import kernel_of
from ..kernels.base import Map, params_format, reciprocal
from ..kernels.forward.base import TENSORS
from ..core.problem import Problem, bucket_batch, bucket_length
from ..device.tensormap import encode


class Lengths(NamedTuple):
    """Where packed queries and keys of each sequence begin: device addresses of (batch + 1,) int32."""

    cu_seqlens_q: int
    cu_seqlens_k: int

    @property
    def fields(self) -> tuple[int, ...]:
        """As Params has them."""
        return self


class Pages(NamedTuple):
    """Where packed queries begin, and which pages have the keys: device addresses of (batch + 1,), (batch,) and (batch, pages of
    a sequence) int32, and the stride between sequences of the latter. Without `cache_seqlens` every sequence is full, without
    `page_table` page n has the keys of sequence n. `pages` is how many there are. Sequences of fewer than `min_queries` queries
    are left alone."""

    cu_seqlens_q: int
    cache_seqlens: int
    page_table: int
    table_stride: int
    pages: int
    min_queries: int = 0

    @property
    def fields(self) -> tuple[int, ...]:
        """As Params has them."""
        return (*self[:4], self.min_queries)


def key_of(problem: Problem, device: int) -> tuple:
    """The key of a packed problem's bucket. `attention_varlen` writes the same tuple out."""
    p = problem
    return (p.kv, device, p.dtype, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v, p.window_left, p.window_right,
            float(p.softcap), p.alibi, p.sinks, p.page_size, bucket_batch(p.batch), bucket_length(p.seqlen_q),
            bucket_length(p.seqlen_k))


class Binding(NamedTuple):
    """`fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes, tickets, sequences)` gives (blocks, the fields of
    Params), for `packer` to pack. seqlen_q is of all sequences together, and so is seqlen_k; in a cache of pages it is how many
    keys a sequence can have. `arrays`, `slopes` and `tickets` are as in `binding.Binding`, with batch strides of 0 or of pages;
    `sequences` is `Lengths` or `Pages`."""

    fields: Callable[..., tuple[int, tuple]]
    packer: struct.Struct
    draws: bool  # whether a launch needs a counter
    idle: tuple  # `tickets` of a launch that needs none


def bind(problem: Problem, config, sms: int) -> Binding:
    """The binding of `config` for packed problems like `problem`, on a GPU with `sms` SMs."""
    kernel = kernel_of(config)
    sized, dtype, page_size = kernel.bind(problem, config), problem.dtype, problem.page_size
    maps = kernel.maps(problem, config)
    described = [_described(shape, problem) for shape in maps]
    (step,) = kernel.plan(problem, config)
    limit = step.blocks_per_sm * sms
    constants = page_constants(problem, maps)

    def fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes, tickets, sequences):
        (grid,), scalars = sized(batch, seqlen_q, seqlen_k, scale, sink_dtype)
        keys = (page_size, sequences.pages) if page_size else (seqlen_k, 1)
        extents = (seqlen_q, 1), keys
        encoded = [encode(shape, dtype, arrays[pointer], columns, extents[of][0], heads, extents[of][1], arrays[stride],
                          arrays[stride + 1], arrays[stride + 2]) for shape, pointer, stride, of, heads, columns in described]
        values = *encoded, *arrays, *scalars, *slopes, *tickets, *sequences.fields, *constants
        return min(grid, limit) if limit else grid, values

    packer = struct.Struct(params_format(kernel.params(problem.static, config)))
    return Binding(fields, packer, limit > 0, (0,) if kernel.draws else ())


def page_constants(problem: Problem, maps: tuple[Map, ...]) -> tuple[int, ...]:
    """The last fields of Params for pages: their size, and rows of a box of the copy engine if the kernel has it; else none."""
    if not problem.page_size:
        return ()
    return (problem.page_size, *reciprocal(problem.page_size), *(shape.rows for shape in maps if shape.tensor == "k"))


class PackedPlan:
    """A forward kernel, its config and its loaded binary, for every packed problem of one bucket on one device."""

    __slots__ = ("match", "kernel", "scale", "aligned", "unmapped", "calls", "_fields", "_packer", "_draws", "_idle", "_launch")

    def __init__(self, match, loaded: launch.Loaded):
        problem, config = match.problem, match.config
        self.match, self.kernel = match, kernel_of(config)
        self.scale = problem.head_dim**-0.5
        self.aligned = self.kernel.aligned
        self.calls = 0
        self.unmapped: PackedPlan | None = None  # what runs instead for arrays that the kernel's tensor maps cannot describe
        self._fields, self._packer, self._draws, self._idle = bind(problem, config, match.gpu.sms)
        (step,) = self.kernel.plan(problem, config)
        self._launch = loaded.bound(step).launch

    def run(self, library, like, device: int, stream: int, capturing: Callable[[int], bool], batch: int, seqlen_q: int,
            seqlen_k: int, arrays: tuple, scale: float, sink_dtype: int, slopes: tuple, sequences: Lengths | Pages) -> None:
        """Launches on `stream`, with the sizes and arrays that `Binding` names. A counter comes from `library`, for `like`'s
        device. Raises `tensormap.Unmappable` for arrays that this plan's kernel cannot take in place; `plans.without_maps` has
        the plan that can."""
        ready = self.ready(library, like, device, stream, capturing, batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes,
                           sequences)
        self.launch(stream, ready)

    def ready(self, library, like, device: int, stream: int, capturing: Callable[[int], bool], batch: int, seqlen_q: int,
              seqlen_k: int, arrays: tuple, scale: float, sink_dtype: int, slopes: tuple, sequences: Lengths | Pages,
              beside: bool = False) -> tuple:
        """What `launch` takes, for a launch on `stream` or, with `beside`, on the one beside it (`fork`): all that is to be
        done on `stream` itself has been enqueued. Raises as `run` does."""
        counter, keep = self._idle, None
        if self._draws:
            pointer, keep = counters.take(library, like, device, stream, 1, capturing(stream), beside)
            counter = (pointer,)
        return *self._fields(batch, seqlen_q, seqlen_k, arrays, scale, sink_dtype, slopes, counter, sequences), keep

    def launch(self, stream: int, ready: tuple) -> None:
        """Launches on `stream` what `ready` gave."""
        grid, values, _ = ready
        if grid:
            self._launch(grid, stream, self._packer, values)
        self.calls += 1


def runner(problem: Problem, config, binary, device: int) -> Callable:
    """``run(inputs, out, lse)`` on CuPy arrays, on CuPy's current stream, as `verify.runner` has it. Where `lse` is asked for,
    which is when results are checked, the counter must come back to 0."""
    import cupy

    from ..core.gpu import detect

    kernel = kernel_of(config)
    (step,) = kernel.plan(problem, config)
    launch_step = launch.load(binary, device).bound(step).launch
    fields, packer, draws, idle = bind(problem, config, detect(device).sms)
    counter = cupy.zeros(1, cupy.uint32)

    def run(inputs, out, lse) -> None:
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out, "lse": lse, "sinks": inputs.sinks}
        addresses = {name: 0 if array is None else array.data.ptr for name, array in arrays.items()}
        strides = {name: [stride // array.itemsize for stride in array.strides[:3]] for name, array in arrays.items()
                   if name in TENSORS}
        slopes = () if inputs.alibi_slopes is None else (inputs.alibi_slopes.data.ptr, inputs.slopes_batch_stride)
        grid, values = fields(*sizes_of(inputs), arrays_of(addresses, strides), inputs.scale, 0, slopes,
                              (counter.data.ptr,) if draws else idle, sequences_of(inputs.layout, lambda array: array.data.ptr))
        launch_step(grid, cupy.cuda.get_current_stream().ptr, packer, values)
        if lse is not None and int(counter[0]):
            raise launch.LaunchError(f"{config} left its counter at {int(counter[0])}, not 0, so the next launch would be wrong")

    return run


def sizes_of(inputs) -> tuple[int, int, int]:
    """(sequences, queries of all, keys of all or in a cache of pages of each at the most) of an `Inputs`."""
    layout, problem = inputs.layout, inputs.problem
    keys = problem.seqlen_k if layout.table is not None else int(layout.key_starts[-1])
    return problem.batch, int(layout.query_starts[-1]), keys


def arrays_of(addresses: dict[str, int], strides: dict[str, list[int]]) -> tuple:
    """6 pointers and 12 strides, as `binding.Binding` has them."""
    return (*(addresses[name] for name in (*TENSORS, "lse", "sinks")), *(stride for name in TENSORS for stride in strides[name]))


def sequences_of(layout, address: Callable[[object], int]) -> Lengths | Pages:
    """The `Lengths` or `Pages` of a `Layout`; `address` gives that of an array."""
    starts = address(layout.device_starts("query"))
    if layout.table is None:
        return Lengths(starts, address(layout.device_starts("key")))
    return Pages(starts, address(layout.device_lengths()), address(layout.table), layout.table.shape[1],
                 layout.shape(1, 1)[0])


def _described(shape: Map, problem: Problem) -> tuple[Map, int, int, int, int, int]:
    """(map, where its tensor's pointer and first stride stand in `arrays`, 0 or 1 for the length of q or k, heads, columns)"""
    n = TENSORS.index(shape.tensor)
    of_keys = shape.tensor in ("k", "v")
    columns = problem.head_dim_v if shape.tensor in ("v", "out") else problem.head_dim
    return shape, n, 6 + 3 * n, int(of_keys), problem.heads_kv if of_keys else problem.heads_q, columns
