"""attention_with_kvcache on a GPU made of numpy: what reaches the kernel computes the right thing; what does not fit says why."""

from dataclasses import replace

import numpy as np
import pytest
from fake_arrays import Tensor, aligned, fake_gpu, qkv, random  # noqa: F401 (a fixture)

import autotune
from autotune.calls import plans
from autotune.device import counters
from autotune.device.arrays import AttentionError
from autotune.check.verdict import compare
from autotune.check.inputs import make_inputs
from autotune.kernels import KERNELS
from autotune.core.problem import Problem

MERGERS = KERNELS["decode_mma"].parameters[-1].name


def on_gpu(array):
    copy = aligned(array.shape, array.dtype)
    copy[...] = array
    return Tensor(copy)


def call(problem, inputs, q=None, **keywords):
    layout = inputs.layout
    return autotune.attention_with_kvcache(
        q or on_gpu(inputs.q), Tensor(inputs.k), Tensor(inputs.v), cache_seqlens=Tensor(layout.device_lengths()),
        page_table=None if layout.table is None else Tensor(layout.table), **problem.bounds.arguments,
        sinks=None if inputs.sinks is None else Tensor(inputs.sinks),
        softcap=problem.softcap, alibi_slopes=None if inputs.alibi_slopes is None else Tensor(inputs.alibi_slopes),
        k_scale=None if inputs.k_scales is None else Tensor(inputs.k_scales),
        v_scale=None if inputs.v_scales is None else Tensor(inputs.v_scales), return_lse=True, **keywords)


@pytest.mark.parametrize("text", ["decode-bf16-b4-h4x2-q1-k40-d64", "decode-fp16-b3-h6x2-q3-k50-d64x32-causal-page16",
                                  "decode-bf16-b2-h4x1-q2-k33-d64-causal-left7-sinks-page3",
                                  "decode-bf16-b5-h2x2-q4-k20-d64-page1", "decode-bf16-b3-h4x2-q1-k40-d64-page16-kve4m3",
                                  "decode-bf16-b4-h4x2-q1-k40-d64-softcap20",
                                  "decode-fp16-b3-h4x1-q3-k40-d64-causal-alibi-page16",
                                  "decode-bf16-b3-h4x2-q2-k40-d64-causal-left9-softcap20-alibi-sinks-page16-kve4m3"])
@pytest.mark.parametrize("kind", ["random", "large", "masked_nan", "needles"])
def test_lengths_pages_windows_and_sinks_reach_the_kernel(gpu, text, kind):
    problem = Problem.parse(text)
    inputs = make_inputs(problem, kind, seed=3)
    gpu.compute = problem.dtype, problem.head_dim, problem.head_dim_v, problem.kv_dtype
    out, lse = call(problem, inputs, check=True)
    verdict = compare(problem, inputs, out.array, lse.array)
    assert verdict.ok, verdict.message


def test_a_full_dense_cache_needs_no_lengths(gpu):
    gpu.compute = "bf16", 64, 64
    q, k, v = qkv()
    out = autotune.attention_with_kvcache(q, k, v)
    assert gpu.calls[-1]["kernel"] == "decode_mma" and gpu.calls[-1]["lengths"] == 0 and gpu.calls[-1]["num_splits"] == 1
    wanted = autotune.attention(q, k, v, causal=True).array.astype(np.float32)
    assert np.abs(out.array.astype(np.float32) - wanted).max() < 0.01


@pytest.mark.parametrize("max_seqlen_k", [7, np.int64(20), 40])
def test_a_guess_of_the_lengths_never_changes_the_result(gpu, max_seqlen_k):
    gpu.compute = "bf16", 64, 64
    arrays = qkv(seqlen_q=1, seqlen_k=40)
    autotune.attention_with_kvcache(*arrays, max_seqlen_k=max_seqlen_k)  # its match has no window, and must not serve the next
    out = autotune.attention_with_kvcache(*arrays, window=(6, 0), max_seqlen_k=max_seqlen_k)
    assert (out.array == autotune.attention_with_kvcache(*arrays, window=(6, 0)).array).all()


def test_many_queries_and_float32_are_served_where_attention_can(gpu):
    for arrays in (qkv(seqlen_q=17, seqlen_k=40), qkv(dtype="fp32")):
        autotune.attention_with_kvcache(*arrays)
        assert gpu.calls[-1]["kernel"] != "decode_mma" and "cache_seqlens" not in gpu.calls[-1]


