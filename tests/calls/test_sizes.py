"""What only a launch needs follows from a call's own sizes, not from its bucket's; what lookup says is what is launched."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_arrays import GPU, Tensor, fake_gpu, random  # noqa: F401 (a fixture)

import autotune
from autotune.calls import plans
from autotune.core.problem import Problem
from autotune.database.lookup import Match
from autotune.kernels import KERNELS

DECODE = ["decode-bf16-b17-h28x4-q1-k777-d128", "decode-bf16-b33-h32x8-q1-k100-d64", "decode-bf16-b33-h32x8-q1-k777-d128",
          "decode-bf16-b70-h40x8-q2-k301-d64-causal", "decode-bf16-b34-h8x8-q1-k520-d64-page16"]


def launched(gpu):
    """(kernel, grid, Params but for addresses of what is lent and written) of each launch, and what was lent; forgets them."""
    lent = {"partial_o", "partial_statistics", "tickets", "workspace", "out", "out_map"}
    seen = [(call["kernel"], launch[2], {name: value for name, value in call.items() if name not in lent})
            for launch, call in zip(gpu.launches, gpu.calls)]
    workspaces = list(gpu.library.workspaces)
    for log in (gpu.launches, gpu.calls, gpu.library.workspaces):
        log.clear()
    return seen, workspaces


def arrays_of(p):
    q = random((p.batch, p.seqlen_q, p.heads_q, p.head_dim))
    if not p.page_size:
        return q, random((p.batch, p.seqlen_k, p.heads_kv, p.head_dim)), {}
    pages = -(-p.seqlen_k // p.page_size)
    table = np.arange(p.batch * pages, dtype=np.int32).reshape(p.batch, pages)
    return q, random((p.batch * pages, p.page_size, p.heads_kv, p.head_dim)), {"page_table": Tensor(table),
                                                                                "max_seqlen_k": p.seqlen_k}


@pytest.mark.slow
@pytest.mark.parametrize("text", DECODE)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_decode_call_is_launched_as_a_plan_for_exactly_its_sizes(gpu, text, on_device):
    p = Problem.parse(text)
    q, cache, keywords = arrays_of(p)
    if on_device:
        keywords["cache_seqlens"] = Tensor(np.full(p.batch, p.seqlen_k, np.int32))
    autotune.attention_with_kvcache(q, cache, cache, **keywords)  # of the bucket's plan
    by_bucket = launched(gpu)
    exact = autotune.lookup(p, GPU).config
    autotune.attention_with_kvcache(q, cache, cache, config=exact, **keywords)
    assert by_bucket == launched(gpu) and by_bucket[0][0][2]["pieces"] == exact["pieces"]
    explained = autotune.explain_with_kvcache(q, cache, cache, **keywords)
    assert explained.parts[0].match.config == exact and f"{by_bucket[0][0][1]} blocks" in explained.splits


@pytest.mark.slow
def test_sizes_of_one_bucket_are_launched_unlike(gpu):
    """33 sequences of 8 heads are 264 pieces, 40 are 320; 1.5 times as many are launched."""
    pieces = {}
    for batch in (40, 33, 40, 36):
        q, cache = random((batch, 1, 32, 128)), random((batch, 300, 8, 128))
        autotune.attention_with_kvcache(q, cache, cache, cache_seqlens=Tensor(np.full(batch, 300, np.int32)))
        pieces.setdefault(batch, gpu.calls[-1]["pieces"])
        assert gpu.calls[-1]["pieces"] == pieces[batch]
    assert len(plans._plans) == 1 and pieces[33] < pieces[40]


@pytest.mark.slow
def test_splits_of_a_forward_call_and_their_workspace(gpu, monkeypatch):
    kernel, bucket = KERNELS["forward_wgmma"], Problem(heads_q=4, heads_kv=2, seqlen_q=104, seqlen_k=3072, head_dim=64)
    match = Match(kernel.default(bucket, GPU), "near", "measured", bucket, GPU)
    assert match.config["split_keys"]
    monkeypatch.setattr(plans, "of_bucket", lambda problem, gpu: match)
    monkeypatch.setattr(Match, "confirmed", lambda self, binary: self)
    gpu.compute, seen = ("bf16", 64, 64), set()
    for rows, keys in ((100, 3000), (104, 3072), (97, 2817)):
        q, k = random((1, rows, 4, 64)), random((1, keys, 2, 64))
        autotune.attention(q, k, k)
        by_bucket = launched(gpu)
        p = replace(bucket, seqlen_q=rows, seqlen_k=keys)
        config = match.at(p).config
        autotune.attention(q, k, k, config=config)
        assert by_bucket == launched(gpu) and by_bucket[0][0][2]["num_splits"] == config["num_splits"]
        assert by_bucket[1] == [(kernel.workspace_bytes(p, config) // 4, False)]
        seen.add(config["num_splits"])
    assert len(seen) > 1


def test_a_config_of_the_callers_own_is_launched_as_it_is(gpu):
    q, cache = random((33, 1, 32, 128)), random((33, 300, 8, 128))
    config = autotune.lookup("decode-bf16-b33-h32x8-q1-k300-d128", GPU).config
    for pieces in (64, 4096):
        autotune.attention_with_kvcache(q, cache, cache, cache_seqlens=Tensor(np.full(33, 300, np.int32)),
                                        config=str(config).replace(f"pieces={config['pieces']}", f"pieces={pieces}"))
        assert gpu.calls[-1]["pieces"] == pieces


def test_what_was_measured_as_better_than_what_suits_stays_so_for_other_sizes():
    """A record with 2 times the pieces that suit its sizes has 2 times those that suit other sizes, and its own at its own."""
    kernel, known = KERNELS["decode_mma"], Problem.parse("decode-bf16-b64-h32x8-q1-k4096-d128")
    config = kernel.default(known, GPU)
    suits = kernel.suited(known, config, GPU)["pieces"]
    doubled = kernel.with_sized(known.static, config, {"pieces": 1056})
    assert (suits, kernel.resized(known, doubled, GPU)(64, 1, 4096)) == (512, {"pieces": 1056})
    assert kernel.resized(known, config, GPU)(33, 1, 4096) == {"pieces": 396}
    assert kernel.resized(known, doubled, GPU)(33, 1, 4096) == {"pieces": 792}


def test_lengths_beyond_what_was_expected_have_blocks_and_workspace(gpu, monkeypatch):
    """A graph that was captured for short sequences is replayed for full ones: `max_seqlen_k` chooses pieces, not how many there
    can be."""
    monkeypatch.setattr("autotune.device.workspaces.MOST_BYTES", 0)
    q, cache = random((4, 1, 8, 64)), random((4, 4096, 2, 64))
    lengths = Tensor(np.full(4, 100, np.int32))
    kernel = KERNELS["decode_mma"]
    for expected in (100, 4096):
        autotune.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths, max_seqlen_k=expected)
        (((_, grid, params),), workspaces) = launched(gpu)
        config = autotune.lookup(Problem.parse(f"decode-bf16-b4-h8x2-q1-k{expected}-d64"), GPU).config
        most = kernel.launches(Problem.parse("decode-bf16-b4-h8x2-q1-k4096-d64"), config, uniform=False)
        assert grid == most.grid and workspaces == [(most.slots * most.rows * 64 + most.slots * most.rows * 2, False)]


@pytest.mark.slow
def test_a_record_of_other_sizes_than_its_buckets_is_launched_as_it_was_measured(gpu, monkeypatch):
    """Its pieces are those of the sizes that were timed; for others of the bucket what suits them, as many times as there."""
    known = Problem.parse("decode-bf16-b33-h32x8-q1-k777-d128")
    kernel = KERNELS["decode_mma"]
    config = kernel.with_sized(known.static, kernel.default(known, GPU), {"pieces": 792})  # 2 times the 396 that suit it
    record = SimpleNamespace(problem=known, config=config, evidence="measured", nvrtc="13.0")
    match = Match(config, "exact", "measured", known.bucketed(), GPU, record)
    monkeypatch.setattr(plans, "of_bucket", lambda problem, gpu: match)
    monkeypatch.setattr(Match, "confirmed", lambda self, binary: self)
    for batch, pieces in ((33, 792), (40, 1056)):
        q, cache = random((batch, 1, 32, 128)), random((batch, 777, 8, 128))
        autotune.attention_with_kvcache(q, cache, cache, cache_seqlens=Tensor(np.full(batch, 777, np.int32)))
        assert gpu.calls[-1]["pieces"] == pieces == match.at(replace(known, batch=batch)).config["pieces"]
