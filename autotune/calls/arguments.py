"""What the arguments of a call mean, and the sentence to say when they mean nothing.

`attention` tests its arguments in one expression, and comes here when that fails or when it meets something new: `describe`
checks everything again, slowly, and either raises the sentence or returns the `Problem`.
"""

from __future__ import annotations

import math
import operator
import sys
from dataclasses import dataclass
from typing import Callable

from ..device.arrays import OTHER, AttentionError, library_of
from .call import Call
from ..core.masks import MAX_LENGTH, NUMBERS, Bounds
from ..core.problem import Problem

# What reading an array raises that is none, or has no memory of its own.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)

SMALLEST_SCALE = 1.1754943508222875e-38  # kernels need a positive one; scores this small are equal in float32
LARGEST_SCALE = 1e37

_SHAPES = {"q": "(batch, seqlen_q, heads_q, head_dim)", "k": "(batch, seqlen_k, heads_kv, head_dim)",
           "v": "(batch, seqlen_k, heads_kv, head_dim_v)"}


@dataclass(frozen=True)
class Described:
    """A call, understood. `problem` has the exact sizes and is simplified; `empty` calls launch nothing."""

    problem: Problem
    library: object
    device: int
    empty: bool


def describe(q, k, v, bounds: Bounds, softcap, sinks, alibi_slopes, out=None) -> Described:
    """What `attention` was asked for. Raises `AttentionError`, or `ProblemError` for sizes that no problem can have."""
    library = library_of(q)
    if library is OTHER:
        raise AttentionError(f"q is a {type(q).__name__}; it must be an array of CuPy or torch on a CUDA GPU, or of another "
                             "library with __dlpack__")
    read = {name: _read(library, name, array) for name, array in (("q", q), ("k", k), ("v", v))}
    shapes = {name: tuple(values[1]) for name, values in read.items()}
    dtype, device = read["q"][6], read["q"][7]
    for name, values in read.items():
        if values[6] != dtype:
            raise AttentionError(f"{name} is {values[6]} and q is {dtype}; q, k and v must have one dtype")
        if values[7] != device:
            raise AttentionError(f"{name} is on device {values[7]} and q on device {device}; all must be on one GPU")
    if dtype not in library.dtypes:
        raise AttentionError(f"q is {dtype}; allowed are {', '.join(map(str, library.dtypes))}")
    (batch, seqlen_q, heads_q, head_dim), (_, seqlen_k, heads_kv, _), head_dim_v = shapes["q"], shapes["k"], shapes["v"][3]
    for name, wanted in (("k", (batch, seqlen_k, heads_kv, head_dim)), ("v", (batch, seqlen_k, heads_kv, head_dim_v))):
        if shapes[name] != wanted:
            raise AttentionError(f"{name} has shape {shapes[name]}; it must be {_SHAPES[name]}, which is {wanted} "
                                 f"with q {shapes['q']}" + (f" and k {shapes['k']}" if name == "v" else ""))
    if not heads_kv or heads_q % heads_kv:
        raise AttentionError(f"q has {heads_q} heads and k has {heads_kv}; heads_q must be a multiple of heads_kv")
    if sinks is not None:
        check_sinks(library, sinks, heads_q, device)
    if alibi_slopes is not None:
        check_slopes(library, alibi_slopes, batch, heads_q, device)
    if out is not None:
        check_out(library, out, (batch, seqlen_q, heads_q, head_dim_v), dtype, device)
    problem = Problem(dtype=library.dtypes[dtype], batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q,
                      seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, softcap=softcap,
                      alibi=alibi_slopes is not None, sinks=sinks is not None, **bounds._asdict())
    return Described(problem.simplified(), library, device, not (batch and seqlen_q and seqlen_k))


def records(library, *arrays) -> bool:
    """Whether a gradient by one of `arrays` (None: absent) is recorded, backwards or forwards, where recording is on."""
    return library.forward_mode() or any(getattr(array, "requires_grad", False) for array in arrays)


def refuse_grad(library, **arrays) -> None:
    """Raises `AttentionError` if one of `arrays`, by name, wants a gradient. For when gradients are recorded."""
    if library.forward_mode():
        raise AttentionError("attention over a cache has no forward-mode gradient; call outside of "
                             "torch.autograd.forward_ad.dual_level")
    for name, array in arrays.items():
        if getattr(array, "requires_grad", False):
            raise AttentionError(f"{name} requires grad, but attention over a cache has no gradients: call under "
                                 f"torch.no_grad(), or pass {name}.detach()")


def sentence(describe: Callable, error: Exception, *arguments) -> Exception:
    """What `describe` says of the arguments of a call that could not be read because of `error`."""
    try:
        describe(*arguments)
    except ValueError as better:
        return better
    except UNREADABLE as again:  # arrays that have no memory of their own: sparse, nested, transformed ones
        error = again
    return AttentionError(f"q, k or v cannot be read ({type(error).__name__}: {error}); each must be a dense array on a CUDA "
                          "GPU, outside of what traces or transforms it")


def bounds_of(causal: bool, window, *numbers) -> Bounds:
    """What the mask of a call hides. `numbers` are those of its arguments that `masks.NUMBERS` names. Raises `AttentionError`."""
    bounds = Bounds(*window_bounds(window, causal), *[_bound(name, value, 0) for name, value in zip(NUMBERS, numbers)])
    if wrong := bounds.wrong():
        raise AttentionError(wrong)
    return bounds