@pytest.mark.parametrize("text", ["bf16-b2-h4x2-q17-k40-d64-causal-sinks", "fp16-b3-h6x2-q20-k50-d64x32-causal-left9-page16",
                                  "bf16-b2-h2x1-q18-k33-d64-softcap2-page3", "fp32-b2-h4x2-q3-k20-d48-causal-page1",
                                  "fp32-b1-h2x2-q20-k33-d64-alibi"])
@pytest.mark.parametrize("form", ["as it is", "q with gaps", "out with gaps", "negative scale"])
def test_many_queries_over_lengths_and_pages_are_a_forward_kernels(gpu, text, form):
    decode = Problem.parse(f"decode-{text}")
    inputs = make_inputs(decode, "large", seed=4)
    gpu.compute = decode.dtype, decode.head_dim, decode.head_dim_v
    q = Tensor(inputs.q)
    if form == "q with gaps":
        q = Tensor(aligned((decode.batch, 2 * decode.seqlen_q, *inputs.q.shape[2:]), inputs.q.dtype)[:, :decode.seqlen_q])
        q.array[...] = inputs.q
    out = None
    if form == "out with gaps":
        shape = decode.batch, decode.seqlen_q + 1, decode.heads_q, decode.head_dim_v
        out = Tensor(aligned(shape, inputs.q.dtype)[:, 1:])
    if form == "negative scale":
        q = Tensor(-inputs.q)
    got, lse = call(decode, inputs, q, out=out, scale=-decode.head_dim**-0.5 if form == "negative scale" else None)
    launch, = gpu.calls
    assert launch["kernel"].startswith("forward_") and (launch["kernel"] == "forward_simt") == (decode.dtype == "fp32")
    assert out is None or got is out
    verdict = compare(decode, inputs, got.array, lse.array)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("text, counts", [
    ("b4-h4x2-q30-k40-d64", (1, 30, 0, 1)), ("b3-h6x2-q40-k50-d64x32-causal-page16", (40, 16, 17)),
    ("b5-h4x1-q20-k33-d64-causal-left7-sinks-page3", (16, 0, 18, 1, 20)), ("b3-h2x2-q17-k20-d64-left4-right1-page1", (17, 3, 2)),
    ("b2-h2x2-q19-k20-d64-right5", (19, 9)), ("b2-h4x2-q20-k20-d64-causal", (20, 19))])
@pytest.mark.parametrize("known", [True, False])
def test_a_mixed_batch_is_two_launches_that_share_it(gpu, text, counts, known):
    problem = Problem.parse(f"decode-bf16-{text}-packed")
    inputs = make_inputs(problem, "large", seed=3)
    layout = inputs.layout
    layout.queries[:] = counts
    layout.query_starts = np.concatenate([[0], np.cumsum(counts)])
    inputs = replace(inputs, q=random((1, sum(counts), problem.heads_q, problem.head_dim)).array)
    gpu.compute = problem.dtype, problem.head_dim, problem.head_dim_v
    got, lse = call(problem, replace(inputs, q=inputs.q[0]), cu_seqlens_q=starts(*counts), check=True,
                    max_seqlen_q=max(counts) if known else None)
    assert [launch["kernel"].partition("_")[0] for launch in gpu.calls] == ["forward", "decode"]
    assert gpu.calls[1]["seqlen_q"] == 16 and gpu.calls[0]["min_queries"] == 17
    # Both begin at the end of what came before, the forward kernel on a stream of its own; what comes next waits for both.
    other, stream = gpu.streams
    (_, begin, _), _, (_, end, _), _ = gpu.runtime.log
    assert gpu.runtime.log == [("record", begin, stream), ("wait", begin, other), ("record", end, other), ("wait", end, stream)]
    assert len({other, stream, begin, end}) == 4 and gpu.dependent == gpu.calls[1]["pages"] == 0
    verdict = compare(problem, inputs, got.array[None], lse.array[None])
    assert verdict.ok, verdict.message
    again = [plan.match.problem.text for plan in plans._plans.values()]
    call(problem, replace(inputs, q=inputs.q[0]), cu_seqlens_q=starts(*counts), max_seqlen_q=max(counts) if known else None)
    assert [plan.match.problem.text for plan in plans._plans.values()] == again  # both were found


