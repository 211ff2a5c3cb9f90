"""Is a forward kernel's result correct? `checkers` has what tests, `verify` and the tuner's worker share for all operations.

    checker = Checker(problem, sample=64, xp=cupy)      # keeps inputs and references for many candidates
    verdict = checker(run)

Outputs are poisoned before each launch and stand between guard bands that must come back untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Callable, Iterable

import numpy as np

from .inputs import KINDS, ROWS, Inputs, make_inputs
from .numerics import EXPONENT_BITS, array_dtype, bits, host, to_float32
from ..core.problem import Problem
from .reference import Expected, expect, sampled_blocks

GUARD_BYTES = 64 * 1024
GUARD_BYTE = 0xA5
POISON_BYTE = 0xFF  # a NaN in every float type

LSE_ABSOLUTE, LSE_RELATIVE = 1e-3, 1e-5

# A launch of more than this costs the tuner more than the few milliseconds that each further kind of input is worth.
CHEAP_FLOPS = 2e12
CHEAP_BYTES = 5e9  # each kind has arrays of its own
TUNING_SAMPLE = 64  # blocks: their reference takes about 0.2 s of an H200 for 65536 keys, once a problem


@dataclass(frozen=True)
class Verdict:
    """`worst_ratio` is error / allowed over all blocks (inf for what has no number: unwritten, damaged, not finite)."""

    ok: bool
    worst_ratio: float
    message: str = ""  # "" if ok, else one sentence: which inputs, batch entry, head, rows, first bad element


class Guarded:
    """An output of `shape` and dtype name that is poisoned and fenced: `array` is what the kernel gets."""

    def __init__(self, xp, shape: tuple[int, ...], dtype: str):
        size = prod(shape) * array_dtype(dtype).itemsize
        self._end = GUARD_BYTES + size
        padding = -size % 16  # keeps the second band aligned, and catches a store that overshoots by a few bytes
        self._bytes = xp.empty(2 * GUARD_BYTES + size + padding, np.uint8)
        word = np.uint32 if dtype == "fp32" else np.uint16
        self.array = self._bytes[GUARD_BYTES:self._end].view(word).view(array_dtype(dtype)).reshape(shape)
        self.poison()

    def poison(self) -> None:
        """Makes the payload NaN and the bands whole again."""
        self._bytes[:GUARD_BYTES] = GUARD_BYTE
        self._bytes[GUARD_BYTES:self._end] = POISON_BYTE
        self._bytes[self._end:] = GUARD_BYTE

    def damage(self) -> str | None:
        """Where a band was written, as words, or None."""
        before = host(self._bytes[:GUARD_BYTES]) != GUARD_BYTE
        after = host(self._bytes[self._end:]) != GUARD_BYTE
        if before.any():
            return f"{GUARD_BYTES - int(np.flatnonzero(before)[-1])} bytes before its begin"
        if after.any():
            return f"{int(np.flatnonzero(after)[0])} bytes after its end"
        return None


def compare(problem: Problem, inputs: Inputs, out, lse=None, blocks: int | np.ndarray | None = None, seed: int = 0,
            expected: Expected | None = None) -> Verdict:
    """Judges out (B, Sq, Hq, Dv) of the out dtype and lse (B, Hq, Sq) float32 (None: not asked for); where queries are packed
    those of one batch entry, (1, total_q, Hq, Dv) and (1, Hq, total_q).

    `blocks`: None checks every (batch, head, 64 rows), an int that many of them drawn by `seed`, an (n, 3) array these.
    `expected` is the reference if the caller keeps it; it decides the blocks then. Whatever the blocks, every element of
    out and lse must have been written with a number.
    """
    if tuple(out.shape) != (needed := (*inputs.layout.rows, problem.heads_q, problem.head_dim_v)):
        raise ValueError(f"out has shape {tuple(out.shape)}; {problem} needs {needed}")
    if out.size == 0:
        return Verdict(True, 0.0)
    if expected is None:
        chosen = blocks if isinstance(blocks, np.ndarray) else sampled_blocks(inputs.layout, blocks, seed)
        expected = expect(inputs, chosen)
    if message := _unwritten(problem, inputs, out, lse):
        return Verdict(False, float("inf"), f"{inputs.kind} inputs: {message}")
    verdict = _judge_out(expected, out)
    if lse is None or not verdict.ok:
        return verdict
    other = _judge_lse(expected, lse)
    return other if not other.ok else replace(verdict, worst_ratio=max(verdict.worst_ratio, other.worst_ratio))


class OfAllKinds:
    """What all checkers do with a launch: judge it on each of their `kinds` of inputs, until one is wrong."""

    kinds: tuple[str, ...]

    def __call__(self, run: Callable) -> Verdict:
        worst = 0.0
        for kind in self.kinds:
            verdict = self.check_kind(run, kind)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict.worst_ratio)
        return Verdict(True, worst)

    def check_kind(self, run: Callable, kind: str) -> Verdict:
        raise NotImplementedError


class Checker(OfAllKinds):
    """Inputs, references and poisoned outputs of one problem, made at first use and kept for every candidate after.

    A call takes `run(inputs, out, lse)`, which launches on xp's current stream, and gives the verdict over all kinds;
    it stops at the first wrong one. Exceptions of `run` and of the GPU pass through. `make` makes inputs as `make_inputs` does.
    """

    def __init__(self, problem: Problem, kinds: Iterable[str] | None = None, seed: int = 0, xp=np, sample: int | None = None,
                 make: Callable[..., Inputs] = make_inputs):
        self.problem, self.seed, self.xp, self.sample, self._make = problem, seed, xp, sample, make
        self.kinds = tuple(KINDS if kinds is None else kinds)
        self._cases: dict[str, tuple[Inputs, Expected]] = {}
        self._outputs: dict[tuple[int, int], tuple[Guarded, Guarded]] = {}  # by `Layout.rows`

    def check_kind(self, run: Callable, kind: str) -> Verdict:
        """The verdict on one kind of inputs."""
        inputs, expected = self.case(kind)
        out, lse = self._fresh_outputs(*inputs.layout.rows)
        run(inputs, out.array, lse.array)
        for name, output in (("out", out), ("lse", lse)):
            if where := output.damage():
                return Verdict(False, float("inf"), f"{kind} inputs: memory outside {name} was written, {where}")
        return compare(self.problem, inputs, out.array, lse.array, expected=expected)

    def case(self, kind: str) -> tuple[Inputs, Expected]:
        """(inputs, expected) of one kind, kept."""
        if kind not in self._cases:
            inputs = self._make(self.problem, kind, self.seed, self.xp)
            self._cases[kind] = inputs, expect(inputs, sampled_blocks(inputs.layout, self.sample, self.seed))
        return self._cases[kind]

    def _fresh_outputs(self, outer: int, rows: int) -> tuple[Guarded, Guarded]:
        p = self.problem
        if (outer, rows) not in self._outputs:
            self._outputs[outer, rows] = (Guarded(self.xp, (outer, rows, p.heads_q, p.head_dim_v), p.out_dtype),
                                          Guarded(self.xp, (outer, p.heads_q, rows), "fp32"))
        else:
            for output in self._outputs[outer, rows]:
                output.poison()
        return self._outputs[outer, rows]


def tuning_kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds that the tuner checks a candidate with: all, or for expensive problems the one that mixes them."""
    cheap = problem.flops <= CHEAP_FLOPS and problem.compulsory_bytes <= CHEAP_BYTES
    return KINDS if cheap else ("mixed",)


