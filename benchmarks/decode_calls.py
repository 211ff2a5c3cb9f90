"""Calls of attention_with_kvcache on a GPU, checked for `decode_correctness`: by the criterion, with any number of splits, bit by
bit when repeated; and batches in which some sequences decode and others have chunks of queries.
"""

from __future__ import annotations

import sys
import warnings
from typing import Sequence

import cupy
from correctness import Report

import autotune
from autotune.check.verdict import Verdict, compare
from autotune.check.inputs import KINDS, Inputs, make_inputs
from autotune.check.numerics import bits
from autotune.core.problem import Problem
from autotune.check.reference import expect

SPLITS = (1, 2, 7, 40, None)
REPEATS = 20
LSE_APART = 2e-5  # of one split and many, relative to 1 or to the lse
POOL_BYTES = 8 << 30


def check_calls(report: Report, problems: Sequence[Problem], mixed: Sequence[Problem], seed: int) -> dict:
    """Adds what came of each call to `report`. Returns counts."""
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    launches = 0
    for number, problem in enumerate([*problems, *mixed]):
        inputs = make_inputs(problem, KINDS[number % len(KINDS)], seed, cupy)
        verdict, count = (check_splits if number < len(problems) else check_once)(problem, inputs)
        launches += count
        report.count += 1
        report.worst = max(report.worst, verdict.worst_ratio if verdict.ok else 0.0)
        if not verdict.ok:
            report.failures.append(f"call of {problem} ({inputs.kind}): {verdict.message}")
            print(f"WRONG  {report.failures[-1]}", file=sys.stderr, flush=True)
        report.cases += [(round(verdict.worst_ratio, 3), f"call of {problem}", inputs.kind)] if verdict.ok else []
        pool = cupy.get_default_memory_pool()
        if pool.total_bytes() > POOL_BYTES:
            pool.free_all_blocks()
    return {"with_any_number_of_splits": len(problems), "mixed_batches": len(mixed), "calls": launches}


def check_splits(problem: Problem, inputs: Inputs) -> tuple[Verdict, int]:
    """(verdict, calls): each number of splits is right, gives the same bits every time, and an lse like that of one split."""
    expected, worst, calls, alone = expect(inputs), 0.0, 0, None
    for splits in SPLITS:
        first = call(problem, inputs, num_splits=splits)
        verdict = compare(problem, inputs, *first, expected=expected)
        if not verdict.ok:
            return Verdict(False, verdict.worst_ratio, f"{splits} splits: {verdict.message}"), calls
        worst = max(worst, verdict.worst_ratio)
        words = [bits(first[0], problem.out_dtype), bits(first[1], "fp32")]
        for _ in range(REPEATS):
            again = call(problem, inputs, num_splits=splits)
            if not all(bool((a == b).all()) for a, b in zip(words, (bits(again[0], problem.out_dtype), bits(again[1], "fp32")))):
                return Verdict(False, float("inf"), f"{splits} splits: another call gives other bits"), calls
        calls += 1 + REPEATS
        alone = first[1] if alone is None else alone
        finite = cupy.isfinite(alone)
        difference = cupy.where(finite, cupy.abs(first[1] - alone) / cupy.maximum(1, cupy.abs(alone)), 0)
        apart = float(difference.max())
        if apart > LSE_APART or bool((cupy.isfinite(first[1]) != finite).any()):
            return Verdict(False, float("inf"), f"the lse of {splits} splits and of one are {apart:.2g} apart"), calls
    return Verdict(True, worst), calls


def check_once(problem: Problem, inputs: Inputs) -> tuple[Verdict, int]:
    """(verdict, calls) of a call that does not say how many queries a sequence has at most."""
    return compare(problem, inputs, *call(problem, inputs)), 1


def call(problem: Problem, inputs: Inputs, **options) -> tuple:
    """(out, lse) of a call on CuPy arrays, as `compare` takes them. Lengths and pages are checked by the call too."""
    layout, q = inputs.layout, inputs.q
    if problem.packed:
        q, options["cu_seqlens_q"] = q[0], layout.device_starts("query")
    out, lse = autotune.attention_with_kvcache(
        q, inputs.k, inputs.v, cache_seqlens=layout.device_lengths(), page_table=layout.table, **problem.bounds.arguments,
        softcap=problem.softcap, sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes, k_scale=inputs.k_scales, v_scale=inputs.v_scales, return_lse=True, check=True,
        **options)
    return (out[None], lse[None]) if problem.packed else (out, lse)
