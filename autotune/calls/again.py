"""Calls of `attention` and `attention_with_kvcache` that are like an earlier one in all but addresses, as those of a model's
layers and steps are: the `Call` of that one gets their addresses and is launched again.

What was checked, found and computed for the earlier one follows from numbers and from the arrays' forms (shapes, strides, dtypes,
devices), so it holds for all calls that have the same.
"""

from __future__ import annotations

from .arguments import UNREADABLE
from .call import Call
from .plans import repeatable

MAX_FORMS = 4096
COUNTS = type(None), int  # types of numbers that mean the same where they are equal: neither True nor 1.0 is a count
NUMBERS = type(None), float, int

_seen: set[int] = set()  # hashes of forms


class Repeatable:
    """A call that was launched, and the shape and strides of its output. Whoever takes it out of `repeatable` may launch it."""

    __slots__ = ("call", "shape", "strides")

    def __init__(self, call: Call, shape: tuple, strides: tuple):
        self.call, self.shape, self.strides = call, shape, strides


def launch(library, op: str, q, k_cache, v_cache, lengths, table, starts, out, longest_q: int | None, longest_k, causal, scale,
           softcap) -> tuple:
    """(what the call has in common with those that are like it, its output if it was launched as one of these). The output is
    None where the call has to be looked at, the form is None if it is not to be kept either."""
    if not (type(longest_k) in COUNTS and type(causal) is bool and type(scale) in NUMBERS and type(softcap) in NUMBERS):
        return None, None
    form_of = library.form
    try:
        form = (op, library.forms(q, k_cache, v_cache), None if lengths is None else form_of(lengths),
                None if table is None else form_of(table), None if starts is None else form_of(starts),
                None if out is None else form_of(out), longest_q, longest_k, causal, scale, softcap)
        waiting = repeatable.get(form)
        if not waiting or library.grad_enabled() and (
                q.requires_grad or k_cache.requires_grad or v_cache.requires_grad or out is not None and out.requires_grad
                or library.forward_mode()):
            return form, None
        pointer = library.pointer
        at_q, at_k, at_v, at_out = pointer(q), pointer(k_cache), pointer(v_cache), 0 if out is None else pointer(out)
    except UNREADABLE:
        return None, None
    if (at_q | at_k | at_v | at_out) & 15:
        return form, None
    try:
        again = waiting.pop()
    except IndexError:  # another thread has it
        return form, None
    call = again.call
    call.q, call.k, call.v, call.like = at_q, at_k, at_v, q
    if lengths is not None:
        call.cache_seqlens = pointer(lengths)
    if table is not None:
        call.page_table = pointer(table)
    if starts is not None:
        call.cu_seqlens_q = pointer(starts)
    if out is None:
        out = library.dense(q, call.device, again.shape, again.strides)
        at_out = pointer(out)
    call.out, call.stream = at_out, library.stream(call.device)
    call.plan.repeat(call)
    call.like = call.keep = call.keep_tickets = None
    waiting.append(again)
    return form, out


def keep(form: tuple, call: Call, q, k_cache, v_cache, lengths, table, starts, result) -> None:
    """Keeps a call that one plan has served alone, unless something had to be copied, if there was one like it before: sizes that
    come once cost a look-up."""
    mark = hash(form)
    if call.plan is None or mark not in _seen:
        if len(_seen) >= MAX_FORMS:
            _seen.clear()
        _seen.add(mark)
        return
    library = call.library
    given = [(call.q, q), (call.k, k_cache), (call.v, v_cache), (call.out, result)]
    if call.op == "decode":
        given += (call.cache_seqlens, lengths), (call.page_table, table), (call.cu_seqlens_q, starts)
    if any(address != (0 if array is None else library.pointer(array)) for address, array in given):
        return
    if len(repeatable) >= MAX_FORMS:
        repeatable.clear()
    call.like = call.keep = call.keep_tickets = None
    _, shape, strides, _, _ = library.vector(result)
    repeatable.setdefault(form, []).append(Repeatable(call, tuple(shape), tuple(strides)))