def window_bounds(window, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) of the mask. With `causal`, right is at most 0, and so 0. Raises `AttentionError`."""
    try:
        left, right = window
    except (TypeError, ValueError):
        raise AttentionError(f"window is {window!r}; it must be a pair (left, right)") from None
    left, right = (None if side is None else _bound(f"the window's {name} side", side, None)
                   for name, side in (("left", left), ("right", right)))
    return left, 0 if causal else right


def _bound(name: str, value, none: int | None) -> int:
    try:
        bound = operator.index(value)
    except TypeError:
        bound = -1
    if bound < 0 or isinstance(value, bool):
        raise AttentionError(f"{name} is {value!r}; it must be an int of at least 0, or {none} for no bound")
    return min(bound, MAX_LENGTH)


def positive_scale(scale) -> tuple[float, bool]:
    """(the scale's size, as kernels need it; whether it is negative). Raises `AttentionError`."""
    value = number(scale)
    if not abs(value) <= LARGEST_SCALE:
        raise AttentionError(f"scale is {scale!r}; it must be a finite number of at most {LARGEST_SCALE:g}, or None for "
                             "1/sqrt(head_dim)")
    return max(abs(value), SMALLEST_SCALE), value < 0


def number(value) -> float:
    """`value` as a float; not a number if it is none, so that whatever range is checked next refuses it. Raises `AttentionError`
    for a tensor whose gradient would be lost."""
    if getattr(value, "requires_grad", False) and ((torch := sys.modules.get("torch")) is None or torch.is_grad_enabled()):
        raise AttentionError("scale, softcap, k_scale and v_scale have no gradients, and one of them requires grad; pass a "
                             "float, or "
                             "its detach()")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: torch, for more than one element
        return math.nan


def integer(name: str, value) -> int:
    """`value` as an int: of numpy or torch it may be, if it is whole. Raises `AttentionError`."""
    try:
        return operator.index(value)
    except TypeError:
        raise AttentionError(f"{name} is {value!r}; it must be an int") from None


def check_sinks(library, sinks, heads_q: int, device: int) -> tuple[int, int, int]:
    """(pointer, stride, dtype code) of the sink logits. Raises `AttentionError` unless they are (heads_q,) of a float dtype."""
    pointer, _, strides, dtype, _ = _check_vector(library, "sinks", sinks, ((heads_q,),), device)
    return pointer, strides[0], library.sink_dtypes[dtype]


def read_sinks(call: Call, sinks):
    """Puts the sink logits in `call`; gives them, or the copy that is read. Raises as `check_sinks` does."""
    library = call.library
    call.sinks, stride, call.sink_dtype = check_sinks(library, sinks, call.heads_q, call.device)
    if stride != 1:
        sinks = library.packed(sinks)
        call.sinks = library.pointer(sinks)
    return sinks


def read_slopes(call: Call, slopes):
    """Puts the ALiBi slopes in `call`; gives them, or the float32 copy that is read. Raises as `check_slopes` does."""
    library = call.library
    call.alibi_slopes, call.alibi_batch_stride, in_place = check_slopes(library, slopes, call.batch, call.heads_q, call.device)
    if not in_place:
        slopes = library.as_float32(slopes)
        call.alibi_slopes, call.alibi_batch_stride, _ = check_slopes(library, slopes, call.batch, call.heads_q, call.device)
    return slopes


def refuse_config(config) -> None:
    """Raises `AttentionError` for a config where torch, not this call, runs the operator."""
    if config is not None:
        raise AttentionError("config must be None while torch traces or autocasts: a registered operator chooses its config "
                             "itself")


def check_slopes(library, slopes, batch: int, heads_q: int, device: int) -> tuple[int, int, bool]:
    """(pointer, batch stride, whether kernels can read them in place) of the ALiBi slopes. Raises `AttentionError` unless they
    are (heads_q,) or (batch, heads_q) of a float dtype."""
    shapes = (heads_q,), (batch, heads_q)
    pointer, shape, strides, dtype, _ = _check_vector(library, "alibi_slopes", slopes, shapes, device)
    in_place = dtype == library.float32 and (strides[-1] == 1 or heads_q == 1)
    return pointer, strides[0] if len(shape) == 2 else 0, in_place


def _check_vector(library, name: str, array, shapes: tuple, device: int) -> tuple:
    if library_of(array) is not library:
        raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of {library.name}, as q is")
    values = library.vector(array)
    if tuple(values[1]) not in shapes:
        raise AttentionError(f"{name} has shape {tuple(values[1])}; it must be {' or '.join(map(str, shapes))}")
    if values[3] not in library.sink_dtypes:
        raise AttentionError(f"{name} is {values[3]}; allowed are {', '.join(map(str, library.sink_dtypes))}")
    if values[4] != device:
        raise AttentionError(f"{name} is on device {values[4]} and q on device {device}; all must be on one GPU")
    return values


def check_out(library, out, shape: tuple, dtype, device: int) -> None:
    """Raises `AttentionError` unless `out` can take the result."""
    values = _read(library, "out", out)
    if tuple(values[1]) != shape or values[6] != dtype or values[7] != device:
        raise AttentionError(f"out has shape {tuple(values[1])}, dtype {values[6]} and device {values[7]}; it must have shape "
                             f"{shape}, dtype {dtype} and device {device}")
    if any(stride == 0 and size > 1 for stride, size in zip(values[2:6], shape)):
        raise AttentionError("out has elements that share memory (a stride of 0); it must have one place for each element")


def _read(library, name: str, array) -> tuple:
    if library_of(array) is not library:
        raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of {library.name}, as q is")
    if len(array.shape) != 4:
        shape = _SHAPES.get(name, "(batch, seqlen_q, heads_q, head_dim_v)")
        raise AttentionError(f"{name} has shape {tuple(array.shape)}; it must be {shape}")
    values = library.read(array)
    if values[7] < 0:
        raise AttentionError(f"{name} is in host memory; it must be on a CUDA GPU")
    return values
