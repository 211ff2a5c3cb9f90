"""Attention shapes from config.json files: the catalogue's models as their configs describe them, and files that are none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.models.hf import read_config
from autotune.models.catalogue import ModelError, by_name

# What the public config.json of each model says of its attention, and nothing else.
CONFIGS = {
    "llama-3-8b": {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "num_hidden_layers": 32, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"},
    "qwen-3-32b": {"model_type": "qwen3", "hidden_size": 5120, "head_dim": 128, "num_attention_heads": 64,
                   "num_key_value_heads": 8, "num_hidden_layers": 64, "max_position_embeddings": 40960, "sliding_window": None,
                   "use_sliding_window": False, "max_window_layers": 64, "torch_dtype": "bfloat16"},
    "mistral-7b": {"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                   "num_hidden_layers": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "bfloat16"},
    "gemma-2-9b": {"model_type": "gemma2", "hidden_size": 3584, "head_dim": 256, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "num_hidden_layers": 42, "max_position_embeddings": 8192, "sliding_window": 4096,
                   "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "torch_dtype": "bfloat16"},
    "gemma-3-27b": {"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"num_attention_heads": 16},
                    "text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "head_dim": 128, "num_attention_heads": 32,
                                    "num_key_value_heads": 16, "num_hidden_layers": 62, "sliding_window": 1024}},
    "gpt-oss-20b": {"model_type": "gpt_oss", "hidden_size": 2880, "head_dim": 64, "num_attention_heads": 64,
                    "num_key_value_heads": 8, "num_hidden_layers": 24, "max_position_embeddings": 131072,
                    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128},
    "phi-3-mini": {"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32,
                   "num_hidden_layers": 32, "max_position_embeddings": 4096, "sliding_window": 2047, "torch_dtype": "bfloat16"},
    "deepseek-v3": {"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
                    "num_hidden_layers": 61, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
                    "max_position_embeddings": 163840, "torch_dtype": "bfloat16"},
}
LLAMA = CONFIGS["llama-3-8b"]


def write(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_config_gives_what_the_catalogue_says(tmp_path, name):
    model, known = read_config(write(tmp_path, CONFIGS[name])), by_name(name)
    assert {kind.name: (kind.layers, kind.left) for kind in model.attention} == \
        {kind.name: (kind.layers, kind.left) for kind in known.attention}
    shared = {(p.seqlen_q, p.mask): p for p in known.problems}
    seen = [p for p in model.problems if (p.seqlen_q, p.mask) in shared]
    assert seen and all(p == shared[p.seqlen_q, p.mask] for p in seen) and not model.left_out


def test_what_a_config_leaves_to_the_class_of_its_model(tmp_path):  # as that of Gemma 3 4B does
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    model = read_config(write(tmp_path, {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}))
    assert {kind.name: (kind.layers, kind.left) for kind in model.attention} == {"sliding": (29, 1023), "causal": (5, None)}
    assert {(p.dtype, p.heads_q, p.heads_kv, p.head_dim) for p in model.problems} == {("bf16", 8, 4, 256)}
    assert max(p.seqlen_q for p in model.problems) == 32768


def test_a_folder_stands_for_the_config_in_it_and_prompts_end_where_the_model_does(tmp_path):
    write(tmp_path, {**LLAMA, "max_position_embeddings": 2048})
    assert [p.seqlen_q for p in read_config(tmp_path).problems] == [1024]
    write(tmp_path, {**LLAMA, "max_position_embeddings": 512})
    assert [p.seqlen_q for p in read_config(tmp_path).problems] == [512]


@pytest.mark.parametrize("change, check", [
    ({"num_key_value_heads": None}, lambda p: p.heads_kv == 32),
    ({"num_key_value_heads": None, "multi_query": True}, lambda p: p.heads_kv == 1),
    ({"torch_dtype": "float16"}, lambda p: p.dtype == "fp16"),
    ({"dtype": "float32"}, lambda p: p.dtype == "fp32"),
    ({"alibi": True}, lambda p: p.alibi),
    ({"attention_sink": True}, lambda p: p.sinks),
    ({"sliding_window": 512, "use_sliding_window": False}, lambda p: p.window_left is None),
    ({"attn_logit_softcapping": 30}, lambda p: p.softcap == 30.0),
])
def test_optional_facts(tmp_path, change, check):
    assert all(map(check, read_config(write(tmp_path, {**LLAMA, **change})).problems))


def test_kinds_by_rule_and_layers_of_another_kind(tmp_path):
    def kinds(**change):
        model = read_config(write(tmp_path, {**LLAMA, "sliding_window": 512, **change}))
        return {kind.name: kind.layers for kind in model.attention}, model.left_out

    assert kinds(use_sliding_window=True, max_window_layers=28) == ({"causal": 28, "sliding": 4}, ())
    assert kinds(sliding_window_pattern=4) == ({"sliding": 24, "causal": 8}, ())
    assert kinds(layer_types=["full_attention"] * 8 + ["linear_attention"] * 24) == (
        {"causal": 8}, ("24 layers of kind linear_attention are left out",))


@pytest.mark.parametrize("config, words", [
    ("{", "is not JSON"),
    ("[1]", "holds a list; a config.json is an object"),
    ("[" * 100_000, "is not JSON"),
    ({}, "has none of num_attention_heads, .*; any shape can be tuned with --problem TEXT"),
    ({**LLAMA, "num_attention_heads": "32"}, "num_attention_heads is '32'; it must be an int of at least 1"),
    ({**LLAMA, "num_attention_heads": True}, "num_attention_heads is True"),
    ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads is 0"),
    ({**LLAMA, "num_key_value_heads": 5}, "heads_q must be a multiple of heads_kv"),
    ({**LLAMA, "hidden_size": 4097}, "4097 hidden channels are no multiple of 32 heads"),
    ({**LLAMA, "num_hidden_layers": 10**9}, "1000000000 layers"),
    ({**LLAMA, "torch_dtype": "float8"}, "its dtype is 'float8'; allowed are bfloat16"),
    ({**LLAMA, "layer_types": "full_attention"}, "layer_types is"),
    ({**LLAMA, "layer_types": ["mamba"] * 32}, "none is of a kind known here"),
    ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "none of sliding_window"),
    ({**LLAMA, "attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50'; it must be a number"),
    ({**LLAMA, "attn_logit_softcapping": -1}, "softcap is -1"),
    ({**LLAMA, "alibi": "yes"}, "alibi is 'yes'; it must be true or false"),
    ({**LLAMA, "qk_rope_head_dim": 64}, "none of qk_nope_head_dim"),
])
def test_a_file_that_cannot_be_meant_is_one_sentence(tmp_path, config, words):
    with pytest.raises(ModelError, match=words) as error:
        read_config(write(tmp_path, config))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_too_large(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path / "nowhere.json")
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(tmp_path)  # a folder without a config.json
    with pytest.raises(ModelError, match="larger than 4 MB"):
        read_config(write(tmp_path, " " * (4 << 20) + "{}"))


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2**40, 2**40), st.floats(), st.text(max_size=8),
                   st.lists(st.text(max_size=4), max_size=3), st.dictionaries(st.text(max_size=4), st.integers(), max_size=2))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*LLAMA, "head_dim", "v_head_dim", "layer_types", "sliding_window", "dtype", "alibi",
                                        "sliding_window_pattern", "attn_logit_softcapping", "qk_rope_head_dim", "text_config",
                                        "attn_config", "use_sliding_window", "max_window_layers", "attention_sink"]), VALUES))
def test_whatever_a_config_holds_the_answer_is_a_model_or_a_sentence(tmp_path_factory, change):
    path = write(tmp_path_factory.mktemp("config"), {**LLAMA, **change})
    try:
        assert read_config(path).problems
    except ModelError as error:
        assert "config.json" in str(error)