def test_a_mixed_batch_is_launched_without_clusters(gpu):
    """A config whose clusters merge the splits of full sequences: lengths of a mixed batch are on the device, so the host cuts
    nothing, and the grid need not be a multiple of anything."""
    kernel, problem = KERNELS["decode_mma"], Problem.parse("decode-bf16-b3-h8x2-q2-k2000-d64-causal-packed")
    config = kernel.config(problem.static, {**kernel.default(problem, plans.detect()).values, "cluster_merges": True})
    assert kernel.plan(replace(problem, batch=1, packed_queries=False), config)[0].cluster > 1
    cache = random((3, 2000, 2, 64))
    for counts in ((1, 100, 3), (1, 1, 2)):
        autotune.attention_with_kvcache(random((sum(counts), 8, 64)), cache, cache, cu_seqlens_q=starts(*counts),
                                        max_seqlen_q=max(counts), config=config)
    assert [launch["kernel"].partition("_")[0] for launch in gpu.calls] == ["forward", "decode", "decode"]
    assert set(gpu.clusters) == {1}


def test_mixed_batches_of_what_decode_kernels_refuse_are_one_launch(gpu):
    gpu.compute = "bf16", 12, 12
    arrays = random((25, 2, 12)), random((3, 40, 2, 12)), random((3, 40, 2, 12))
    for _ in range(2):
        autotune.attention_with_kvcache(*arrays, cu_seqlens_q=starts(20, 4, 1))
    assert [launch["kernel"] for launch in gpu.calls] == ["forward_simt"] * 2 and gpu.calls[0]["min_queries"] == 0
    with pytest.raises(AttentionError, match="decode_mma: head_dim is 12"):
        autotune.attention_with_kvcache(arrays[0], *(Tensor(np.zeros((3, 40, 2, 12), np.uint8)) for _ in range(2)),
                                        cu_seqlens_q=starts(20, 4, 1), max_seqlen_q=16)


def test_8_bit_caches_serve_few_queries_only(gpu):
    caches = [Tensor(np.zeros((3, 40, 2, 64), np.uint8)) for _ in range(2)]
    with pytest.raises(AttentionError, match="keys, values and output must have the dtype of the queries"):
        autotune.attention_with_kvcache(random((25, 2, 64)), *caches, cu_seqlens_q=starts(20, 4, 1))
    autotune.attention_with_kvcache(random((25, 2, 64)), *caches, cu_seqlens_q=starts(16, 8, 1), max_seqlen_q=16)
    assert [launch["kernel"] for launch in gpu.calls] == ["decode_mma"]


def test_growing_lengths_share_a_plan_and_split_counts_are_honoured(gpu):
    q, k, v = qkv(batch=1, seqlen_q=1, seqlen_k=2000)
    lengths = Tensor(np.array([1900], np.int32))
    for splits in (1, 3, 8):
        autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=splits)
        grid = gpu.launches[-1][0] if isinstance(gpu.launches[-1][0], int) else None
        assert gpu.calls[-1]["num_splits"] == splits and (splits == 1) == (gpu.calls[-1]["partial_o"] == 0), grid
    assert len(gpu.built) == 1
    for wrong in (0, -1, 2.0, True, 2**31):
        with pytest.raises(AttentionError, match="num_splits is"):
            autotune.attention_with_kvcache(q, k, v, num_splits=wrong)


def test_tickets_belong_to_a_stream_and_to_each_captured_launch(gpu):
    q, k, v = qkv(batch=1, seqlen_q=1, seqlen_k=2000)
    lengths = Tensor(np.array([2000], np.int32))  # which the host does not know: so no cluster can merge

    def drawn():
        autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=4)
        return gpu.calls[-1]["tickets"]

    first = drawn()
    assert first and drawn() == first
    gpu.capturing = True
    captured = {drawn() for _ in range(3)}
    assert len(captured) == 3 and first not in captured
    counters._reserve.clear()  # nothing is set aside: then the graph itself zeroes new ones
    assert drawn() not in captured | {first}


