"""Inputs are what their kind says, and the same for the same seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.check.inputs import KINDS, PADDING, make_inputs, visible_range
from autotune.check.numerics import bits, from_float32, rounded, to_float32, ulp
from autotune.core.problem import Problem
from autotune.check.reference import expect

DTYPES = ("bf16", "fp16", "fp32")


def plain_array(inputs, name):
    p = inputs.problem
    return to_float32(getattr(inputs, name), p.dtype if name == "q" else p.kv_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_and_repeatability(kind, dtype):
    p = Problem.parse(f"forward-{dtype}-b2-h6x3-q70-k90-d64x32-causal-sinks-alibi")
    a, b, c = make_inputs(p, kind, 5), make_inputs(p, kind, 5), make_inputs(p, kind, 6)
    assert a.q.shape == (2, 70, 6, 64) and a.k.shape == (2, 90, 3, 64) and a.v.shape == (2, 90, 3, 32)
    assert a.sinks.shape == (6,) and a.sinks.dtype == np.float32 and a.scale == 1 / 8
    assert a.alibi_slopes.shape == ((2, 6) if kind == "large" else (6,))
    for name in ("q", "k", "v"):
        x, y, z = (bits(getattr(i, name), dtype) for i in (a, b, c))
        assert x.strides[-1] == x.itemsize and getattr(a, name).ctypes.data % 16 == 0
        assert all(stride * 8 % 128 == 0 for stride in x.strides[:-1])
        assert np.array_equal(x, y) and not np.array_equal(x, z)


def test_random_numbers_are_normal_and_independent():
    p = Problem.parse("forward-fp32-b1-h8x8-q2048-k2048-d128")
    i = make_inputs(p, "random")
    q, k, v = (plain_array(i, name).ravel().astype(np.float64) for name in "qkv")
    for x in (q, k, v):
        assert abs(x.mean()) < 0.004 and abs(x.std() - 1) < 0.004 and abs((x**4).mean() - 3) < 0.03
    assert abs(np.corrcoef(q, k)[0, 1]) < 0.004 and abs(np.corrcoef(q[1:], q[:-1])[0, 1]) < 0.004
    assert len(np.unique(q)) > 0.8 * 2**21


@pytest.mark.parametrize("text", ["forward-bf16-b1-h2x1-q256-k256-d64", "forward-fp16-b1-h2x2-q512-k1024-d128-causal",
                                  "forward-bf16-b2-h3x1-q200-k333-d256-left40-right3",
                                  "forward-bf16-b1-h2x2-q256-k4096-d64-sinks"])
def test_needles_weigh_on_one_key_and_meet_every_edge(text):
    p = Problem.parse(text)
    inputs = make_inputs(p, "needles")
    q, k = plain_array(inputs, "q"), plain_array(inputs, "k")
    rows = np.arange(p.seqlen_q)
    first, end = visible_range(p, rows)
    key = np.arange(p.seqlen_k)
    found = []
    for b in range(p.batch):
        for h in range(p.heads_q):
            s = q[b, :, h] @ k[b, :, h // p.group].T * inputs.scale
            s = np.where((key >= first[:, None]) & (key < end[:, None]), s, -np.inf)
            top = np.sort(s, -1)
            sees = end > first
            assert (top[sees, -1] - top[sees, -2] > 10).mean() > 0.99  # e^-10 for the runner-up
            found.append(np.where(sees, s.argmax(-1), -1))
    found = np.array(found)
    assert (found == first).any() and (found == end - 1).any()  # window edges
    edges = set(found.ravel() % 64)
    assert {0, 15, 16, 31, 32, 47, 48, 63} <= edges  # the last key of a tile and the first of the next, for any multiple of 16
    if p.mask == "full":
        assert 0 in found and p.seqlen_k - 1 in found
    assert len(np.unique(found)) > min(p.seqlen_k, found.size) / 4


def test_large_and_equal_logits():
    p = Problem.parse("forward-bf16-b1-h2x1-q128-k128-d64")
    for kind, low, high in (("large", 40, 200), ("random", 3, 10)):
        inputs = make_inputs(p, kind)
        s = np.einsum("ihd,jd->hij", plain_array(inputs, "q")[0], plain_array(inputs, "k")[0, :, 0]) * inputs.scale
        assert low < s.max() < high
    inputs = make_inputs(p, "equal")
    assert np.ptp(plain_array(inputs, "k"), axis=1).max() == 0 and np.ptp(plain_array(inputs, "v"), axis=1).min() > 1


def test_mixed_turns_every_64_rows():
    p = Problem.parse("forward-bf16-b1-h2x1-q256-k256-d64")
    q = plain_array(make_inputs(p, "mixed"), "q")[0]  # (256, 2, 64)
    spread = q.reshape(4, 64, 2, 64).std((1, 3))
    one_size = np.abs(q.reshape(4, 64, 2, 64)).std((1, 3)) == 0
    kinds = np.select([spread == 0, one_size, spread < 2], ["equal", "needles", "random"], "large")
    assert kinds[:, 0].tolist() == ["needles", "random", "large", "equal"]
    assert kinds[:, 1].tolist() == ["random", "large", "equal", "needles"]


@pytest.mark.parametrize("features", ["", "-causal", "-left20", "-causal-left20", "-right7", "-left9-right5"])
@pytest.mark.parametrize("sizes", ["q100-k150", "q150-k100", "q1-k50", "q50-k0"])
def test_masked_nan_hides_and_exempts(features, sizes):
    p = Problem.parse(f"forward-bf16-b2-h2x1-{sizes}-d64{features}")
    inputs = make_inputs(p, "masked_nan")
    bad_k, bad_v = (~np.isfinite(plain_array(inputs, n)).all((0, 2, 3)) for n in "kv")
    first, end = visible_range(p, np.arange(p.seqlen_q))
    sees = (np.arange(p.seqlen_k) >= first[:, None]) & (np.arange(p.seqlen_k) < end[:, None])
    assert not (sees & bad_v).any()  # nobody sees a bad value
    assert np.array_equal((sees & bad_k).any(-1), inputs.exempt)
    assert inputs.exempt.sum() <= p.seqlen_q / 2 * 2 and not inputs.exempt.all()
    assert bad_v.any() == (p.seqlen_k > 0 and not sees.any(0).all())
    # beyond the lengths, on both sides of each batch entry, the storage is NaN
    whole = inputs.k.base
    while whole.base is not None:
        whole = whole.base
    rows = whole.view(np.uint16).reshape(2, p.seqlen_k + 2 * PADDING, -1)
    assert (rows[:, :PADDING] == 0x7FC0).all() and (rows[:, -PADDING:] == 0x7FC0).all()
    assert np.isfinite(to_float32(inputs.q, p.dtype)).all()


@pytest.mark.parametrize("source", ["varlen", "page16"])
@pytest.mark.parametrize("batch", [1, 2, 3, 9])
def test_packed_sequences_are_of_any_length(batch, source):
    p = Problem.parse(f"forward-bf16-b{batch}-h4x2-q90-k140-d16-causal-{source}")
    lengths = [make_inputs(p, "masked_nan", seed).layout.sequences for seed in range(8)]
    assert all((90, 140) in each and len(each) == batch for each in lengths)
    everything = set().union(*lengths)
    if batch > 1:
        assert any(q == 0 and k > 0 for q, k in everything)
    if batch > 2:
        assert any(k == 0 and q > 0 for q, k in everything)
    if batch > 3:
        assert any(q > k > 0 for q, k in everything) and (1, 1) in everything
    usual = make_inputs(p, "random", 0).layout
    assert sorted(usual.sequences, reverse=True) == list(p.sequences) and p.flops_of(usual.sequences) == p.flops


def test_packed_keys_that_nobody_sees_are_not_finite():
    p = Problem.parse("forward-bf16-b7-h2x1-q60-k90-d16-causal-left20-varlen")
    inputs = make_inputs(p, "masked_nan", 1)
    layout, bad = inputs.layout, np.isnan(to_float32(inputs.v, "bf16")[0, :, 0, 0])
    assert layout.unused() is None and len(bad) == layout.key_starts[-1] and layout.rows == (1, len(inputs.exempt))
    for (queries, keys), start in zip(layout.sequences, layout.key_starts):
        hidden = max(0, keys - queries - 20) if queries else keys
        assert bad[start:start + keys].sum() == hidden and bad[start:start + hidden].all()


def test_bad_kinds_and_sources_are_refused():
    with pytest.raises(ValueError, match="input kind is 'odd'; allowed are random"):
        make_inputs(Problem(), "odd")
    with pytest.raises(ValueError, match="varlen"):
        make_inputs(Problem(op="decode", kv="varlen"), "random")


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=20), st.sampled_from(DTYPES))
def test_rounding_is_numpys(values, dtype):
    array = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        expected = array.astype(from_float32(np, array[:0], dtype).dtype).astype(np.float32)
        got = rounded(np, array, dtype)
    assert np.array_equal(got, expected, equal_nan=True)


@given(st.floats(2.0**-100, 2.0**100), st.sampled_from(["bf16", "fp32"]))
def test_ulp_is_the_distance_to_the_next(value, dtype):
    array = np.array([value], np.float32)
    below = from_float32(np, array, dtype)
    word = bits(below, dtype)
    if to_float32(below, dtype)[0] > array[0]:
        word -= 1
    distance = to_float32((word + word.dtype.type(1)).view(below.dtype), dtype) - to_float32(below, dtype)
    assert distance[0] == ulp(array.astype(np.float64), dtype)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gpu_makes_the_same(kind, dtype):
    import cupy

    p = Problem.parse(f"forward-{dtype}-b2-h6x3-q130-k200-d64x32-causal-left50-sinks-alibi")
    here, there = make_inputs(p, kind, 5), make_inputs(p, kind, 5, cupy)
    for name in ("q", "k", "v"):
        x, y = plain_array(here, name), cupy.asnumpy(to_float32(getattr(there, name), dtype))
        close = np.isclose(x, y, rtol=2**-6, atol=1e-6, equal_nan=True)  # log and cos may differ in the last bit
        assert close.all() and (np.isnan(x) == np.isnan(y)).all() and np.mean((x == y) | np.isnan(x)) > 0.6
    assert np.array_equal(here.sinks, there.sinks.get()) and np.array_equal(here.alibi_slopes, there.alibi_slopes.get())
    a, b = expect(here), expect(there)
    difference = np.where(a.skip[..., None], 0, a.out - b.out.get())
    assert np.abs(difference).max() < 0.05 and np.median(a.allowed / b.allowed) == pytest.approx(1, rel=0.2)
