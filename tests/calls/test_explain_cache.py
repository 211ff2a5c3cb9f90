"""explain_with_kvcache() on a GPU made of numpy: what it says of decode steps, mixed batches and calls that attention takes."""

import numpy as np
import pytest
from fake_arrays import Tensor, aligned, fake_gpu, qkv, random  # noqa: F401 (a fixture)

import autotune
from autotune.device.arrays import AttentionError
from autotune.kernels import kernel_of


def paged(batch=2, pages=40, page_size=16, queries=1):
    table = np.arange(batch * (pages // batch), dtype=np.int32).reshape(batch, -1)
    return (random((batch, queries, 8, 64)), random((pages, page_size, 2, 64)), random((pages, page_size, 2, 64))), dict(
        page_table=Tensor(table), cache_seqlens=Tensor(np.full(batch, 100, np.int32)))


def test_a_decode_step_names_kernel_match_splits_and_copies(gpu):
    arrays, cache = paged(pages=4000)
    text = str(autotune.explain_with_kvcache(*arrays, **cache))
    assert "problem  decode-bf16-b2-h8x2-q1-k32000-d64-page16" in text and "kernel   decode_mma: tensor cores" in text
    assert "tier     near" in text and "autotune tune --problem decode-bf16" in text and "copies   none" in text
    assert "splits   keys of each sequence are cut on the device by the lengths that stand there, at most" in text
    assert "the last block of a sequence to arrive merges the pieces" in text and "refused" not in text
    assert "are cut into 3, " in str(autotune.explain_with_kvcache(*arrays, **cache, num_splits=3))
    assert not gpu.launches and not gpu.built


def test_a_full_dense_cache_is_cut_by_the_host(gpu):
    q, k, v = qkv(batch=1, seqlen_q=1, seqlen_k=2000)
    explanation = autotune.explain_with_kvcache(q, k, v)
    assert [part.problem.text for part in explanation.parts] == ["decode-bf16-b1-h4x2-q1-k2000-d64"]
    part = explanation.parts[0]
    launches = kernel_of(part.match.config).launches(part.problem, part.match.config)
    assert launches.splits > 1 and launches.grid == 2 * launches.splits  # for each of the 2 key/value heads
    assert explanation.splits == str(launches)
    assert explanation.splits.startswith(f"keys of each sequence are cut into {launches.splits}, {launches.grid} blocks in all")
    assert "keys are not cut: 2 blocks" in str(autotune.explain_with_kvcache(q, k, v, num_splits=1))


def test_what_is_copied_and_why(gpu):
    q, k, v = qkv(batch=2, seqlen_q=1, seqlen_k=40)
    odd = Tensor(aligned((2, 40, 2, 68), k.dtype)[..., :64])
    copies = autotune.explain_with_kvcache(q, odd, v, scale=-1.0).parts[0].copies
    assert [copy.split(":")[0] for copy in copies] == ["q is negated, because scale is negative", "k_cache is copied"]
    assert "are not multiples of 8 elements" in copies[1]
    before = gpu.library.copies
    autotune.attention_with_kvcache(q, odd, v)
    assert gpu.library.copies == before + 1


def test_what_attention_takes_is_explained_as_such(gpu):
    assert autotune.explain_with_kvcache(*qkv(seqlen_q=40, seqlen_k=40)).kernel.name == "forward_wgmma"
    assert autotune.explain_with_kvcache(*qkv(dtype="fp32")).kernel.name == "forward_simt"
    arrays, cache = paged()
    cache["page_table"] = Tensor(np.zeros((2, 0), np.int32))
    assert str(autotune.explain_with_kvcache(*arrays, **cache)).startswith("nothing is launched")


def test_it_raises_as_the_call_does(gpu):
    arrays, cache = paged()
    with pytest.raises(AttentionError, match="page_table is int64; it must be int32"):
        autotune.explain_with_kvcache(*arrays, **{**cache, "page_table": Tensor(np.zeros((2, 4), np.int64))})


def test_a_mixed_batch_has_two_parts(gpu):
    (_, k, v), cache = paged(pages=400)
    starts = Tensor(np.array([0, 40, 41], np.int32))
    explanation = autotune.explain_with_kvcache(random((41, 8, 64)), k, v, **cache, cu_seqlens_q=starts)
    few, many = explanation.parts
    assert few.problem.text == "decode-bf16-b2-h8x2-q2-k3200-d64-causal-page16" and few.kernel.name == "decode_mma"
    assert many.problem.text == "forward-bf16-b2-h8x2-q41-k3200-d64-causal-page16" and many.kernel.name.startswith("forward_")
    assert str(explanation).count("splits   ") == 1 and str(explanation).count("kernel   ") == 2
    assert str(explanation).endswith("run at the same time; blocks of the second have SMs first")
    short = autotune.explain_with_kvcache(random((41, 8, 64)), k, v, **cache, cu_seqlens_q=starts, max_seqlen_q=16)
    assert [part.problem.seqlen_q for part in short.parts] == [16] and "at the same time" not in str(short)
    autotune.attention_with_kvcache(random((41, 8, 64)), k, v, **cache, cu_seqlens_q=starts)
    assert [launch["kernel"] for launch in gpu.calls] == [many.kernel.name, few.kernel.name]


def test_what_is_named_can_be_prepared_for_a_capture(gpu):
    (_, k, v), cache = paged(pages=400)
    call = (random((41, 8, 64)), k, v), dict(cache, cu_seqlens_q=Tensor(np.array([0, 40, 41], np.int32)))
    gpu.capturing = True
    with pytest.raises(AttentionError, match="call autotune.prepare"):
        autotune.attention_with_kvcache(*call[0], **call[1])
    gpu.capturing = False
    autotune.prepare([part.problem for part in autotune.explain_with_kvcache(*call[0], **call[1]).parts], 0)
    gpu.capturing = True
    autotune.attention_with_kvcache(*call[0], **call[1])
    assert len(gpu.calls) == 2


def test_what_no_decode_kernel_takes_is_one_part(gpu):
    arrays, cache = paged()
    small = [Tensor(x.array[..., :12]) for x in arrays]
    part, = autotune.explain_with_kvcache(*small, **cache).parts
    assert part.kernel.name == "forward_simt" and part.problem.op == "forward" and "head_dim" in part.refused["forward_mma"]
