"""Plans: keys, bounds, threads, capture, prepare, and the warning for what was never tuned."""

import math
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
from fake_arrays import GPU, Tensor, fake_gpu, install, qkv, random  # noqa: F401 (a fixture)
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import drawn

import autotune
from autotune.calls import binding, plans
from autotune.calls.call import Call
from autotune.device.arrays import AttentionError
from autotune.kernels import KERNELS
from autotune.kernels.forward.base import ForwardKernel
from autotune.calls.plans import UntunedWarning
from autotune.core.problem import Problem, ProblemError
from autotune.models import serving


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")
@settings(max_examples=200)
@given(data=st.data())
def test_the_key_of_a_call_is_the_key_of_its_problem(data):
    """attention() writes the key out without a Problem; prepare() makes it from one. They must be the same tuple."""
    draw = data.draw
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        length = st.integers(1, 40)
        sizes = dict(batch=draw(st.integers(1, 5)), seqlen_q=draw(length), seqlen_k=draw(length),
                     heads_q=draw(st.sampled_from((2, 4))), heads_kv=draw(st.sampled_from((1, 2))))
        causal, side = draw(st.booleans()), st.none() | st.integers(0, 45)
        window = draw(side), draw(side)
        sinks = Tensor(np.zeros(sizes["heads_q"], np.float32)) if draw(st.booleans()) else None
        asked = []
        patch.setattr(plans, "find", lambda key: asked.append(key) or plans._plans.get(key))
        q, k, v = qkv(**sizes)
        autotune.attention(q, k, v, causal=causal, window=window, sinks=sinks)
        problem = Problem(**sizes, head_dim=64, window_left=window[0], window_right=0 if causal else window[1],
                          sinks=sinks is not None)
        assert asked == [Call.of(problem.simplified(), 0).key()] and asked[0] in plans._plans


FORWARD = [name for name, kernel in KERNELS.items() if isinstance(kernel, ForwardKernel)]


@pytest.mark.slow
@given(kernel=st.sampled_from(FORWARD), data=st.data(), scale=st.floats(1e-3, 10), sink_dtype=st.integers(0, 3))
def test_what_a_warm_call_launches_is_the_kernels_plan_and_arguments(kernel, data, scale, sink_dtype):
    kernel, length, side = KERNELS[kernel], st.integers(0, 10**6), st.none() | st.integers(0, 10**9)
    like = Problem(heads_q=8, heads_kv=2, head_dim=64, window_left=data.draw(side), window_right=data.draw(side))
    config = drawn(kernel, like.static, GPU, data.draw(st.randoms()))
    sizes = data.draw(st.integers(0, 100)), data.draw(length), data.draw(length)
    problem = replace(like, batch=sizes[0], seqlen_q=sizes[1], seqlen_k=sizes[2])
    call = Call.of(problem, 0)
    for n, name in enumerate(("q", "k", "v", "out", "lse", "sinks", "alibi_slopes", "pages", "tickets")):
        setattr(call, name, 1024 * n)
    for tensor in ("q", "k", "v", "out"):
        call.set_strides(tensor, 800, 80, 8)
    call.batch, call.seqlen_q, call.seqlen_k, call.scale, call.sink_dtype, call.lent = *sizes, scale, sink_dtype, ()
    bound = binding.bind(like, config, lambda blocks: 2**40, lambda *_: b"")
    grids = bound.sized(call)
    for name, _ in call.lent:
        setattr(call, name, 64)
    assert grids == tuple(step.grid for step in kernel.plan(problem, config))
    heads = 2 * math.ceil(4 / kernel.block_heads(config))  # sets of heads that a block may own
    blocks = sizes[0] * heads * math.ceil(sizes[1] / kernel.block_queries(config))
    assert grids[0] == blocks * config.values.get("num_splits", 1)
    bound.pack(call, params := bytearray(bound.packer.size))
    named = dict(zip([field.name for field in kernel.params(like.static, config)], bound.packer.unpack(params)))
    assert (named["batch"], named["seqlen_q"], named["seqlen_k"], named["heads_q"], named["group"]) == (*sizes, 8, 4)
    assert named["sink_dtype"] == sink_dtype and named["scale_log2"] == pytest.approx(scale * math.log2(math.e))
    assert all(named[p.name] == config[p.name] for p in kernel.parameters if p.name in named)


