"""`prefix`, the first keys that every query sees, in all three calls; and where it is not served, the sentence."""

import numpy as np
import pytest
from fake_arrays import GPU, Tensor, fake_gpu, qkv  # noqa: F401 (a fixture)
from test_attention import agrees
from test_kvcache import call as with_cache
from test_varlen import agrees as packed_agrees
from test_varlen import packed

import autotune
from autotune.calls import plans
from autotune.check.inputs import make_inputs
from autotune.check.verdict import compare
from autotune.compare.peers import PEERS
from autotune.core.problem import Problem
from autotune.device.arrays import AttentionError
from autotune.kernels import candidates


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (6, 6)])
@pytest.mark.parametrize("prefix", [0, 1, 4, np.int64(5), 6, 100])
def test_dense_calls_see_the_prefix(gpu, sizes, prefix):
    agrees(gpu, *qkv(seqlen_q=sizes[0], seqlen_k=sizes[1]), causal=True, prefix=prefix)


def test_what_a_prefix_does_not_change_runs_without_one(gpu):
    for prefix, kind in ((3, "causal"), (4, "prefix"), (6, "prefix"), (7, "full")):
        assert autotune.explain(*qkv(), causal=True, prefix=prefix).problem.mask == kind
    token = qkv(seqlen_q=1, seqlen_k=9)
    assert autotune.explain_with_kvcache(*token, prefix=5).parts[0].problem.mask == "full"


@pytest.mark.parametrize("prefix", [1, 3, 50])
def test_packed_calls_see_the_prefix_of_each_sequence(gpu, prefix):
    packed_agrees(gpu, packed(), causal=True, prefix=prefix)


@pytest.mark.parametrize("text", [
    "decode-fp16-b5-h4x1-q4-k40-d64-causal-prefix20", "decode-bf16-b5-h4x2-q3-k40-d64-causal-prefix9-page16",
    "decode-bf16-b4-h2x2-q20-k33-d64-causal-prefix25-page3", "decode-fp32-b3-h2x1-q4-k20-d48-causal-prefix8-page1"])
@pytest.mark.parametrize("kind", ["masked_nan", "needles"])
def test_calls_over_a_cache_see_the_prefix_of_each_sequence(gpu, text, kind):
    problem = Problem.parse(text)
    inputs = make_inputs(problem, kind, seed=3)
    gpu.compute = problem.dtype, problem.head_dim, problem.head_dim_v, problem.kv_dtype
    out, lse = with_cache(problem, inputs)
    verdict = compare(problem, inputs, out.array, lse.array)
    assert verdict.ok, verdict.message


def test_prefixes_of_a_bucket_share_a_plan(gpu):
    """A prefix is a length, which differs from call to call: it is a number of a launch."""
    gpu.compute = "bf16", 64, 64
    arrays = qkv(seqlen_q=300, seqlen_k=300)
    for prefix in (250, 251, 256):
        autotune.attention(*arrays, causal=True, prefix=prefix)
        assert gpu.calls[-1]["prefix"] == prefix and len(plans._plans) == 1
    match = autotune.lookup("forward-bf16-b2-h4x2-q300-k300-d64-causal-prefix251", GPU)
    assert autotune.lookup("forward-bf16-b2-h4x2-q300-k300-d64-causal-prefix256", GPU) is match


@pytest.mark.parametrize("keywords, words", [
    (dict(prefix=4), "prefix is 4; it needs causal, without a window"),
    (dict(prefix=4, causal=True, window=(3, None)), "prefix is 4; it needs causal, without a window"),
    (dict(prefix=-1, causal=True), "prefix is -1; it must be an int of at least 0"),
    (dict(prefix=1.5, causal=True), "prefix is 1.5; it must be an int"),
    (dict(prefix=True, causal=True), "prefix is True; it must be an int"),
    (dict(prefix=Tensor(np.array([3, 4], np.int32)), causal=True), "prefix is .*; it must be an int"),
])
@pytest.mark.parametrize("call", [autotune.attention, autotune.explain])
def test_what_no_call_serves_is_a_sentence(gpu, call, keywords, words):
    with pytest.raises(AttentionError, match=words):
        call(*qkv(), **keywords)
    assert not gpu.launches


def test_peers_never_take_it_for_causal():
    for text in ("forward-bf16-b1-h8x8-q512-k512-d64-causal-prefix100", "decode-bf16-b1-h8x8-q4-k512-d64-causal-prefix100-page16",
                 "forward-bf16-b1-h8x8-q512-k512-d64-causal-prefix100-varlen"):
        assert all("no prefix mask" in peer.reject(Problem.parse(text)) or "keys here" in peer.reject(Problem.parse(text))
                   for peer in PEERS.values())
        assert candidates(Problem.parse(text), GPU)


@pytest.mark.slow
def test_torch_records_and_traces_it():
    torch = pytest.importorskip("torch")
    from autotune.calls import autograd, gradients
    from autotune.device.arrays import library_of
    from autotune.core.masks import Bounds
    from autotune.integrations import ops

    seen = []

    def function(q, k, v, **keywords):
        seen.append(keywords)
        return q.clone(), q.new_zeros(q.shape[:3]).float()

    q = torch.zeros(1, 20, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "_must_be_served", lambda *arguments: None)
        patch.setattr(gradients, "differentiate", lambda library, q, k, v, out, lse, dout, dlse, sinks, slopes, mask, *rest: (
            seen.append(mask.bounds), torch.zeros_like(q), None, None, None)[1:])
        autograd.attend(function, library_of(q), q, q.detach(), q.detach(), (), None, bounds=Bounds(None, 0, 12), scale=None,
                        softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None).sum().backward()
    assert seen[0]["causal"] and seen[0]["prefix"] == 12 and seen[1] == Bounds(None, 0, 12)
    assert all("SymInt prefix=0" in schema for schema in ops.SCHEMAS.values())
    assert ops._mask(causal=True, prefix=7)["prefix"] == 7