def test_kernels_that_run_side_by_side_share_no_tickets(gpu):
    problem = Problem.parse("decode-bf16-b2-h4x2-q150-k2000-d64-causal-page16-packed")
    inputs = make_inputs(problem, "random", seed=3)
    q = random((151, problem.heads_q, problem.head_dim))
    for _ in range(2):
        call(problem, replace(inputs, q=q.array), cu_seqlens_q=starts(1, 150), max_seqlen_q=150)
    assert [launch["kernel"] for launch in gpu.calls] == ["forward_wgmma", "decode_mma"] * 2
    (forward, decode), again = ([launch["tickets"] for launch in gpu.calls[i:i + 2]] for i in (0, 2))
    assert decode and forward and decode != forward and again == [forward, decode]


def test_unprepared_kernels_refuse_to_be_captured(gpu):
    gpu.capturing = True
    with pytest.raises(AttentionError, match="call autotune.prepare\\('decode-bf16"):
        autotune.attention_with_kvcache(*qkv(seqlen_q=1))
    gpu.capturing = False
    autotune.prepare("decode-bf16-b2-h4x2-q1-k7-d64", 0)
    gpu.capturing = True
    autotune.attention_with_kvcache(*qkv(seqlen_q=1))


def paged(**changes):
    arguments = dict(q=random((2, 1, 4, 64)), k_cache=random((9, 16, 2, 64)), v_cache=random((9, 16, 2, 64)),
                     page_table=Tensor(np.zeros((2, 4), np.int32)), cache_seqlens=Tensor(np.array([5, 64], np.int32)))
    arguments.update(changes)
    return [arguments.pop(name) for name in ("q", "k_cache", "v_cache")], arguments


@pytest.mark.parametrize("changes, words", [
    (dict(page_table=Tensor(np.zeros((2, 4), np.int64))), "page_table is int64; it must be int32"),
    (dict(page_table=Tensor(np.zeros((2, 4), np.int32), 1)), "page_table is on device 1 and q on device 0"),
    (dict(page_table=Tensor(np.zeros((3, 4), np.int32))), r"page_table has shape \(3, 4\); it must be \(2, max_pages\)"),
    (dict(page_table=[[0]]), "page_table is a list"),
    (dict(page_table=Tensor(np.zeros((2, 4), np.int32), -1)), "page_table is in host memory; it must be on the GPU that q is on"),
    (dict(cache_seqlens=Tensor(np.zeros(2, np.int32), -1)), "cache_seqlens is in host memory"),
    (dict(cache_seqlens=Tensor(np.zeros(3, np.int32))), r"cache_seqlens has shape \(3,\); it must be \(2,\)"),
    (dict(cache_seqlens=Tensor(np.zeros(2, np.float32))), "cache_seqlens is float32; it must be int32"),
    (dict(k_cache=random((9, 16, 2, 32))), "its last size must be q's, 64"),
    (dict(v_cache=random((9, 8, 2, 64))), "v_cache has shape"),
    (dict(v_cache=random((9, 16, 2, 64), "fp16")), "one dtype"),
    (dict(k_cache=random((9, 16, 3, 64)), v_cache=random((9, 16, 3, 64))), "heads_q must be a multiple of heads_kv"),
    (dict(page_table=None), "its first size must be q's batch, 2"),
    (dict(k_scale=1.0), "k_scale must be None: only an 8-bit cache has scales"),
    (dict(max_seqlen_k=40.0), "max_seqlen_k is 40.0; it must be an int"),
    (dict(max_seqlen_k="40"), "max_seqlen_k is '40'; it must be an int"),
    (dict(max_seqlen_q=3), "max_seqlen_q must be None without cu_seqlens_q"),
    (dict(check=True, cache_seqlens=Tensor(np.array([5, 65], np.int32))),
     r"cache_seqlens\[1\] is 65; the cache has room for 0 to 64"),
    (dict(check=True, page_table=Tensor(np.array([[0, 99, 99, 99], [1, 2, 9, 3]], np.int32))),
     r"page_table\[1, 2\] is 9; the cache has pages 0 to 8"),
    (dict(check=True, page_table=Tensor(np.array([[-1, 0, 0, 0], [1, 2, 3, 4]], np.int32))),
     r"page_table\[0, 0\] is -1; the cache has pages 0 to 8"),
    (dict(check=True, cache_seqlens=None, page_table=Tensor(np.array([[0, 1, 2, 3], [1, 2, 3, 9]], np.int32))),
     r"page_table\[1, 3\] is 9"),
    (dict(check=True, cache_seqlens=Tensor(np.array([5, -1], np.int32))), r"cache_seqlens\[1\] is -1"),
])
def test_what_does_not_fit_is_one_sentence(gpu, changes, words):
    arrays, keywords = paged(**changes)
    with pytest.raises(AttentionError, match=words):
        autotune.attention_with_kvcache(*arrays, **keywords)
    assert not gpu.launches


