"""Launches of backward kernels: `BackwardPlan`, the fields of Params, and `differentiate`, the gradients of a call on arrays.

    plan = plans.make(problem, device)                       # of a backward problem
    plan.run(library, like, device, stream, sizes, pointers, strides, scale, sink_dtype, places)
"""

from __future__ import annotations

import struct
from typing import Callable, NamedTuple

from ..core.gpu import detect
from ..core.problem import Problem, bucket_batch, bucket_length
from ..device import arrays, launch
from ..device.tensormap import encode
from ..kernels import kernel_of
from ..kernels.backward.base import TENSORS
from ..kernels.base import params_format


class Mask(NamedTuple):
    """What of a call decides gradients besides its arrays. `left` and `right` are those of the problem, `scale` is above 0."""

    left: int | None
    right: int | None
    softcap: float
    scale: float
    deterministic: bool = False  # the same bits every time


class Packed(NamedTuple):
    """Where sequences begin in packed arrays, (batch + 1,) int32 each, and the longest ones, which only choose the config."""

    cu_seqlens_q: object
    cu_seqlens_k: object
    longest_q: int
    longest_k: int


def key_of(problem: Problem, device: int) -> tuple:
    """The key of a backward problem's bucket. `find` writes the same tuple out, without a Problem."""
    p = problem
    return ("backward", p.kv, device, p.dtype, p.heads_q, p.heads_kv, p.head_dim, p.head_dim_v, p.window_left, p.window_right,
            float(p.softcap), p.alibi, p.sinks, p.deterministic, bucket_batch(p.batch), bucket_length(p.seqlen_q), bucket_length(p.seqlen_k))


class BackwardPlan:
    """A backward kernel, its config and its loaded binary, for every problem of one bucket on one device."""

    __slots__ = ("match", "kernel", "aligned", "unmapped", "calls", "_maps", "_sized", "_packer", "_launches", "_problem")

    def __init__(self, match, loaded: launch.Loaded):
        problem, config = match.problem, match.config
        self.match, self.kernel = match, kernel_of(config)
        self.aligned = self.kernel.aligned
        self.calls = 0
        self.unmapped: BackwardPlan | None = None
        self._sized = self.kernel.bind(problem, config)
        self._packer = struct.Struct(params_format(self.kernel.params(problem.static, config)))
        self._launches = tuple(loaded.bound(step).launch for step in self.kernel.plan(problem, config))
        heads = {"q": problem.heads_q, "dout": problem.heads_q, "k": problem.heads_kv, "v": problem.heads_kv}
        columns = {"q": problem.head_dim, "k": problem.head_dim, "v": problem.head_dim_v, "dout": problem.head_dim_v}
        self._maps = [(shape, problem.dtype, TENSORS.index(shape.tensor), columns[shape.tensor], shape.tensor in ("k", "v"),
                       heads[shape.tensor]) for shape in self.kernel.maps(problem, config)]
        self._problem = problem

    def run(self, library, like, device: int, stream: int, sizes: tuple[int, int, int, int], pointers: tuple, strides: tuple,
            scale: float, sink_dtype: int, places: tuple, lend: Callable | None = None) -> None:
        """Launches on `stream`.

        `sizes` is (batch, seqlen_q, seqlen_k, batch entries of the arrays); of packed sequences the lengths are of all together and
        the arrays have one entry. `pointers` are those of Params up to dsinks, `strides` 24, in elements, and `places` what
        follows the scalars: of ALiBi and of packed sequences. Workspaces come from `library`, or from `lend(floats)`, which
        gives (pointer, what keeps it).
        """
        batch, seqlen_q, seqlen_k, entries = sizes
        sinks = bool(pointers[-1])
        stats, sums, of_dq = (floats + -floats % 4 for floats in self.kernel.workspaces(self._problem, batch, seqlen_q))
        sums = sums if sinks else 0
        floats = stats + sums + of_dq
        if lend is None:
            space = library.workspace(like, floats, arrays.is_capturing(stream))
            pointer = library.pointer(space)
        else:
            pointer, space = lend(floats)
        grids, scalars = self._sized(batch, seqlen_q, seqlen_k, scale, sink_dtype, sinks)
        maps = [encode(shape, dtype, pointers[n], columns, (seqlen_q, seqlen_k)[of_keys], heads, entries, *strides[3 * n:3 * n + 3])
                for shape, dtype, n, columns, of_keys, heads in self._maps]
        values = (*maps, *pointers, pointer, pointer + 4 * stats if sinks else 0, *strides, *scalars, *places,
                  *((pointer + 4 * (stats + sums),) if of_dq else ()))
        for launch_step, grid in zip(self._launches, grids):
            if grid:
                launch_step(grid, stream, self._packer, values)
        self.calls += 1


