"""The reference is attention as the design words it, computed here key by key; samples cover what they must."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.check import reference
from autotune.check.inputs import KINDS, make_inputs
from autotune.check.numerics import matmul, to_float32
from autotune.check.layout import Layout
from autotune.core.problem import Problem
from autotune.check.reference import all_blocks, expect, sampled_blocks


def one_row(inputs, b, h, i):
    """(out (Dv,), lse) of one row in plain Python arithmetic."""
    p = inputs.problem
    q, k, v = (to_float32(array, p.dtype)[b].astype(float) for array in (inputs.q, inputs.k, inputs.v))
    center = i + p.seqlen_k - p.seqlen_q
    scores = {}
    for j in range(p.seqlen_k):
        if p.window_left is not None and j < center - p.window_left or p.window_right is not None and j > center + p.window_right:
            continue
        s = inputs.scale * float(q[i, h] @ k[j, h // p.group])
        if p.softcap:
            s = p.softcap * math.tanh(s / p.softcap)
        if p.alibi:
            s -= float(np.broadcast_to(inputs.alibi_slopes, (p.batch, p.heads_q))[b, h]) * abs(center - j)
        scores[j] = s
    logits = list(scores.values()) + ([float(inputs.sinks[h])] if p.sinks else [])
    if not logits:
        return np.zeros(p.head_dim_v), -math.inf
    top = max(logits)
    lse = top + math.log(sum(math.exp(s - top) for s in logits))
    return sum((math.exp(s - lse) * v[j, h // p.group] for j, s in scores.items()), np.zeros(p.head_dim_v)), lse


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_reference_is_the_definition(data):
    draw = data.draw
    hq, hkv = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    p = Problem(dtype=draw(st.sampled_from(["bf16", "fp16", "fp32"])), batch=2, heads_q=hq, heads_kv=hkv, head_dim=16,
                head_dim_v=8, seqlen_q=draw(st.integers(1, 80)), seqlen_k=draw(st.integers(0, 80)),
                window_left=draw(st.none() | st.integers(0, 60)), window_right=draw(st.none() | st.integers(0, 60)),
                softcap=draw(st.sampled_from([0.0, 5.0])), alibi=draw(st.booleans()), sinks=draw(st.booleans()))
    inputs = make_inputs(p, draw(st.sampled_from([k for k in KINDS if k != "masked_nan"])), draw(st.integers(0, 9)))
    b, h, i = (draw(st.integers(0, n - 1)) for n in (2, hq, p.seqlen_q))
    expected = expect(inputs, np.array([[b, h, i // 64]]))
    out, lse = one_row(inputs, b, h, i)
    assert np.allclose(expected.out[0, i % 64], out, rtol=1e-12, atol=1e-13)
    assert expected.lse[0, i % 64] == lse or abs(expected.lse[0, i % 64] - lse) < 1e-11
    assert expected.nothing[0, i % 64] == (not np.any(out))
    assert np.array_equal(expected.skip[0], i // 64 * 64 + np.arange(64) >= p.seqlen_q)


def test_plain_error_is_that_of_the_dtype():
    errors = {}
    for dtype in ("bf16", "fp16", "fp32"):
        inputs = make_inputs(Problem.parse(f"forward-{dtype}-b1-h2x1-q128-k512-d64"), "random")
        expected = expect(inputs)
        errors[dtype] = expected.plain_error.max()
        assert (expected.allowed > 2 * expected.plain_error).all() and (expected.allowed < 2 * expected.plain_error + 0.01).all()
    assert errors["bf16"] / 8 == pytest.approx(errors["fp16"], rel=0.5) and errors["fp32"] < errors["fp16"] / 100


def test_softcap_is_allowed_three_times_plain():
    p = Problem.parse("forward-fp32-b1-h1x1-q64-k64-d64-softcap5")
    expected = expect(make_inputs(p, "random"))
    assert (expected.allowed > 3 * expected.plain_error).all()


@pytest.mark.slow
def test_chunks_do_not_change_the_result(monkeypatch):
    inputs = make_inputs(Problem.parse("forward-bf16-b2-h4x2-q300-k300-d32-causal-sinks"), "random")
    whole = expect(inputs)
    monkeypatch.setitem(reference.CHUNK_ELEMENTS, "numpy", 60_000)
    parts = expect(inputs)
    for name in ("out", "lse", "allowed", "plain_error"):
        assert np.allclose(getattr(whole, name), getattr(parts, name), rtol=1e-10, atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5000), st.integers(1, 200), st.integers(0, 5))
def test_samples(batch, heads, rows, count, seed):
    layout = Layout(Problem(batch=batch, heads_q=heads, seqlen_q=rows, seqlen_k=1), "random", 0)
    everything = {tuple(b) for b in all_blocks(layout)}
    bands = -(-rows // 64)
    assert len(everything) == batch * heads * bands and max(b[2] for b in everything) == bands - 1
    sample = sampled_blocks(layout, count, seed)
    chosen = {tuple(b) for b in sample}
    assert chosen <= everything and len(chosen) == len(sample) <= max(count, 1) or len(everything) <= count
    if len(everything) > count:
        assert np.array_equal(sample, sampled_blocks(layout, count, seed))
        if count >= 8 + heads:
            assert {0, bands - 1} <= {b[2] for b in chosen} and {b[1] for b in chosen} == set(range(heads))
    else:
        assert chosen == everything
    assert len(sampled_blocks(layout, None)) == len(everything)


def test_nothing_to_check():
    for p in (Problem(seqlen_q=0), Problem(batch=0, seqlen_q=3)):
        assert len(all_blocks(Layout(p, "random", 0))) == 0


@pytest.mark.gpu
def test_gpu_products_and_references():
    import cupy

    random = np.random.default_rng(0)
    for dtype, tolerance in ((np.float32, 1e-4), (np.float64, 1e-12)):
        for z, m, k, n in ((3, 64, 65, 130), (2, 5, 7, 1), (1, 64, 3000, 64), (2, 3, 0, 4)):
            a, b = random.standard_normal((z, m, k)).astype(dtype), random.standard_normal((z, k, n)).astype(dtype)
            got = matmul(cupy, cupy.asarray(a), cupy.asarray(b)).get()
            assert got.dtype == dtype and np.allclose(got, a @ b, rtol=tolerance, atol=tolerance)
    p = Problem.parse("forward-bf16-b1-h4x2-q130-k200-d64-causal-left90-softcap30-alibi-sinks")
    here, there = expect(make_inputs(p, "random")), expect(make_inputs(p, "random", xp=cupy))
    assert np.allclose(here.lse, there.lse.get(), atol=0.02) and np.allclose(here.out, there.out.get(), atol=0.02)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "masked_nan"])
@pytest.mark.parametrize("source", ["varlen", "page16", "page3"])
def test_packed_sequences_are_as_each_alone(source, kind):
    packed = make_inputs(Problem.parse(f"forward-bf16-b6-h4x2-q90-k140-d16x8-causal-left60-alibi-{source}"), kind, 7)
    layout = packed.layout
    assert packed.q.shape[:2] == (1, layout.queries.sum()) == layout.rows
    assert {0, 90} <= set(layout.queries) or kind == "random"
    expected = expect(packed)
    assert len(expected.blocks) == sum(-(-layout.queries // 64)) * 4
    for n, (sequence, head, band) in enumerate(expected.blocks):
        queries, keys, start = int(layout.queries[sequence]), int(layout.lengths[sequence]), int(layout.query_starts[sequence])
        slopes = packed.alibi_slopes if packed.alibi_slopes.ndim == 1 else packed.alibi_slopes[sequence:sequence + 1]
        where = layout.at(np.full(keys, sequence), np.arange(keys))
        alone = Problem.parse(f"forward-bf16-b1-h4x2-q{queries}-k{keys}-d16x8-causal-left60-alibi")
        inputs = replace(packed, problem=alone, layout=Layout(alone, "random", 0), alibi_slopes=slopes, exempt=None,
                         q=packed.q[:, start:start + queries], k=packed.k[where][None], v=packed.v[where][None])
        single = expect(inputs, np.array([[0, head, band]]))
        for name in ("out", "lse", "skip", "nothing"):
            assert np.allclose(getattr(expected, name)[n], getattr(single, name)[0], rtol=1e-12, atol=1e-13), name
        outer, row, of_head = (index[n].ravel() for index in expected.index)
        here = np.arange(64).clip(max=queries - 1 - 64 * band) + 64 * band + start
        assert not outer.any() and of_head == head and np.array_equal(row, here)
