"""attention_with_kvcache on a real GPU: lengths, pages, splits, graphs that replay with other lengths, repeats bit for bit."""

import random
from dataclasses import replace

import numpy as np
import pytest
from gpu_arrays import cupy_fixture, names, to_torch, torch_fixture  # noqa: F401 (fixtures)

import autotune
from autotune.check.checkers import check_launch
from autotune.check.verdict import compare
from autotune.check.inputs import make_inputs
from autotune.core.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]

COVER = [Problem.parse(text) for text in (
    *(f"decode-bf16-b2-h8x2-q{q}-k{k}-d64-causal" for q, k in ((1, 128), (1, 339), (3, 1024), (16, 799), (5, 3), (2, 20000))),
    *(f"decode-fp16-b3-h{5 * h}x{h}-q2-k777-d128-causal-page{page}"
      for h, page in ((1, 1), (2, 3), (1, 16), (2, 19), (1, 256), (1, 1024))),
    *(f"decode-{dtype}-b3-h8x2-q2-k777-d{d}-causal-page16-kve4m3" for dtype in ("bf16", "fp16") for d in (64, 128, 256)),
    *(f"decode-bf16-b2-h{group}x1-q1-k1500-d64" for group in (1, 5, 6, 7, 16, 64)),
    *(f"decode-bf16-b2-h4x2-q2-k700-d{d}-causal-page16" for d in ("80", "96", "192", "256", "72x40", "192x128")),
    "decode-bf16-b4-h64x8-q1-k900-d64-causal-left127-sinks-page16", "decode-bf16-b4-h8x8-q4-k900-d64-left40-right2-sinks",
    "decode-bf16-b200-h4x1-q1-k100-d64-page16", "decode-fp16-b65-h8x8-q1-k64-d128",
    "decode-bf16-b5-h8x2-q4-k777-d64-causal-prefix500-page16", "decode-fp16-b3-h8x4-q16-k300-d128-causal-prefix295")]


def call(problem, inputs, convert=lambda array: array, **keywords):
    layout = inputs.layout
    return autotune.attention_with_kvcache(
        *map(convert, (inputs.q, inputs.k, inputs.v)), cache_seqlens=convert(layout.device_lengths()),
        page_table=convert(layout.table), **problem.bounds.arguments, softcap=problem.softcap, sinks=convert(inputs.sinks),
        alibi_slopes=convert(inputs.alibi_slopes), k_scale=convert(inputs.k_scales), v_scale=convert(inputs.v_scales),
        return_lse=True, **keywords)


def verdict(problem, cupy, convert=lambda array: array, **keywords):
    def run(inputs, out, lse):
        lse[...] = cupy.from_dlpack(call(problem, inputs, convert, out=convert(out), **keywords)[1])

    return check_launch(run, problem, xp=cupy, sample=200)


@pytest.mark.parametrize("problem", COVER, ids=names)
def test_cupy_arrays_give_the_right_result(cupy, problem):
    result = verdict(problem, cupy, num_splits=random.Random(problem.text).choice([None, 1, 2, 5, 40]))
    assert result.ok, result.message


@pytest.mark.parametrize("problem", COVER[::4], ids=names)
def test_torch_tensors_give_the_right_result(cupy, torch, problem):
    result = verdict(problem, cupy, to_torch(torch))
    assert result.ok, result.message


PACKED = [Problem.parse(text) for text in (
    "decode-bf16-b9-h8x2-q16-k900-d64-causal-page16-packed", "decode-fp16-b5-h10x2-q300-k1500-d128-causal-left200-page64-packed",
    "decode-bf16-b4-h16x2-q150-k700-d64-packed", "decode-bf16-b33-h6x1-q40-k300-d80-causal-sinks-page3-packed",
    "decode-fp16-b3-h4x4-q77-k400-d192x128-causal-softcap20-packed",
    "decode-bf16-b7-h4x2-q500-k900-d128-causal-alibi-page16-packed",
    "decode-bf16-b7-h4x2-q500-k900-d128-causal-prefix300-page16-packed")]


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("problem", PACKED, ids=names)
def test_packed_queries_of_decodes_and_chunks_are_right(cupy, request, problem, library):
    convert = to_torch(request.getfixturevalue("torch")) if library == "torch" else lambda array: array

    def run(inputs, out, lse):
        packed = replace(inputs, q=inputs.q[0])
        lse[...] = cupy.from_dlpack(call(problem, packed, convert, out=convert(out[0]), check=True,
                                         cu_seqlens_q=convert(inputs.layout.device_starts("query")))[1])

    result = check_launch(run, problem, xp=cupy, sample=200)
    assert result.ok, result.message


