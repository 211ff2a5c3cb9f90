"""How arrays lie in memory: the same numbers under other strides, and NaN in every gap that a kernel must not look into.

    checker = Checker(problem, make=laid_out("heads_first"))      # q, k and v
    verdict = checker(written_as("heads_first", run))             # the output
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable

import numpy as np

from .gradients import GradientInputs, Gradients, make_gradient_inputs
from .inputs import Inputs, make_inputs
from .numerics import bits, empty
from ..core.problem import Problem

ALL_ONES = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}  # by bytes of an element; a NaN in every float type
ROWS_AROUND = (3, 70)  # rows of NaN before the first and after the last one: more than half of a kernel's largest tile


@dataclass(frozen=True)
class Form:
    """The axes of a (batch, rows, heads, columns) array in the order of memory, outermost first, and what lies before and after
    each head's columns and each row's heads. `shared`: all batch entries are one (stride 0). `reversed`: rows run backwards."""

    order: tuple[int, int, int, int] = (0, 1, 2, 3)
    heads: tuple[int, int] = (0, 0)
    columns: tuple[int, int] = (0, 0)
    shared: bool = False
    reversed: bool = False

    @property
    def aligned(self) -> bool:
        """Whether bases and strides stay multiples of 16 bytes, where head dims are."""
        return not any(count % 16 for count in self.columns)

    @property
    def mappable(self) -> bool:
        """Whether tensor maps can describe it: strides above 0."""
        return not (self.shared or self.reversed)


PACKED = Form()
HEADS_FIRST = Form(order=(0, 2, 1, 3))  # (batch, heads, rows, columns).transpose(1, 2)
ROWS_FIRST = Form(order=(1, 0, 2, 3))  # (rows, batch, heads, columns)
SLICE = Form(heads=(1, 2))  # of a projection that gives Q, K and V in one array
WIDE_HEADS = Form(columns=(0, 16))  # columns of a wider head
SHARED = Form(shared=True)
REVERSED = Form(reversed=True)
ODD = Form(columns=(1, 2))  # nothing is a multiple of 16 bytes

# name -> the forms of q, k, v and out. Results are never shared or reversed.
FORMS = {
    "packed": (PACKED, PACKED, PACKED, PACKED),
    "heads_first": (HEADS_FIRST, HEADS_FIRST, HEADS_FIRST, HEADS_FIRST),
    "rows_first": (ROWS_FIRST, ROWS_FIRST, ROWS_FIRST, ROWS_FIRST),
    "slices": (SLICE, SLICE, SLICE, SLICE),
    "wide_heads": (WIDE_HEADS, WIDE_HEADS, WIDE_HEADS, WIDE_HEADS),
    "unlike": (SLICE, HEADS_FIRST, PACKED, ROWS_FIRST),
    "shared": (SHARED, SHARED, SHARED, PACKED),
    "reversed": (REVERSED, REVERSED, REVERSED, PACKED),
    "odd": (ODD, ODD, ODD, ODD),
}


class GapWritten(Exception):
    """A kernel wrote between the elements of its output."""


def unreadable(name: str, problem: Problem, kernel) -> str | None:
    """Why `kernel` cannot take arrays of form `name` in place (a call copies them, or runs another kernel), or None."""
    forms = FORMS[name]
    if kernel.aligned and not all(form.aligned for form in forms):
        return "it needs strides that are multiples of 16 bytes"
    if kernel.mapped and not all(form.mappable for form in forms):
        return "tensor maps need strides above 0"
    if problem.kv != "dense" and not all(form.mappable for form in forms):
        return "batch entries of packed and paged keys are no axis of their own"
    return None


def laid_out(name: str) -> Callable[..., Inputs]:
    """`make_inputs` with q, k and v in form `name`."""

    def make(problem: Problem, kind: str, seed: int = 0, xp=np) -> Inputs:
        inputs = make_inputs(problem, kind, seed, xp)
        q, k, v, _ = FORMS[name]
        return replace(inputs, q=_moved(xp, inputs.q, problem.dtype, q), k=_moved(xp, inputs.k, problem.kv_dtype, k),
                       v=_moved(xp, inputs.v, problem.kv_dtype, v))

    return make


def written_as(name: str, run: Callable) -> Callable:
    """``run(inputs, out, lse)``, but the kernel gets an output in form `name`, whose gaps it must leave as they are.

    Raises `GapWritten` if it does not.
    """
    form = FORMS[name][3]
    if form == PACKED:
        return run

    def strided(inputs: Inputs, out, lse) -> None:
        dtype = inputs.problem.out_dtype
        storage, view = _room(inputs.xp, out.shape, dtype, form)
        run(inputs, view, lse)
        _take(out, storage, view, dtype, f"out was written (form {name})")

    return strided


def gradients_laid_out(name: str) -> Callable[..., GradientInputs]:
    """`make_gradient_inputs` with q, k and v in form `name`, dout as q and out as a forward would write it."""

    def make(problem: Problem, kind: str, seed: int = 0, xp=np) -> GradientInputs:
        given = make_gradient_inputs(problem, kind, seed, xp, make=laid_out(name))
        return replace(given, dout=_moved(xp, given.dout, problem.dtype, FORMS[name][0]),
                       out=_moved(xp, given.out, problem.dtype, FORMS[name][3]))

    return make


def gradients_written_as(name: str, run: Callable) -> Callable:
    """`written_as` for ``run(given, gradients, None)``: dq, dk and dv in the forms of q, k and v, where those can be written."""
    forms = [form if form.mappable else PACKED for form in FORMS[name][:3]]
    if all(form == PACKED for form in forms):
        return run

    def strided(given: GradientInputs, gradients: Gradients, _) -> None:
        dtype, xp = given.problem.dtype, given.inputs.xp
        rooms = [_room(xp, array.shape, dtype, form) for array, form in zip(gradients, forms)]
        run(given, Gradients(*(view for _, view in rooms), gradients.dsinks), None)
        for array, (storage, view), of in zip(gradients, rooms, Gradients._fields):
            _take(array, storage, view, dtype, f"{of} was written (form {name})")

    return strided


def _take(array, storage, view, dtype: str, what: str) -> None:
    """Moves what a kernel wrote in `view` to `array`, and looks into the gaps of its storage."""
    word, target = bits(view, dtype), bits(array, dtype)
    target[...] = word
    poison = ALL_ONES[word.itemsize]
    word[...] = poison
    if bool((bits(storage, dtype) != poison).any()):
        raise GapWritten(f"memory between the elements of {what}")


def _moved(xp, array, dtype: str, form: Form):
    """A copy of `array` in `form`; PACKED ones stay where they are."""
    if form == PACKED:
        return array
    if form.shared:
        return xp.broadcast_to(array[:1], array.shape)
    if form.reversed:
        backwards = bits(array, dtype)[:, ::-1].copy()
        return backwards.view(array.dtype)[:, ::-1]
    _, view = _room(xp, array.shape, dtype, form)
    bits(view, dtype)[...] = bits(array, dtype)
    return view


def _room(xp, shape: tuple[int, ...], dtype: str, form: Form) -> tuple:
    """(storage full of NaN, a view of it of this shape and form)"""
    around = ((0, 0), ROWS_AROUND, form.heads, form.columns)
    sizes = [before + size + after for (before, after), size in zip(around, shape)]
    storage = empty(xp, tuple(sizes[axis] for axis in form.order), dtype)
    word = bits(storage, dtype)
    word.fill(ALL_ONES[word.itemsize])
    view = storage.transpose(tuple(form.order.index(axis) for axis in range(4)))
    return storage, view[tuple(slice(before, before + size) for (before, _), size in zip(around, shape))]
