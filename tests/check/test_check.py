"""The check accepts plain attention and catches every mutant of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.check.checkers import check_launch
from autotune.check.verdict import GUARD_BYTES, Checker, Guarded, compare, tuning_kinds
from autotune.check.inputs import KINDS, make_inputs
from autotune.check.numerics import bits, from_float32, rounded, to_float32
from autotune.core.problem import Problem


def visible_mask(p: Problem) -> np.ndarray:
    """(Sq, Sk) bool, written out from the semantics, pair by pair."""
    aligned = np.arange(p.seqlen_q)[:, None] + p.seqlen_k - p.seqlen_q
    key = np.arange(p.seqlen_k)[None]
    mask = np.ones((p.seqlen_q, p.seqlen_k), bool)
    if p.window_left is not None:
        mask &= key >= aligned - p.window_left
    if p.window_right is not None:
        mask &= key <= aligned + p.window_right
    return mask


def attention(inputs, out, lse, mask=None, weight=None, shift=None):
    """Low-precision attention over whole heads. `mask`, `weight` (Sk,) of keys and `shift` (Sk,) of P's columns make mutants."""
    p = inputs.problem
    mask = visible_mask(p) if mask is None else mask
    q, k, v = (to_float32(a, d) for a, d in ((inputs.q, p.dtype), (inputs.k, p.kv_dtype), (inputs.v, p.kv_dtype)))
    seen = mask.any(0)
    aligned = np.arange(p.seqlen_q)[:, None] + p.seqlen_k - p.seqlen_q - np.arange(p.seqlen_k)[None]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for b in range(p.batch):
            for h in range(p.heads_q):
                s = q[b, :, h] @ k[b, :, h // p.group].T * np.float32(inputs.scale)
                if p.softcap:
                    s = np.float32(p.softcap) * np.tanh(s / np.float32(p.softcap))
                if p.alibi:
                    s = s - np.broadcast_to(inputs.alibi_slopes, (p.batch, p.heads_q))[b, h] * abs(aligned).astype(np.float32)
                s = np.where(mask, s, np.float32(-np.inf))
                sink = inputs.sinks[h] if p.sinks else np.float32(-np.inf)
                top = np.maximum(s.max(-1, initial=-np.inf), sink)
                top = np.where(np.isneginf(top), np.float32(0), top)
                e = np.exp(s - top[:, None])
                if weight is not None:
                    e = e * weight
                total = e.sum(-1) + np.exp(sink - top)
                if shift is not None:
                    e = e[:, shift]
                e = rounded(np, e, p.dtype)
                values = np.where(seen[:, None], v[b, :, h // p.group], 0)
                result = e @ values / np.where(total == 0, 1, total)[:, None]
                bits(out, p.out_dtype)[b, :, h] = bits(from_float32(np, result.astype(np.float32), p.out_dtype), p.out_dtype)
                lse[b, h] = top + np.log(total)


FEATURES = ["", "-causal", "-causal-left20", "-left9-right5", "-softcap30", "-alibi", "-sinks", "-causal-sinks-softcap20-alibi"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("features", FEATURES)
def test_attention_passes(dtype, features):
    for sizes in ("b2-h4x2-q130-k200-d64", "b1-h3x1-q100-k33-d128x64"):
        verdict = check_launch(attention, Problem.parse(f"forward-{dtype}-{sizes}{features}"), seed=3)
        assert verdict.ok and 0 < verdict.worst_ratio <= 1, (sizes, verdict)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2), st.integers(0, 90), st.integers(0, 150), st.sampled_from([(1, 1), (5, 1), (4, 2)]),
       st.none() | st.integers(0, 100), st.none() | st.integers(0, 100), st.booleans(), st.sampled_from(KINDS))
def test_attention_passes_everywhere(batch, sq, sk, heads, left, right, sinks, kind):
    problem = Problem(dtype="bf16", batch=batch, heads_q=heads[0], heads_kv=heads[1], seqlen_q=sq, seqlen_k=sk, head_dim=32,
                      window_left=left, window_right=right, sinks=sinks)
    verdict = check_launch(attention, problem, kinds=[kind])
    assert verdict.ok, verdict


PROBLEM = Problem.parse("forward-bf16-b1-h4x2-q512-k1024-d64-causal")


def drop(*keys):
    weight = np.ones(PROBLEM.seqlen_k, np.float32)
    weight[list(keys)] = 0
    return lambda inputs, out, lse: attention(inputs, out, lse, weight=weight)


def split_merged_twice(inputs, out, lse):
    weight = np.ones(PROBLEM.seqlen_k, np.float32)
    weight[512:768] = 2
    attention(inputs, out, lse, weight=weight)


def values_of_another_tile(inputs, out, lse):
    shift = np.arange(PROBLEM.seqlen_k)
    shift[128:192], shift[192:256] = np.arange(192, 256), np.arange(128, 192)
    attention(inputs, out, lse, shift=shift)


def mask_off_by(step):
    def run(inputs, out, lse):
        aligned = np.arange(512)[:, None] + 512 + step
        attention(inputs, out, lse, mask=np.arange(1024)[None] <= aligned)
    return run


def row_unwritten(inputs, out, lse):
    saved = out[0, 300, 2].copy()
    attention(inputs, out, lse)
    out[0, 300, 2] = saved


def row_stale(inputs, out, lse):
    attention(inputs, out, lse)
    out[0, 301, 1] = out[0, 300, 1]


def lse_base_two(inputs, out, lse):
    attention(inputs, out, lse)
    lse *= np.float32(1 / np.log(2))


MUTANTS = {
    "first key dropped": drop(0), "a key dropped": drop(700), "tile edge dropped": drop(512),
    "tile dropped": drop(*range(448, 512)), "sixteen keys dropped": drop(*range(64, 80)),
    "split merged twice": split_merged_twice, "P of another tile": values_of_another_tile,
    "mask one too far": mask_off_by(1), "mask one too short": mask_off_by(-1),
    "row unwritten": row_unwritten, "row stale": row_stale, "lse in bits": lse_base_two,
}


@pytest.fixture(scope="module")
def checkers():
    return {kinds: Checker(PROBLEM, kinds) for kinds in (KINDS, ("mixed",))}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [KINDS, ("mixed",)], ids=["all", "mixed"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(checkers, name, kinds):
    verdict = checkers[kinds](MUTANTS[name])
    assert not verdict.ok and verdict.worst_ratio > 1 and verdict.message, verdict


@pytest.mark.slow
def test_the_mutants_host_passes(checkers):
    assert checkers[KINDS](attention).ok


def test_message_names_the_place(checkers):
    verdict = checkers[KINDS].check_kind(row_stale, "random")
    assert "batch 0, head 1, rows 256 to 319 (random inputs, seed 0)" in verdict.message
    assert "first at row 301, column" in verdict.message and "1 rows of this block and 1 of 32 checked blocks" in verdict.message
    verdict = checkers[KINDS].check_kind(row_unwritten, "random")
    assert "out was never written at batch 0, head 2, row 300, column 0 (1 of 512 rows are bad)" in verdict.message


def test_a_sample_still_sees_unwritten_rows():
    checker = Checker(PROBLEM, ["random"], sample=4)
    assert len(checker.case("random")[1].blocks) == 4
    assert checker(attention).ok
    assert "never written" in checker(row_unwritten).message


def test_nan_of_hidden_keys_must_not_leak():
    def leaking(inputs, out, lse):  # multiplies hidden keys by zero instead of masking them
        attention(inputs, out, lse)
        p = inputs.problem
        hidden = ~visible_mask(p)[10]
        leak = 0 * to_float32(inputs.k, p.kv_dtype)[0, hidden].sum()
        out[0, 10] = (out[0, 10].astype(np.float32) + leak).astype(out.dtype)

    for features in ("-causal", "-left9-right5", "-causal-left20"):
        problem = Problem.parse(f"forward-bf16-b1-h2x2-q64-k100-d64{features}")
        checker = Checker(problem, ["masked_nan"])
        assert checker(attention).ok
        assert "not finite" in checker(leaking).message


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_guard_bands(dtype):
    output = Guarded(np, (3, 5), dtype)
    assert output.array.shape == (3, 5) and np.isnan(output.array.astype(np.float32)).all() and output.damage() is None
    output.array[...] = 1
    assert output.damage() is None
    raw = output._bytes
    raw[GUARD_BYTES - 3] = 0
    assert output.damage() == "3 bytes before its begin"
    output.poison()
    assert output.damage() is None and np.isnan(output.array.astype(np.float32)).all()
    raw[GUARD_BYTES + output.array.nbytes + 7] = 0
    assert output.damage() == "7 bytes after its end"


def test_damage_fails_the_check():
    def careless(inputs, out, lse):
        attention(inputs, out, lse)
        base = out.base
        while base.base is not None:
            base = base.base
        base.reshape(-1).view(np.uint8)[GUARD_BYTES + out.nbytes + 100] = 0

    assert "memory outside out was written, 100 bytes after its end" in \
        check_launch(careless, Problem.parse("forward-bf16-b1-h1x1-q8-k8-d64")).message


def test_rows_that_see_nothing():
    problem = Problem.parse("forward-fp16-b1-h2x1-q40-k10-d64-causal")
    inputs = make_inputs(problem, "random")
    out, lse = np.zeros((1, 40, 2, 64), np.float16), np.zeros((1, 2, 40), np.float32)
    attention(inputs, out, lse)
    assert compare(problem, inputs, out, lse).ok
    lse[0, 1, 3] = 0
    assert "got 0, expected -inf" in compare(problem, inputs, out, lse).message
    lse[0, 1, 3] = -np.inf
    out[0, 3, 1, 5] = 1e-3
    assert "expected 0" in compare(problem, inputs, out, lse).message


def test_wrong_shape_is_refused():
    inputs = make_inputs(PROBLEM, "random")
    with pytest.raises(ValueError, match="out has shape"):
        compare(PROBLEM, inputs, np.zeros((1, 2, 3, 4), np.float16))


def test_expensive_problems_are_checked_with_one_launch():
    assert tuning_kinds(PROBLEM) == KINDS
    assert tuning_kinds(Problem.parse("forward-bf16-b1-h64x8-q65536-k65536-d64")) == ("mixed",)
