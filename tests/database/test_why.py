"""What is said of a match in full, and how many calls each tier has served."""

from __future__ import annotations

import importlib

import numpy as np
from fake_arrays import GPU, Tensor, fake_gpu, qkv, random  # noqa: F401 (a fixture)
from test_lookup import H200, LEGAL, db, record  # noqa: F401 (a fixture)

import autotune
from autotune.calls import plans
from autotune.database import why
from autotune.kernels import KERNELS, kernel_of
from autotune.database.lookup import TIERS, Match
from autotune.core.problem import Problem

lookup = importlib.import_module("autotune.database.lookup")

PROBLEM = Problem.parse("forward-bf16-b1-h8x2-q512-k512-d64-causal")


def test_every_tier_and_evidence_is_explained():
    assert tuple(why.TIERS) == TIERS and tuple(why.EVIDENCE) == lookup.EVIDENCE


def test_kernels_that_are_preferred_but_do_not_run_have_a_reason():
    match = autotune.lookup("forward-fp32-b1-h8x2-q512-k512-d64-causal", GPU)
    assert match.config.kernel == "forward_simt"
    refused = why.passed_over(match)
    assert list(refused) == list(KERNELS)[:list(KERNELS).index("forward_simt")]
    assert all("fp32" in reason for reason in refused.values())
    slower = Match(KERNELS["forward_simt"].default(PROBLEM, GPU), "exact", "measured", PROBLEM, GPU)
    assert why.passed_over(slower)["forward_mma"] == "it can serve this, but the database has a faster config"


def test_lines_of_a_default_name_tier_evidence_and_slowdown():
    lines = dict(why.lines(autotune.lookup(PROBLEM, GPU), PROBLEM))
    assert lines["tier"].startswith("default: nothing that was measured helps") and lines["evidence"].startswith("predicted: "
                                                                                                                 "never timed")
    assert "10 %, at most 60 % above" in lines["slowdown"] and "never timed" in lines["expected"] and "next" not in lines


def test_lines_of_a_near_match_say_what_was_expected_and_what_came_next(db):  # noqa: F811
    facts = dict(default_config=lookup.default_config(lookup.Problem.parse("forward-bf16-b1-h32x8-q8192-k8192-d128-causal"),
                                                      H200),
                 default_time_us=900.0)
    db(record("forward-bf16-b1-h32x8-q8192-k8192-d128-causal", **facts),
       record("forward-bf16-b1-h32x8-q4096-k4096-d128-causal", config=LEGAL[1], **facts))
    near = Problem.parse("forward-bf16-b1-h32x8-q7168-k7168-d128-causal")
    lines = why.lines(lookup.lookup(near, H200), near)
    named = dict(lines)
    assert named["tier"].startswith("near: the config with the least time to expect")
    assert "us (its own account" in named["expected"]
    assert "timed on forward-bf16-b1-h32x8-q8192-k8192-d128-causal" in named["expected"]
    following = [text for name, text in lines if name == "next"]
    assert following and all("for doubt: forward_wgmma" in text for text in following)


def test_decode_says_how_keys_are_cut():
    problem = Problem.parse("decode-bf16-b1-h32x8-q1-k65536-d128")
    lines = why.lines(autotune.lookup(problem, GPU), problem)
    assert not [text for name, text in lines if name == "refused"]  # kernels of another operation are no choice
    full, lengths = [text for name, text in lines if name == "splits"]
    assert full.startswith("full sequences: keys of each sequence are cut into 16, 128 blocks in all; the last block")
    assert "with cache_seqlens: keys of each sequence are cut on the device" in lengths
    problem = Problem.parse("decode-bf16-b1024-h32x8-q1-k32-d128-page16")
    config = KERNELS["decode_mma"].default(problem, GPU)
    said = dict(why.lines(Match(config, "default", "predicted", problem, GPU), problem))
    assert said["splits"].startswith("keys are not cut: 8192 blocks")
    config = KERNELS["decode_mma"].config(problem.static, {**config.values, "last_block_merges": False})
    long = Problem.parse("decode-bf16-b1-h32x8-q1-k65536-d128-page16")
    assert "a second kernel of 8 blocks merges" in dict(why.lines(Match(config, "default", "predicted", long, GPU),
                                                                  long))["splits"]


def test_calls_are_counted_by_tier(gpu):
    q, k, v = qkv()
    before = autotune.stats()
    assert tuple(before) == TIERS
    for _ in range(3):
        autotune.attention(q, k, v, causal=True)
    autotune.attention(q, Tensor(np.broadcast_to(k.array[:1], k.shape)), v)  # another kernel stands in
    autotune.attention(*qkv(seqlen_k=0))  # launches nothing
    assert autotune.stats() == {**before, "default": before["default"] + 4} and len(gpu.launches) == 4


def test_dropped_plans_keep_their_count(gpu, monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 2)
    before = autotune.stats()["default"]
    q, _, _ = qkv()
    for length in range(1, 8):
        autotune.attention(q, random((2, length, 2, 64)), random((2, length, 2, 64)))
    assert autotune.stats()["default"] == before + 7 and len(plans._plans) == 2


def test_explain_says_what_tier_and_evidence_mean(gpu):
    text = str(autotune.explain(*qkv(), causal=True))
    assert "tier     default: nothing that was measured helps" in text and "evidence predicted: never timed" in text
    assert kernel_of(autotune.explain(*qkv()).match.config) is autotune.explain(*qkv()).kernel