def _unwritten(problem: Problem, inputs: Inputs, out, lse) -> str | None:
    """Whether any element of out is not finite or any of lse is NaN, sampled or not."""
    mask = EXPONENT_BITS[problem.out_dtype]
    flat = bits(out, problem.out_dtype).reshape(*out.shape[:2], -1)
    bad_out = host((flat & mask).max(-1)) == mask  # (B, Sq)
    exempt = np.zeros(out.shape[1], bool) if inputs.exempt is None else inputs.exempt
    if (bad_out & ~exempt).any():
        batch, row = (int(x) for x in np.argwhere(bad_out & ~exempt)[0])
        values = host(bits(out, problem.out_dtype)[batch, row])  # (Hq, Dv)
        head, column = (int(x) for x in np.argwhere((values & mask) == mask)[0])
        poison = POISON_BYTE * (0x0101 if values.itemsize == 2 else 0x01010101)
        what = "was never written" if int(values[head, column]) == poison else "is not finite"
        return f"out {what} at batch {batch}, head {head}, row {row}, column {column} " \
               f"({int((bad_out & ~exempt).sum())} of {bad_out.size} rows are bad)"
    if lse is not None:
        bad_lse = host(lse != lse) & ~exempt
        if bad_lse.any():
            batch, head, row = (int(x) for x in np.argwhere(bad_lse)[0])
            word = int(host(bits(lse, "fp32")[batch, head, row:row + 1])[0])
            what = "was never written" if word == POISON_BYTE * 0x01010101 else "is NaN"
            return f"lse {what} at batch {batch}, head {head}, row {row} ({int(bad_lse.sum())} of {bad_lse.size} rows are bad)"
    return None


