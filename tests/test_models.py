"""Models expand into the problems that their published shapes say."""

from __future__ import annotations

import pytest

from autotune.models import ModelError, by_name, catalogue, problems_of_model, read_model
from autotune.problem import Problem

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


def test_the_catalogue_is_about_a_dozen_problems_each_once_with_a_source():
    problems = [p for model in catalogue().values() for p in model.problems]
    assert 10 <= len(problems) <= 14 and len(set(problems)) == len(problems)
    assert all(Problem.parse(p.text) == p for p in problems)
    assert all(model.source and model.title for model in catalogue().values())


def test_read_model_takes_each_kind_at_each_length():
    model = read_model("m", ENTRY)
    assert [p.text for p in model.problems] == [
        "forward-bf16-b1-h8x2-q128-k128-d64-causal", "forward-bf16-b1-h8x2-q128-k128-d64-causal-left31",
        "forward-bf16-b1-h8x2-q256-k256-d64-causal-left31"]


@pytest.mark.parametrize("change, words", [
    ({"layers": 5}, "4 layers together, but layers says 5"),
    ({"heads_kv": 3}, "heads_q must be a multiple of heads_kv"),
    ({"colour": "red"}, "colour"),
    ({"attention": {"causal": {"layers": 4, "prefil": [128]}}}, "prefil"),
    ({"attention": {"causal": None}}, "must be a mapping"),
])
def test_a_wrong_entry_is_named(change, words):
    with pytest.raises(ModelError, match=words):
        read_model("m", {**ENTRY, **change})


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ModelError, match="no model is called 'llama-9'; known are llama-3-8b, gpt-oss-120b"):
        by_name("llama-9")