def test_a_call_that_splits_keys_lends_a_workspace_to_both_of_its_launches(gpu):
    q, k, v = qkv(batch=1, seqlen_q=100, seqlen_k=3000)
    gpu.compute = "bf16", 64, 64
    config = KERNELS["forward_wgmma"].default(Problem(heads_q=4, heads_kv=2, seqlen_q=100, seqlen_k=3000, head_dim=64), GPU)
    out, lse = autotune.attention(q, k, v, return_lse=True, config=config)
    first, second = gpu.calls
    assert config["num_splits"] == first["num_splits"] > 1 and first == second and first["workspace"]
    floats = config["num_splits"] * 4 * 100 * 66
    assert gpu.library.workspaces == [(floats, False)] and not np.isnan(lse.array).any()
    gpu.capturing = True
    autotune.attention(q, k, v, out=out, config=config)
    assert gpu.library.workspaces[1:] == [(floats, True)] and len(gpu.calls) == 4


def test_growing_lengths_stay_warm(gpu):
    q, k, v = qkv(seqlen_k=257)
    for length in range(257, 289):
        k, v = random((2, length, 2, 64)), random((2, length, 2, 64))
        autotune.attention(q, k, v, causal=True)
    assert len(plans._plans) == 1 and len(gpu.built) == 1 and len(gpu.launches) == 32
    assert [call["seqlen_k"] for call in gpu.calls] == list(range(257, 289))


def test_plans_are_bounded_and_binaries_are_shared(gpu, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 4)
    q, _, _ = qkv()
    for length in range(1, 12):
        autotune.attention(q, random((2, length, 2, 64)), random((2, length, 2, 64)))
    assert len(plans._plans) == 4 and len(gpu.built) <= 3  # of 11 lengths; which configs serve them is lookup's choice


def test_threads_share_one_plan(gpu):
    q, k, v = qkv()
    failures = []

    def work():
        try:
            for _ in range(20):
                autotune.attention(q, k, v, causal=True)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(gpu.launches) == 160 and len(gpu.modules) == 1


def test_under_capture_an_unprepared_kernel_raises_and_names_prepare(gpu):
    q, k, v = qkv()
    gpu.capturing = True
    with pytest.raises(AttentionError, match=r"autotune.prepare\('forward-bf16-b2-h4x2-q5-k7-d64-causal'\)"):
        autotune.attention(q, k, v, causal=True)
    assert not gpu.modules
    autotune.prepare("forward-bf16-b2-h4x2-q5-k7-d64-causal")
    autotune.attention(q, k, v, causal=True)
    longer = random((2, 9, 2, 64))
    autotune.attention(q, longer, longer, causal=True)  # another bucket whose binary is loaded already
    assert len(gpu.launches) == 2 and len(gpu.modules) == 1


def test_under_capture_a_kernel_that_must_stand_in_is_named_before_it_is_loaded(gpu):
    q, k, v = qkv()
    one_for_all = Tensor(np.broadcast_to(k.array[:1], k.shape))
    autotune.attention(q, k, v)
    gpu.capturing = True
    with pytest.raises(AttentionError, match="make this call once, with arrays of these strides, before the capture"):
        autotune.attention(q, one_for_all, v)
    gpu.capturing = False
    autotune.attention(q, one_for_all, v)
    gpu.capturing = True
    autotune.attention(q, one_for_all, v)
    assert [call["kernel"] for call in gpu.calls] == ["forward_wgmma", "forward_mma", "forward_mma"]


def test_prepare_takes_problems_texts_and_models(gpu, monkeypatch):
    monkeypatch.setattr(serving, "buckets", lambda longest: [16, 1024])  # of a model's lengths, two
    matches = autotune.prepare([Problem(seqlen_q=4, seqlen_k=4), "forward-fp16-b1-h1x1-q4-k4-d64"])
    assert [match.problem.text for match in matches] == ["forward-bf16-b1-h1x1-q4-k4-d128", "forward-fp16-b1-h1x1-q4-k4-d64"]
    assert len(gpu.modules) == 2
    assert len(autotune.prepare("llama-3-8b", gpu=1)) > 1 and gpu.modules[-1] == 1001
    before = list(gpu.modules)
    autotune.prepare("forward-bf16-b1-h1x1-q4-k4-d256", gpu="nvidia-h200")  # fills the cache folder only
    assert gpu.modules == before
    with pytest.raises(ValueError, match="no model is called"):
        autotune.prepare("no-such-model")
    with pytest.raises(ProblemError, match="malformed"):
        autotune.prepare("forward-bf16")


def test_an_untuned_problem_is_served_and_says_so_once(gpu):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for length in (7, 300, 5000):
            k = random((2, length, 2, 64))
            autotune.attention(qkv()[0], k, k, causal=True)
    (warning,) = [w for w in seen if w.category is UntunedWarning]
    assert "`autotune tune --problem forward-bf16-b2-h4x2-q5-k7-d64-causal` tunes it in at most 1 min" in str(warning.message)
    assert warning.filename == __file__
