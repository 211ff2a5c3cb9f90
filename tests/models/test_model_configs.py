"""config.json files of public models: each is read right or refused by name, and so is what becomes of it when a name is gone,
renamed or holds something else (M1 to M15 of the public reports; F20, F22 of the attacks)."""

from __future__ import annotations

import copy
import json

import pytest

from autotune.models.catalogue import ModelError
from autotune.models.derive import derive
from benchmarks.model_configs import CONFIGS, configs, faults, line, verdict

ALL = configs()
RIGHT = {name: entry for name, entry in ALL.items() if "refused" not in entry}

# What may be left out, because the model's class then has a value of its own: key heads (one for each query head, or as the class
# has it), head dim (hidden / heads), what Falcon and others say by a switch, sizes that a class gives all of, lengths and dtype.
OPTIONAL = {"num_key_value_heads", "head_dim", "kv_channels", "n_head_kv", "num_kv_heads", "kv_n_heads", "num_attention_groups",
            "v_head_dim", "multi_query", "multi_query_attention", "new_decoder_architecture", "alibi", "attention_head_dim",
            "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "num_global_key_value_heads",
            "global_head_dim", "attention_other_setting", "sliding_window", "sliding_window_pattern",
            "add_swa_attention_sink_bias", "attention_window_size", "window_size", "local_attention", "max_attn_value",
            "attn_config", "use_sliding_window", "is_causal", "use_bidirectional_attention", "layer_types",
            "full_attention_interval", "cross_attention_layers", "block_types", "attn_layer_period", "attn_layer_offset",
            "dense_attention_every_n_layers", "global_attn_every_n_layers", "text_config", "vision_config", "model_type",
            "patch_size", "image_size", "max_source_positions", "max_target_positions", "use_mla", "full_attn_idxs",
            "attn_logit_softcapping", "attention_chunk_size", "no_rope_layers"}


def test_there_are_enough_of_them_and_the_file_is_small():
    assert len(ALL) >= 80 and CONFIGS.stat().st_size < 150_000
    assert sum("refused" in entry for entry in ALL.values()) <= 6


@pytest.mark.parametrize("name", ALL)
def test_each_is_read_right_or_refused(name):
    entry = ALL[name]
    found, why = verdict(entry)
    assert (found == "refused" and entry["refused"] in why) if "refused" in entry else (found == "right"), why


# Rows of the public reports, and of which model they tell.
REPORTS = {
    "M1": ["google/gemma-4-31b-it"], "M2": ["tiiuae/falcon-7b"], "M3": ["XiaomiMiMo/MiMo-V2-Flash"],
    "M4": ["databricks/dbrx-base"], "M5": ["nvidia/Llama-3_3-Nemotron-Super-49B-v1"],
    "M6": ["google-t5/t5-11b", "google/flan-t5-small"], "M7": ["google-bert/bert-base-uncased", "google/vit-base-patch16-224",
                                                               "google/siglip-base-patch16-224", "answerdotai/ModernBERT-base",
           "google/embeddinggemma-300m"],
    "M8": ["meta-llama/Llama-4-Scout-17B-16E"], "M9": ["meta-llama/Llama-3.2-11B-Vision"],
    "M10": ["hpcai-tech/grok-1", "baichuan-inc/Baichuan2-13B-Chat", "google/recurrentgemma-2b", "EleutherAI/gpt-neo-1.3B",
            "microsoft/Phi-3-small-8k-instruct"],
    "M11": ["Qwen/Qwen3-Next-80B-A3B-Instruct", "ai21labs/AI21-Jamba-1.5-Mini", "nvidia/Nemotron-H-8B-Base-8K",
            "MiniMaxAI/MiniMax-Text-01", "moonshotai/Kimi-Linear-48B-A3B-Instruct", "ibm-ai-platform/Bamba-9B-v2"],
    "M12": ["deepseek-ai/DeepSeek-OCR"], "M13": ["openbmb/MiniCPM3-4B", "LGAI-EXAONE/EXAONE-4.0-32B", "bigscience/bloom-560m",
                                                 "Qwen/Qwen2.5-Omni-7B"],
    "M15": ["meta-llama/Llama-3.1-70B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-235B-A22B", "mistralai/Mixtral-8x7B-v0.1",
            "google/gemma-3-1b-it", "google/gemma-3n-E4B-it", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V2-Lite",
            "moonshotai/Kimi-K2-Instruct", "zai-org/GLM-4.5"],
}