def _judge_out(expected: Expected, out) -> Verdict:
    problem, xp = expected.inputs.problem, expected.inputs.xp
    at = expected.index
    got = to_float32(bits(out, problem.out_dtype)[at].view(out.dtype), problem.out_dtype).astype(np.float64)
    error = xp.where(expected.nothing[..., None] & (got != 0), np.inf, xp.abs(got - expected.out))
    error = xp.where(expected.skip[..., None], 0.0, error)
    ratios = host(error.max((1, 2))) / expected.allowed
    n = int(np.argmax(ratios))
    if ratios[n] <= 1:
        return Verdict(True, float(ratios[n]))
    local = host(error[n])  # (64, Dv)
    wrong = ~(local <= expected.allowed[n])
    row, column = (int(x) for x in np.argwhere(wrong)[0])
    values = [_number(host(array[n])[row, column]) for array in (got, expected.out)]
    message = (f"out is wrong in {_place(expected, n)}: error {_number(local.max())} where {_number(expected.allowed[n])} is "
               f"allowed; first at row {_first_row(expected, n) + row}, column {column}: got {values[0]}, expected {values[1]}; "
               f"{int(wrong.any(-1).sum())} rows of this block and {int((~(ratios <= 1)).sum())} of {len(ratios)} checked blocks "
               f"are wrong")
    return Verdict(False, float(ratios[n]), message)


def _judge_lse(expected: Expected, lse) -> Verdict:
    xp = expected.inputs.xp
    batch, rows, head = expected.index
    got = lse[batch, head, rows].astype(np.float64)
    infinite = xp.isinf(expected.lse) | xp.isinf(got)
    wanted = xp.where(infinite, 0.0, expected.lse)
    ratio = xp.abs(xp.where(infinite, 0.0, got) - wanted) / (LSE_ABSOLUTE + LSE_RELATIVE * xp.abs(wanted))
    ratio = xp.where(infinite & (got != expected.lse), np.inf, ratio)
    ratios = host(xp.where(expected.skip, 0.0, ratio))  # (n, 64)
    n, row = (int(x) for x in np.unravel_index(np.argmax(ratios), ratios.shape))
    if ratios[n, row] <= 1:
        return Verdict(True, float(ratios[n, row]))
    message = (f"lse is wrong in {_place(expected, n)}: worst at row {_first_row(expected, n) + row}: "
               f"got {_number(host(got[n])[row])}, expected {_number(host(expected.lse[n])[row])}; "
               f"{int((~(ratios <= 1)).sum())} of {ratios.size} checked rows are wrong")
    return Verdict(False, float(ratios[n, row]), message)


def _place(expected: Expected, n: int) -> str:
    batch, head, _ = (int(x) for x in expected.blocks[n])
    first = _first_row(expected, n)
    last = min(first + ROWS, int(expected.inputs.layout.queries[batch])) - 1
    return f"batch {batch}, head {head}, rows {first} to {last} ({expected.inputs.kind} inputs, seed {expected.inputs.seed})"


def _first_row(expected: Expected, n: int) -> int:
    return int(expected.blocks[n, 2]) * ROWS


def _number(value) -> str:
    return f"{float(value):.6g}"