def runner(problem: Problem, config, binary, device: int) -> Callable:
    """``run(given, gradients, None)`` for `verify` and timing: launches on CuPy's current stream, on a workspace full of NaN."""
    import cupy

    from ..database.lookup import Match

    plan = BackwardPlan(Match(config, "default", "predicted", problem, detect(device)), launch.load(binary, device))
    kept: dict[int, object] = {}

    def lend(floats: int):
        if floats not in kept:
            kept[floats] = cupy.full(floats, cupy.nan, cupy.float32)
        return kept[floats].data.ptr, kept[floats]

    def run(given, gradients, _) -> None:
        inputs = given.inputs
        tensors = (inputs.q, inputs.k, inputs.v, given.out, given.dout, *gradients[:3])
        pointers = tuple(0 if array is None else array.data.ptr
                         for array in (*tensors, given.lse, given.dlse, inputs.sinks, gradients.dsinks))
        strides = tuple(stride // array.itemsize for array in tensors for stride in array.strides[:3])
        places = () if inputs.alibi_slopes is None else (inputs.alibi_slopes.data.ptr, inputs.slopes_batch_stride)
        if problem.packed:
            places += tuple(given.layout.device_starts(name).data.ptr for name in ("query", "key"))
        sizes = problem.batch, inputs.q.shape[1], inputs.k.shape[1], inputs.q.shape[0]
        plan.run(None, None, device, cupy.cuda.get_current_stream().ptr, sizes, pointers, strides, inputs.scale, 0, places, lend)

    return run


def problem_of(dtype: str, q, k, v, mask: Mask, sinks: bool, alibi: bool, packed: Packed | None) -> Problem:
    """The backward problem of a call on arrays of these shapes, simplified."""
    *_, heads_q, head_dim = q.shape
    if packed is None:
        batch, lengths = q.shape[0], (q.shape[1], k.shape[1])
    else:
        batch, lengths = len(packed.cu_seqlens_q) - 1, (packed.longest_q, packed.longest_k)
    return Problem(op="backward", dtype=dtype, batch=batch, heads_q=heads_q, heads_kv=k.shape[-2], seqlen_q=lengths[0],
                   seqlen_k=lengths[1], head_dim=head_dim, head_dim_v=v.shape[-1], window_left=mask.left, window_right=mask.right,
                   softcap=mask.softcap, alibi=alibi, sinks=sinks, kv="dense" if packed is None else "varlen", deterministic=mask.deterministic).simplified()


def differentiate(library, q, k, v, out, lse, dout, dlse, sinks, slopes, mask: Mask, packed: Packed | None,
                  want_sinks: bool) -> tuple:
    """(dq, dk, dv, dsinks or None) of one call of `attention`, or with `packed` of `attention_varlen`.

    q, k, v, sinks and slopes are what the call had, out and lse what it gave; dout is as out, of the dtype of q, dlse as lse in
    float32 or None. What a kernel cannot read in place is copied. `slopes` are float32 with a last stride of 1, or None.
    """
    from . import plans

    batch, queries, keys = (q.shape[0], q.shape[1], k.shape[1]) if packed is None else (1, q.shape[0], k.shape[0])
    device = library.vector(q)[4]
    plan = _plan(plans, library, device, q, k, v, mask, sinks, slopes, packed)
    dq, dk, dv = (library.empty(array, array.shape) for array in (q, k, v))
    dsinks = library.empty(sinks, sinks.shape) if want_sinks else None
    if sinks is not None and library.vector(sinks)[2][0] != 1:
        sinks = library.packed(sinks)
    pointers, strides, kept = [], [], []
    for array in (q, k, v, out, dout, dq, dk, dv):
        pointer, shape, steps, _, _ = library.vector(array)
        if _unreadable(pointer, shape, steps, plan.kernel.mapped):
            array = library.packed(array)
            pointer, shape, steps, _, _ = library.vector(array)
        kept.append(array)
        pointers.append(pointer)
        strides += steps[:3] if packed is None else (0, *steps[:2])
    pointers += [library.pointer(lse), 0 if dlse is None else library.pointer(dlse), 0 if sinks is None else library.pointer(sinks),
                 library.pointer(dsinks) if want_sinks else 0]
    sink_dtype = 0 if sinks is None else library.sink_dtypes[library.vector(sinks)[3]]
    places = ()
    if slopes is not None:
        pointer, shape, steps, _, _ = library.vector(slopes)
        places = pointer, steps[0] if len(shape) == 2 else 0
    if packed is None:
        sizes = batch, queries, keys, batch
    else:
        sizes = len(packed.cu_seqlens_q) - 1, queries, keys, 1
        places += library.pointer(packed.cu_seqlens_q), library.pointer(packed.cu_seqlens_k)
    plan.run(library, q, device, library.stream(device), sizes, tuple(pointers), tuple(strides), mask.scale, sink_dtype, places)
    return dq, dk, dv, dsinks


def _unreadable(pointer: int, shape: tuple, strides: tuple, mapped: bool) -> bool:
    """Whether a kernel cannot read an array in place; one that is `mapped` needs strides above 0. A stride of a size of 1 means
    nothing."""
    if pointer & 15 or strides[-1] != 1 and shape[-1] > 1:
        return True
    return any((stride & 7 or mapped and stride <= 0) and size > 1 for stride, size in zip(strides[:-1], shape))


def _plan(plans, library, device, q, k, v, mask, sinks, slopes, packed) -> BackwardPlan:
    dtype = library.dtypes[library.vector(q)[3]]
    if packed is None:
        kv, batch, queries, keys = "dense", q.shape[0], q.shape[1], k.shape[1]
    else:
        kv, batch, queries, keys = "varlen", len(packed.cu_seqlens_q) - 1, packed.longest_q, packed.longest_k
    key = ("backward", kv, device, dtype, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], mask.left, mask.right,
           float(mask.softcap), slopes is not None, sinks is not None, mask.deterministic, bucket_batch(batch), bucket_length(queries),
           bucket_length(keys))
    plan = plans.find(key)
    if plan is None:
        problem = problem_of(dtype, q, k, v, mask, sinks is not None, slopes is not None, packed)
        plan = plans.make(problem, device, arrays.is_capturing(library.stream(device)))
    return plan