@pytest.mark.parametrize("number", REPORTS)
def test_what_was_reported_in_public_is_right(number):
    for name in REPORTS[number]:
        found, why = verdict(ALL[name])
        assert found == ("refused" if "refused" in ALL[name] else "right"), (name, why)


def test_the_part_of_a_config_may_stand_alone_or_say_no_type():
    part = ALL["google/gemma-4-31b-it"]["config"]["text_config"]
    whole = derive({"model_type": "gemma4", "text_config": part}).kinds
    untyped = {name: value for name, value in part.items() if name != "model_type"}
    assert derive(part).kinds == derive({**untyped, "model_type": "gemma4"}).kinds == whole
    assert derive({"model_type": "gemma4", "text_config": untyped}).kinds == whole


def test_what_stands_beside_the_part_is_looked_at_too():
    with pytest.raises(ModelError, match="attention_chunk_size is 512"):
        derive(ALL["google/gemma-4-31b-it"]["config"] | {"attention_chunk_size": 512})


def places(config, path=()):
    """Every name in a config that a mutation changes: of the top, of its parts and of mappings about attention."""
    for name, value in config.items():
        yield (*path, name)
        if isinstance(value, dict) and (name in ("text_config", "language_config", "llm_config", "thinker_config", "attn_config",
                                                 "linear_attn_config", "attention_other_setting")):
            yield from places(value, (*path, name))


def changed(config, path, change):
    config = copy.deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    change(inner, path[-1])
    return config


def readings(entry, change):
    """(path, reading or None if it is refused) with `change` at each place."""
    for path in places(entry["config"]):
        try:
            yield path, derive(changed(entry["config"], path, change))
        except ModelError as error:
            assert "\n" not in str(error) and str(error).startswith("config.json") and len(str(error)) < 700
            yield path, None


@pytest.mark.parametrize("name", RIGHT)
def test_without_a_name_the_reading_is_the_same_or_refused_or_the_classes_own(name):
    entry = RIGHT[name]
    for path, derived in readings(entry, lambda inner, key: inner.pop(key)):
        if derived is not None and path[-1] not in OPTIONAL:
            without = [fault for fault in faults(entry, derived) if not fault.startswith(("dtype", "lengths"))]
            assert not without, (path, without)


@pytest.mark.parametrize("name", RIGHT)
def test_a_renamed_field_is_never_passed_over(name):
    """A field of attention under a name that nothing knows is refused, even where its absence would be read."""
    entry = RIGHT[name]

    def rename(inner, key):
        if inner[key] is not None:  # what is null is not there, whatever its name
            inner[f"{key}_v2"] = inner.pop(key)

    for path, derived in readings(entry, rename):
        if derived is not None and path[-1] not in ("model_type", "text_config", "vision_config"):
            differing = [fault for fault in faults(entry, derived) if not fault.startswith(("dtype", "lengths"))]
            assert not differing, (path, differing)


