"""Are gradients correct? `GradientChecker`, for backward problems what `verdict.Checker` is for forward ones."""

from __future__ import annotations

from typing import Callable, Iterable

import numpy as np

from ..core.problem import Problem
from .gradients import ExpectedGradients, GradientInputs, Gradients, expect_gradients, make_gradient_inputs, of_unit, units
from .inputs import KINDS, ROWS
from .numerics import EXPONENT_BITS, bits, host, to_float32
from .verdict import POISON_BYTE, Guarded, OfAllKinds, Verdict

SAMPLED_FLOPS = 4e11  # of the units that are checked where only some are: a second of an H200's float64


class GradientChecker(OfAllKinds):
    """Inputs, references and poisoned results of one backward problem, made at first use and kept for every candidate after.

    A call takes `run(given, gradients, None)`, which launches on xp's current stream, and gives the verdict over all kinds; it
    stops at the first wrong one. With a `sample` only some of (sequence, key/value head) are compared, but all must be finite.
    """

    def __init__(self, problem: Problem, kinds: Iterable[str] | None = None, seed: int = 0, xp=np, sample: int | None = None,
                 make: Callable[..., GradientInputs] = make_gradient_inputs):
        self.problem, self.seed, self.xp, self.sample, self._make = problem, seed, xp, sample, make
        self.kinds = tuple(KINDS if kinds is None else kinds)
        self._cases: dict[str, tuple[GradientInputs, list[ExpectedGradients]]] = {}

    def check_kind(self, run: Callable, kind: str) -> Verdict:
        """The verdict on one kind of inputs."""
        given, expected = self.case(kind)
        guarded = self._outputs(given)
        gradients = Gradients(*(None if output is None else output.array for output in guarded))
        run(given, gradients, None)
        for name, output in zip(Gradients._fields, guarded):
            if output is not None and (where := output.damage()):
                return Verdict(False, float("inf"), f"{kind} inputs: memory outside {name} was written, {where}")
        return compare_gradients(given, gradients, expected)

    def case(self, kind: str) -> tuple[GradientInputs, list[ExpectedGradients]]:
        """(inputs, what is expected) of one kind, kept."""
        if kind not in self._cases:
            given = self._make(self.problem, kind, self.seed, self.xp)
            chosen = units(given.inputs, None if self.sample is None else SAMPLED_FLOPS, self.seed)
            self._cases[kind] = given, [expect_gradients(given, *unit) for unit in chosen]
        return self._cases[kind]

    def _outputs(self, given: GradientInputs) -> tuple[Guarded | None, ...]:
        i, dtype = given.inputs, self.problem.dtype
        outputs = tuple(Guarded(self.xp, array.shape, dtype) for array in (i.q, i.k, i.v))
        return *outputs, None if i.sinks is None else Guarded(self.xp, i.sinks.shape, "fp32")


def compare_gradients(given: GradientInputs, gradients: Gradients, expected: Iterable[ExpectedGradients]) -> Verdict:
    """Judges gradients: all must be numbers, and those that are `expected` must be right."""
    dtype, kind = given.problem.dtype, given.inputs.kind
    for name, array in zip(Gradients._fields, gradients):
        if array is not None and (message := _not_finite(name, array, "fp32" if name == "dsinks" else dtype)):
            return Verdict(False, float("inf"), f"{kind} inputs: {message}")
    expected, worst = list(expected), 0.0
    for each in expected:
        for name in ("dq", "dk", "dv"):
            verdict = _judge(given, name, getattr(gradients, name), each)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict.worst_ratio)
    for head_kv in range(given.problem.heads_kv) if gradients.dsinks is not None else ():
        verdict = _judge_sinks(given, gradients.dsinks, head_kv, [each for each in expected if each.head_kv == head_kv])
        if not verdict.ok:
            return verdict
        worst = max(worst, verdict.worst_ratio)
    return Verdict(True, worst)


def _not_finite(name: str, array, dtype: str) -> str | None:
    mask, words = EXPONENT_BITS[dtype], bits(array, dtype)
    bad = (words & mask) == mask
    if not words.size or not bool(bad.any()):
        return None
    place = tuple(int(x) for x in np.argwhere(host(bad))[0])
    poison = POISON_BYTE * (0x01010101 if dtype == "fp32" else 0x0101)
    what = "was never written" if int(host(words)[place]) == poison else "is not finite"
    return f"{name} {what} at {place} ({int(bad.sum())} of {words.size} elements are bad)"


def _judge(given: GradientInputs, name: str, array, expected: ExpectedGradients) -> Verdict:
    problem, xp = given.problem, given.inputs.xp
    values, allowed = expected.gradients[name]
    group = problem.group
    heads = slice(expected.head_kv, expected.head_kv + 1) if name in ("dk", "dv") else \
        slice(expected.head_kv * group, (expected.head_kv + 1) * group)
    words = xp.ascontiguousarray(of_unit(given.layout, bits(array, problem.dtype), expected.sequence, heads, name != "dq"))
    got = to_float32(words.view(array.dtype), problem.dtype).astype(np.float64)
    error = host(xp.abs(got - values).max(-1)) if values.size else np.zeros(values.shape[:2])
    padded = np.zeros((error.shape[0], allowed.shape[1] * ROWS))
    padded[:, :error.shape[1]] = error
    ratios = padded.reshape(error.shape[0], -1, ROWS).max(-1) / allowed
    if not ratios.size or ratios.max() <= 1:
        return Verdict(True, float(ratios.max()) if ratios.size else 0.0)
    at = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    place = f"head {heads.start + int(at[0])}, rows from {int(at[1]) * ROWS} on"
    return Verdict(False, float(ratios.max()),
                   f"{name} is wrong in sequence {expected.sequence}, {place} ({given.inputs.kind} inputs, seed "
                   f"{given.inputs.seed}): error {ratios.max():.3g} times what is allowed; {int((ratios > 1).sum())} of "
                   f"{ratios.size} checked blocks are wrong")


def _judge_sinks(given: GradientInputs, dsinks, head_kv: int, expected: list[ExpectedGradients]) -> Verdict:
    """Of the heads of one key/value head, whose sinks add up what all sequences give them; nothing is judged unless all are
    here."""
    if len(expected) < given.problem.batch or not expected:
        return Verdict(True, 0.0)
    values, allowed = (sum(host(each.gradients["dsinks"][n]) for each in expected) for n in (0, 1))
    first = head_kv * given.problem.group
    ratios = abs(host(dsinks[first:first + len(values)]).astype(np.float64) - values) / allowed
    if ratios.max() <= 1:
        return Verdict(True, float(ratios.max()))
    return Verdict(False, float(ratios.max()), f"dsinks is wrong at head {first + int(np.argmax(ratios))} ({given.inputs.kind} "
                   "inputs, "
                                               f"seed {given.inputs.seed}): error {ratios.max():.3g} times what is allowed")