def test_a_captured_mixed_batch_replays_with_other_numbers_of_queries(cupy):
    problem = Problem.parse("decode-bf16-b4-h8x2-q60-k900-d64-causal-page16-packed")
    inputs = make_inputs(problem, "random", 1, cupy)
    rows = 128
    q = make_inputs(Problem.parse(f"forward-bf16-b1-h8x2-q{rows}-k16-d64"), "random", 2, cupy).q[0]
    cache = dict(cache_seqlens=inputs.layout.device_lengths(), page_table=inputs.layout.table, return_lse=True)
    starts = cupy.asarray(np.array([0, 1, 41, 41, 90], np.int32))
    others = cupy.asarray(np.array([0, 60, 61, 77, 128], np.int32))

    def results(cu_seqlens_q):
        return autotune.attention_with_kvcache(q, inputs.k, inputs.v, cu_seqlens_q=cu_seqlens_q, **cache)

    wanted = [(results(each), int(each[-1])) for each in (starts, others)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    live = starts.copy()
    with stream:
        stream.begin_capture()
        out, lse = results(live)
        graph = stream.end_capture()
        for each, ((expected, expected_lse), count) in zip((starts, others, starts), (*wanted, wanted[0])):
            live[...] = each
            graph.launch(stream)
            stream.synchronize()
            assert (out.view("u2")[:count] == expected.view("u2")[:count]).all()
            assert (lse[:, :count] == expected_lse[:, :count]).all()


@pytest.mark.parametrize("text", ["decode-bf16-b3-h8x2-q40-k700-d64-causal-page16", "decode-fp32-b2-h4x2-q3-k300-d64-causal"])
def test_many_queries_of_each_sequence_over_a_cache(cupy, text):
    result = verdict(Problem.parse(text), cupy)
    assert result.ok, result.message


def test_one_split_and_many_agree_and_repeat_bit_for_bit(cupy):
    problem = Problem.parse("decode-bf16-b3-h16x2-q2-k5000-d128-causal-sinks-page16")
    inputs = make_inputs(problem, "large", xp=cupy)
    results = {}
    for splits in (1, 2, 3, 17, None):
        runs = [call(problem, inputs, num_splits=splits) for _ in range(20)]
        first = runs[0]
        assert all((a.view("u2") == b.view("u2")).all() for out, _ in runs for a, b in [(out, first[0])])
        assert all((lse.view("u4") == first[1].view("u4")).all() for _, lse in runs)
        results[splits] = first
        checked = compare(problem, inputs, *first)
        assert checked.ok, checked.message
    assert all(float(abs(lse - results[1][1])[cupy.isfinite(lse)].max()) < 1e-4 for _, lse in results.values())


def test_a_captured_graph_replays_with_other_lengths_and_pages(cupy):
    problem = Problem.parse("decode-bf16-b4-h16x2-q1-k3000-d64-page16")
    one, two = (make_inputs(problem, "needles", seed, cupy) for seed in (1, 2))
    wanted = [call(problem, inputs) for inputs in (one, two)]
    lengths, table = one.layout.device_lengths().copy(), one.layout.table.copy()
    q, k, v = one.q.copy(), one.k.copy(), one.v.copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        out, lse = autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=False,
                                                   return_lse=True)
        graph = stream.end_capture()
        for inputs, (expected, expected_lse) in zip((one, two, one), (*wanted, wanted[0])):
            for target, source in ((q, inputs.q), (k, inputs.k), (v, inputs.v)):
                target.view("u2")[...] = source.view("u2")
            lengths[...], table[...] = inputs.layout.device_lengths(), inputs.layout.table
            graph.launch(stream)
            stream.synchronize()
            assert (out.view("u2") == expected.view("u2")).all() and (lse == expected_lse).all()


def test_interleaved_caches_of_any_page_stride_are_read_in_place(cupy):
    problem = Problem.parse("decode-bf16-b2-h8x2-q1-k400-d64-page16")
    inputs = make_inputs(problem, "random", xp=cupy)
    both = cupy.empty((inputs.k.shape[0], 2, *inputs.k.shape[1:]), "u2")
    both[:, 0], both[:, 1] = inputs.k.view("u2"), inputs.v.view("u2")
    both = both.view(inputs.k.dtype)
    layout = inputs.layout
    got = autotune.attention_with_kvcache(inputs.q, both[:, 0], both[:, 1], cache_seqlens=layout.device_lengths(),
                                          page_table=layout.table)
    wanted, _ = call(problem, inputs)
    assert (got.view("u2") == wanted.view("u2")).all()


def test_lengths_beyond_the_cache_count_as_full_and_raise_if_asked(cupy):
    problem = Problem.parse("decode-bf16-b2-h8x2-q1-k400-d64")
    inputs = make_inputs(problem, "random", xp=cupy)
    beyond = cupy.asarray(np.array([400, 10**9], np.int32))
    got = autotune.attention_with_kvcache(inputs.q, inputs.k, inputs.v, cache_seqlens=beyond)
    assert (got.view("u2") == call(problem, inputs)[0].view("u2")).all()
    with pytest.raises(autotune.AttentionError, match=r"cache_seqlens\[1\] is 1000000000"):
        autotune.attention_with_kvcache(inputs.q, inputs.k, inputs.v, cache_seqlens=beyond, check=True)