def test_contents_are_looked_at_on_request_and_never_in_a_capture(gpu):
    arrays, keywords = paged(cache_seqlens=Tensor(np.array([5, 99], np.int32)))
    autotune.attention_with_kvcache(*arrays, **keywords)  # counts as full
    gpu.capturing = True
    autotune.attention_with_kvcache(*arrays, **keywords)
    with pytest.raises(AttentionError, match="check must be False while a CUDA graph is captured"):
        autotune.attention_with_kvcache(*arrays, **keywords, check=True)


def starts(*counts):
    return Tensor(np.cumsum([0, *counts]).astype(np.int32))


PACKED = [("b4-h4x2-q1-k40-d64", (1, 0, 1, 1)), ("b3-h6x2-q5-k50-d64x32-causal-page16", (2, 5, 1)),
          ("b5-h4x1-q16-k33-d64-causal-left7-sinks-page3", (9, 0, 3, 1, 1)), ("b2-h2x2-q3-k20-d64-left4-right1-page1", (3, 3))]


@pytest.mark.parametrize("text, counts", PACKED)
@pytest.mark.parametrize("longest", [True, False])
def test_packed_queries_give_what_each_sequence_gives_alone(gpu, text, counts, longest):
    problem = Problem.parse(f"decode-bf16-{text}")
    inputs = make_inputs(problem, "large", seed=3)
    gpu.compute = problem.dtype, problem.head_dim, problem.head_dim_v
    q = np.concatenate([inputs.q[b, :count] for b, count in enumerate(counts)] + [inputs.q[0, :2]])  # 2 rows that are nobody's
    out = on_gpu(np.zeros((len(q), problem.heads_q, problem.head_dim_v), inputs.q.dtype)) if longest else None
    got, lse = call(problem, replace(inputs, q=q), check=True, cu_seqlens_q=starts(*counts), out=out,
                    max_seqlen_q=np.int64(max(counts)) if longest else None)
    assert out is None or got is out
    assert got.shape == (len(q), problem.heads_q, problem.head_dim_v) and lse.shape == (problem.heads_q, len(q))
    layout, position = inputs.layout, 0
    for b, count in enumerate(counts):
        if count:
            one = slice(b, b + 1)
            alone, alone_lse = autotune.attention_with_kvcache(
                on_gpu(inputs.q[one, :count]), *(Tensor(x if layout.table is not None else x[one]) for x in (inputs.k, inputs.v)),
                cache_seqlens=Tensor(layout.device_lengths()[one]), return_lse=True, causal=problem.causal,
                page_table=None if layout.table is None else Tensor(layout.table[one]),
                window=(problem.window_left, problem.window_right), sinks=None if inputs.sinks is None else Tensor(inputs.sinks))
            assert (got.array[position:position + count] == alone.array[0]).all()
            assert (lse.array[:, position:position + count] == alone_lse.array[0]).all()
        position += count


