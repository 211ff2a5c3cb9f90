"""The script that checks attention over caches on a GPU, as far as it runs without one: what it chooses and what it finds."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

pytest.importorskip("cupy")

from autotune.core.gpu import by_name  # noqa: E402
from autotune.check.inputs import make_inputs  # noqa: E402
from autotune.kernels import KERNELS  # noqa: E402
from autotune.check.numerics import from_float32  # noqa: E402
from autotune.core.problem import Problem  # noqa: E402
from autotune.check.reference import expect  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_calls  # noqa: E402
import decode_correctness  # noqa: E402

H200 = by_name("nvidia-h200")
PROBLEM = Problem.parse("decode-bf16-b3-h4x2-q2-k40-d16-causal-sinks-page16")


def test_every_pair_of_values_that_can_be_is_covered():
    cases, impossible = decode_correctness.cover(H200, 0)
    assert (cases, impossible) == decode_correctness.cover(H200, 0) and len(impossible) < 20
    problems = [case.problem for case in cases]
    assert all(KERNELS["decode_mma"].reject(p, H200) is None and p == p.simplified() for p in problems)
    seen = {pair for p in problems for pair in itertools.product(
        [p.dtype, p.group, p.page_size, p.softcap, p.alibi, p.sinks],
        [(p.head_dim, p.head_dim_v), p.kv_dtype, p.batch, p.packed])}
    assert {("bf16", "e4m3"), (64, 70), (1024, (192, 128)), (30.0, True), (19, "e4m3"), (7, 33)} <= seen
    assert {p.seqlen_q for p in problems} == {1, 2, 3, 5, 8, 16} and len(problems) > 100


def test_calls_are_cut_and_mixed_batches_have_long_sequences():
    calls, mixed = decode_correctness.calls(0, 12), decode_correctness.mixed(0, 12)
    assert len(calls) == len(mixed) == 12 and all(p.seqlen_k >= 339 for p in calls)
    assert all(p.packed and p.seqlen_q > 16 and p.kv_dtype == p.dtype for p in mixed)
    assert any((make_inputs(p, "large", 0).layout.queries <= 16).any() for p in mixed[:2])


@pytest.mark.slow
def test_a_simulated_run_is_written(monkeypatch, tmp_path):
    out = tmp_path / "result.yaml"
    cases = decode_correctness.cover(H200, 0)[0]
    small = [case for case in cases if case.problem.head_dim == 64 and case.problem.seqlen_k <= 128][:1]
    monkeypatch.setattr(decode_correctness, "cover", lambda gpu, seed: (small, []))
    monkeypatch.setattr(sys, "argv", ["decode_correctness.py", "--simulate", "--configs", "0", "--out", str(out)])
    assert decode_correctness.main() == 0
    summary = yaml.safe_load(out.read_text())["summary"]
    assert summary["cases"] == 1 and summary["failed"] == 0 and 0 < summary["worst_ratio"] <= 1


@pytest.fixture
def answers(monkeypatch):
    """`answers.change(splits, calls, out, lse)` alters what the call that is checked returns."""
    inputs = make_inputs(PROBLEM, "large", 0)
    expected = expect(inputs)
    out = np.zeros((*inputs.layout.rows, PROBLEM.heads_q, PROBLEM.head_dim_v), np.float32)
    lse = np.zeros((PROBLEM.batch, PROBLEM.heads_q, PROBLEM.seqlen_q), np.float32)
    for (batch, head, _), values, logs in zip(expected.blocks, expected.out, expected.lse):
        out[batch, :, head], lse[batch, head] = values[:PROBLEM.seqlen_q], logs[:PROBLEM.seqlen_q]

    class Answers:
        change, count = staticmethod(lambda splits, count, out, lse: (out, lse)), 0

    def call(problem, inputs, num_splits=None):
        Answers.count += 1
        changed, logs = Answers.change(num_splits, Answers.count, out.copy(), lse.copy())
        return from_float32(np, changed, PROBLEM.out_dtype), logs

    monkeypatch.setattr(decode_calls, "cupy", np)
    monkeypatch.setattr(decode_calls, "call", call)
    Answers.check = staticmethod(lambda: decode_calls.check_splits(PROBLEM, inputs))
    return Answers


def test_any_number_of_splits_is_right_and_repeats(answers):
    verdict, calls = answers.check()
    assert verdict.ok and calls == answers.count == len(decode_calls.SPLITS) * (1 + decode_calls.REPEATS)


def wrong_once(splits, count, out, lse):
    out[0, 0, 0, 0] += 0.25 * (splits == 7)
    return out, lse


def other_bits(splits, count, out, lse):
    out[0, 0, 0, 0] += 0.01 * (count == 30)
    return out, lse


def lse_apart(splits, count, out, lse):
    return out, lse + 1.2e-3 * (splits == 40)


@pytest.mark.parametrize("change, words", [(wrong_once, "7 splits: out is wrong"), (other_bits, "another call gives other bits"),
                                           (lse_apart, "the lse of 40 splits and of one are")])
def test_what_differs_is_found(answers, change, words):
    answers.change = staticmethod(change)
    verdict, _ = answers.check()
    assert not verdict.ok and words in verdict.message