HOSTILE = (None, True, -1, 0, 10**30, 1e308, float("inf"), float("nan"), "", "x\x1b[31m", [], [None], [[]], {}, {"a": None},
           [1] * 5000)


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_whatever_a_field_holds_the_answer_is_a_reading_or_a_sentence(value):
    def put(inner, key):
        inner[key] = value

    for name in ("google/gemma-4-31b-it", "XiaomiMiMo/MiMo-V2-Flash", "moonshotai/Kimi-Linear-48B-A3B-Instruct",
                 "stepfun-ai/Step-3.5-Flash", "nvidia/Llama-3_3-Nemotron-Super-49B-v1", "databricks/dbrx-base",
                 "EleutherAI/gpt-neo-1.3B", "openai/whisper-large-v3", "openai/clip-vit-large-patch14",
                 "meta-llama/Llama-4-Scout-17B-16E", "deepseek-ai/DeepSeek-V3"):
        for _, derived in readings(RIGHT[name], put):
            assert derived is None or derived.kinds and all(kind.layers >= 1 for kind in derived.kinds)
        try:
            derive(RIGHT[name]["config"] | {"a_field_of_tomorrow": value})
        except ModelError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize("field, value", [
    ("attention_span", 4096), ("use_block_sparse", True), ("windowed_layers", [1, 2]), ("swa_layers", [0]), ("kv_share_every", 2),
    ("bidirectional_prefix", True), ("causal_mode", "none"), ("softcap_value", 30.0), ("alibi_slopes", [1.0]), ("sink_tokens", 4),
    ("sparse_topk", 2048), ("chunked_prefill_mask", 1), ("layer_pattern", "LLG"), ("global_every", 6), ("cross_layers", [3]),
    ("per_layer_heads", [8] * 32), ("retrieval_heads", 2), ("relative_bias", True), ("extra", {"num_heads": 3}),
    ("landmark_every", 63),
])
def test_a_field_of_tomorrow_is_refused_by_name(field, value):
    llama = ALL["meta-llama/Meta-Llama-3-8B"]["config"]
    with pytest.raises(ModelError, match=f"^config.json: {field}.* may change attention, and nothing here reads it"):
        derive(llama | {field: value})
    derive(llama | {field: None})  # what is null is not there


@pytest.mark.parametrize("change, words", [
    ({"layer_types": ["full_attention"] * 18}, "layer_types is of 18 layers, but there are 32"),  # M14
    ({"layer_types": ["full_attention"] * 31 + ["hyper\x1b[31m_attention"]}, r"has a layer of kind 'hyper\\x1b\[31m_attention'; "
     r"known are"),  # F20
    ({"num_key_value_heads": 5}, "must be a multiple"),
    ({"hidden_size": 4097}, "4097 hidden channels are no multiple of 32 heads"),
    ({"model_type": "zebra", "architectures": ["ZebraModel"]}, "type zebra is not known here"),
    ({"model_type": "zebra", "sliding_window": 4096}, "which layers of a model of type zebra it is for is not known"),
    ({"model_type": None, "architectures": None}, "is not known here"),
    ({"architectures": ["LlamaBidirectionalModel"]}, "whose mask is not known"),
    ({"n_head": 16}, "num_attention_heads is 32, but n_head, which means the same, is 16"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ({"sliding_window": 100, "layer_types": ["sliding_attention"] * 32, "is_causal": False}, "100 without a causal mask"),
])
def test_what_contradicts_itself_or_is_not_known_is_refused(change, words):
    with pytest.raises(ModelError, match=words):
        derive(ALL["meta-llama/Meta-Llama-3-8B"]["config"] | change)


def test_a_logit_cap_of_400_digits_is_a_sentence(tmp_path):  # F22
    from autotune.models.hf import read_config

    path = tmp_path / "config.json"
    path.write_text(json.dumps(ALL["google/gemma-2-9b"]["config"]).replace('"attn_logit_softcapping": 50.0',
                                                                           '"attn_logit_softcapping": 1' + "0" * 400))
    with pytest.raises(ModelError, match="config.json"):
        read_config(path)


def test_readings_are_written_as_people_read_them():
    assert line(derive(RIGHT["openai/gpt-oss-20b"]["config"]).kinds[0]) == "12 x 64/8 d64 causal, left 127, sinks"