@pytest.mark.parametrize("changes, words", [
    (dict(q=random((2, 1, 4, 64))), r"q has shape \(2, 1, 4, 64\); with cu_seqlens_q it must be \(total_q, heads_q, head_dim\)"),
    (dict(out=random((2, 1, 4, 64))), r"out has shape \(2, 1, 4, 64\); with cu_seqlens_q it must be"),
    (dict(out=[1]), "out is a list"),
    (dict(cu_seqlens_q=[0, 1]), "cu_seqlens_q is a list"),
    (dict(cu_seqlens_q=Tensor(np.zeros((3, 1), np.int32))), r"cu_seqlens_q has shape \(3, 1\); it must be \(batch \+ 1,\)"),
    (dict(cu_seqlens_q=Tensor(np.zeros(0, np.int32))), "cu_seqlens_q is empty"),
    (dict(cu_seqlens_q=Tensor(np.zeros(3, np.int64))), "cu_seqlens_q is int64; it must be int32"),
    (dict(cu_seqlens_q=Tensor(np.zeros(3, np.int32), 1)), "cu_seqlens_q is on device 1 and q on device 0"),
    (dict(cu_seqlens_q=starts(1, 1, 1)), r"cache_seqlens has shape \(2,\); it must be \(3,\)"),
    (dict(page_table=None, cache_seqlens=None), "must be the number of sequences in cu_seqlens_q, 2"),
    (dict(max_seqlen_q=1.5), "max_seqlen_q is 1.5; it must be an int"), (dict(max_seqlen_q=-1), "max_seqlen_q is -1"),
    (dict(check=True, cu_seqlens_q=starts(1, 3)), "goes from 0 to 4; it must begin with 0 and end with at most the 3 queries"),
    (dict(check=True, cu_seqlens_q=starts(2, -1)), r"cu_seqlens_q\[1\] is 2 and cu_seqlens_q\[2\] is 1; a sequence has 0 to 3"),
    (dict(check=True, max_seqlen_q=1), r"cu_seqlens_q\[1\] is 1 and cu_seqlens_q\[2\] is 3; a sequence has 0 to 1 queries"),
])
def test_packed_queries_that_do_not_fit_are_one_sentence(gpu, changes, words):
    arrays, keywords = paged(**{"q": random((3, 4, 64)), "cu_seqlens_q": starts(1, 2), **changes})
    with pytest.raises(AttentionError, match=words):
        autotune.attention_with_kvcache(*arrays, **keywords)
    assert not gpu.launches


def test_scales_of_an_8_bit_cache_are_numbers_or_arrays(gpu):
    gpu.compute = "bf16", 64, 64, "e4m3"
    q, lengths = random((2, 1, 4, 64)), Tensor(np.array([7, 3], np.int32))
    k, v = (Tensor(np.random.default_rng(i).integers(0, 120, (2, 8, 2, 64), np.uint8)) for i in (1, 2))

    def out(k_scale, v_scale):
        return autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, k_scale=k_scale, v_scale=v_scale).array

    def array(*numbers):
        return Tensor(np.array(numbers, np.float32))

    plain = out(None, None)
    assert (out(1, 1.0) == plain).all() and (out(array(1.0), array(1.0, 1.0)) == plain).all()
    assert (out(array(0.5, 0.5), 2) == out(0.5, array(2.0))).all() and (out(0.5, 1) != plain).any()
    for wrong in (0, -1.0, float("nan"), "two", array(1, 2, 3), Tensor(np.ones(2))):
        with pytest.raises(AttentionError, match="v_scale"):
            out(None, wrong)
    assert np.isfinite(out(1e-300, None).astype(np.float32)).all()
    with pytest.raises(AttentionError, match="must be a finite number of at most 1e"):
        autotune.attention_with_kvcache(q, k, v, scale=1e20, k_scale=1e20)


def test_the_python_of_the_page_about_caches_runs(gpu, capsys):
    from test_docs import ROOT, blocks

    block, = blocks(ROOT / "docs" / "caches.md", "python")
    caches = {f"{name}_{kind}": random(shape) for name in "kv" for kind, shape in (
        ("cache", (2, 64, 2, 64)), ("pages", (9, 16, 2, 64)))}
    names = dict(caches, q=random((2, 1, 4, 64)), packed_q=random((41, 4, 64)), starts=starts(1, 40),
                 lengths=Tensor(np.array([60, 64], np.int32)), table=Tensor(np.arange(8, dtype=np.int32).reshape(2, 4)))
    exec(block, names)
    assert names["out"].shape == (41, 4, 64) and names["lse"].shape == (4, 41) and len(gpu.launches) == 4
    assert capsys.readouterr().out.count("kernel   ") == 2


def test_nothing_to_do_launches_nothing(gpu):
    arrays, keywords = paged(page_table=Tensor(np.zeros((2, 0), np.int32)))
    sinks = random((4,), "fp32")
    out, lse = autotune.attention_with_kvcache(*arrays, **keywords, sinks=sinks, return_lse=True)
    assert not gpu.launches and not out.array.any() and (lse.array[:, :, 0] == sinks.array).all()
    arrays[0] = random((3, 4, 64))
    for most in (None, 0):  # no room for a key; no queries of any sequence
        out, lse = autotune.attention_with_kvcache(*arrays, **keywords, cu_seqlens_q=starts(1, 2), max_seqlen_q=most,
                                                   return_lse=True)
        assert not gpu.launches and not out.array.any() and out.shape == (3, 4, 64)
        assert lse.shape == (4, 3) and np.isneginf(lse.array).all()
