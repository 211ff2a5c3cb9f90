"""Models expand into the problems that their published shapes say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.gpu import by_name as gpu_by_name
from autotune.database.lookup import lookup
from autotune.models.catalogue import ModelError, by_name, catalogue, problems_of_model, read_model
from autotune.core.problem import Problem

GPU = gpu_by_name("nvidia-h200")
ENTRY = {"title": "T", "source": "s", "layers": 4, "dtype": "bf16", "heads_q": 8, "heads_kv": 2, "head_dim": 64,
         "attention": {"causal": {"layers": 3, "prefill": [128]}, "sliding": {"layers": 1, "left": 31, "prefill": [128, 256]}}}


def test_llama_3_8b_is_its_seven_prompt_lengths():
    assert [p.text for p in problems_of_model("llama-3-8b")] == [
        f"forward-bf16-b1-h32x8-q{n}-k{n}-d128-causal" for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536)]


def test_gpt_oss_alternates_full_and_sliding_layers_with_sinks():
    model = by_name("gpt-oss-120b")
    assert model.layers == 36 and [kind.layers for kind in model.attention] == [18, 18]
    assert {(p.mask, p.window_left) for p in model.problems} == {("causal", None), ("window", 127)}
    assert all(p.sinks and p.causal and (p.heads_q, p.heads_kv, p.head_dim) == (64, 8, 64) for p in model.problems)


def test_the_catalogue_has_the_models_each_with_a_source_and_few_enough_problems_to_tune():
    models = catalogue()
    assert list(models) == ["llama-3-8b", "llama-3-70b", "qwen-3-8b", "qwen-3-32b", "mistral-7b", "gemma-2-9b", "gemma-3-27b",
                            "gpt-oss-20b", "gpt-oss-120b", "phi-3-mini", "deepseek-v3"]
    problems = {p for model in models.values() for p in model.problems}
    assert len(problems) <= 60 and all(Problem.parse(p.text) == p == p.simplified() for p in problems)
    assert all("config.json of " in model.source and "://" not in model.source and model.title for model in models.values())
    assert all(len(set(model.problems)) == len(model.problems) for model in models.values())


@pytest.mark.parametrize("name, layers, texts", [
    ("llama-3-70b", {"causal": 80}, ["forward-bf16-b1-h64x8-q8192-k8192-d128-causal"]),
    ("qwen-3-32b", {"causal": 64}, ["forward-bf16-b1-h64x8-q8192-k8192-d128-causal"]),
    ("mistral-7b", {"sliding": 32}, ["forward-bf16-b1-h32x8-q1024-k1024-d128-causal",
                                     "forward-bf16-b1-h32x8-q8192-k8192-d128-causal-left4095"]),
    ("gemma-2-9b", {"sliding": 21, "causal": 21}, ["forward-bf16-b1-h16x8-q8192-k8192-d256-causal-left4095-softcap50"]),
    ("gemma-3-27b", {"sliding": 52, "causal": 10}, ["forward-bf16-b1-h32x16-q32768-k32768-d128-causal-left1023"]),
    ("gpt-oss-20b", {"sliding": 12, "causal": 12}, ["forward-bf16-b1-h64x8-q65536-k65536-d64-causal-left127-sinks"]),
    ("phi-3-mini", {"sliding": 32}, ["forward-bf16-b1-h32x32-q4096-k4096-d96-causal-left2046"]),
    ("deepseek-v3", {"causal": 61}, ["forward-bf16-b1-h128x128-q8192-k8192-d192x128-causal"]),
])
def test_published_shapes(name, layers, texts):
    model = by_name(name)
    assert {kind.name: kind.layers for kind in model.attention} == layers
    assert set(texts) <= {p.text for p in model.problems}


def test_decode_steps_are_new_tokens_over_caches_of_several_kinds():
    llama = [p.text for p in by_name("llama-3-8b").decode_problems]
    assert llama[:2] == ["decode-bf16-b1-h32x8-q1-k4096-d128", "decode-bf16-b32-h32x8-q1-k8192-d128-page16"]
    assert {"decode-bf16-b32-h32x8-q4-k8192-d128-causal-page16", "decode-bf16-b32-h32x8-q1-k8192-d128-kve4m3"} <= set(llama)
    assert {(p.window_left, p.sinks) for p in by_name("gpt-oss-20b").decode_problems} == {(127, True), (None, True)}
    trained = by_name("gpt-oss-20b").training_problems
    assert [p.op for p in trained] == ["backward"] * len(trained) and {p.sinks for p in trained} == {True}
    assert by_name("deepseek-v3").decode_problems == ()  # its decode is over compressed keys
    assert [p.text for p in read_model("m", ENTRY).decode_problems][-2:] == [
        "decode-bf16-b64-h8x2-q1-k4096-d64-left31", "decode-bf16-b32-h8x2-q1-k8192-d64-left31-page16"]


@pytest.mark.slow
def test_few_decode_steps_are_tuned_and_every_size_is_served_by_what_was_measured():
    tuned = {p for model in catalogue().values() for p in model.decode_problems}
    assert 20 <= len(tuned) <= 100 and all(Problem.parse(p.text) == p == p.simplified() for p in tuned)
    sizes = [(2**i, 2**j) for i in range(9) for j in range(10, 18)]  # batch 1 to 256, 1k to 128k
    for first in [p for p in tuned if (p.batch, p.kv, p.seqlen_q, p.kv_dtype) == (1, "dense", 1, "bf16")]:
        for kind in (first, replace(first, kv="paged", page_size=16)):
            for problem in (replace(kind, batch=batch, seqlen_k=keys) for batch, keys in sizes):
                if problem.compulsory_bytes <= 40e9:
                    match = lookup(problem, GPU)
                    assert match.tier in ("exact", "near") and match.evidence == "measured", problem


def test_read_model_takes_each_kind_at_each_length():
    model = read_model("m", ENTRY)
    assert [p.text for p in model.problems] == [
        "forward-bf16-b1-h8x2-q128-k128-d64-causal", "forward-bf16-b1-h8x2-q128-k128-d64-causal-left31",
        "forward-bf16-b1-h8x2-q256-k256-d64-causal-left31"]


def test_a_kind_of_layer_may_have_heads_of_its_own_and_no_causal_mask():
    kinds = {"global": {"layers": 1, "heads_kv": 4, "head_dim": 128, "prefill": [256]},
             "both": {"layers": 3, "causal": False, "left": 31, "right": 31, "prefill": [256]}}
    model = read_model("m", {**ENTRY, "attention": kinds})
    assert [p.text for p in model.problems] == ["forward-bf16-b1-h8x4-q256-k256-d128-causal",
                                                "forward-bf16-b1-h8x2-q256-k256-d64-left31-right31"]
    assert {p.head_dim for p in model.decode_problems} == {128}  # what is not causal decodes nothing


def test_serving_keeps_a_window_that_covers_a_short_prompt():
    from autotune.models.serving import problems_of

    found = problems_of("mistral-7b", batches=(1,), longest=8192, page_sizes=())
    assert {p.window_left for p in found if p.op == "forward" and p.seqlen_q == p.seqlen_k == 8192} == {4095}


@pytest.mark.parametrize("change, words", [
    ({"layers": 5}, "4 layers together, but layers says 5"),
    ({"heads_kv": 3}, "heads_q must be a multiple of heads_kv"),
    ({"colour": "red"}, "colour"),
    ({"attention": {"causal": {"layers": 4, "prefil": [128]}}}, "prefil"),
    ({"attention": {"causal": None}}, "must be a mapping"),
    ({"attention": None}, "attention is None; it must be a mapping"),  # F28
    ({"attention": {"causal": {"layers": 4, "prefill": None}}}, "prefill and decode lists"),
    ({"attention": {"causal": {"layers": "4", "prefill": [128]}}}, "layers must be an int"),
    ({"attention": {"causal": {"layers": 4, "prefill": [128], "decode": ["b1"]}}}, "m: causal: decode step 'b1' is not bBATCH"),
    ({"attention": {"causal": {"layers": 4, "prefill": [128], "decode": ["b1-k64-kvint8"]}}}, "kv_dtype is 'int8'"),
])
def test_a_wrong_entry_is_named(change, words):
    with pytest.raises(ModelError, match=words):
        read_model("m", {**ENTRY, **change})


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ModelError, match="no model is called 'llama-9'; known are llama-3-8b, llama-3-70b, qwen-3-8b"):
        by_name("llama-9")
