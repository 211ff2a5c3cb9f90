"""A model's attention from its Hugging Face config.json, for `--model-config PATH`.

Reads the names that public configs use for heads, head dims, kinds of layers, windows, softcap and sinks. What is not there has
the default that the models themselves have; what is there and cannot be meant is a `ModelError`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Mapping

from .catalogue import Model, ModelError, read_model

MAX_BYTES = 4 << 20
PREFILL = (1024, 4096, 8192, 32768)  # prompt lengths, up to what the model takes
MAX_LAYERS = 10_000

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

# Names of one thing in different configs.
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
HEADS_KV = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
SINK_FLAGS = ("attention_sink", "add_full_attention_sink_bias", "add_swa_attention_sink_bias")

KINDS = {"full_attention": "causal", "attention": "causal", "global": "causal", "sliding_attention": "sliding",
         "local": "sliding"}

# What configs leave out, because it is the default of the model's class. Gemma 3 4B says little more than its layers.
LEFT_OUT = {"gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
                            "max_position_embeddings": 131072}}


def read_config(path: Path) -> Model:
    """The attention of the model whose config.json is at `path`, or in the folder `path`. Raises `ModelError`."""
    path = path / "config.json" if path.is_dir() else path
    return read_values(_json(path), str(path), path.parent.name)


def read_values(values: Mapping, where: str, name: str = "") -> Model:
    """The same of a config that has been read: `values`, from `where`. `name` is the model's if the config has none."""
    config = _language_part(values)
    facts = _Facts(where, config)
    heads = facts.integer(HEADS)
    heads_kv = 1 if config.get("multi_query") is True and not facts.has(HEADS_KV) else facts.integer(HEADS_KV, heads)
    head_dim, head_dim_v = _head_dims(facts, heads)
    kinds, left_out = _kinds(facts)
    lengths = _lengths(facts)
    attention = {kind: {"layers": count, "prefill": lengths, **_features(facts, kind)} for kind, count in kinds.items()}
    entry = {"title": str(config.get("model_type", name or "model")), "source": where, "layers": kinds.total(),
             "dtype": _dtype(facts), "heads_q": heads, "heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v,
             "attention": attention}
    return replace(read_model(entry["title"], entry, where), left_out=left_out)


def _json(path: Path) -> Mapping:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"{path} is larger than {MAX_BYTES >> 20} MB; a config.json is a few kilobytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}; name a model's config.json or the folder it is in") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}; a config.json is an object")
    return data


def _language_part(config: Mapping) -> Mapping:
    """The part about text, in models that also see or hear."""
    for name in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(name), dict):
            return _with_defaults({**{key: config[key] for key in ("torch_dtype", "dtype") if key in config}, **config[name]})
    return _with_defaults(config)


def _with_defaults(config: Mapping) -> Mapping:
    """`config` and what is left out of it."""
    model = config.get("model_type")
    return {**LEFT_OUT.get(model, {}), **config} if isinstance(model, str) else config


class _Facts:
    """Typed reading of a config under any of a thing's names."""

    def __init__(self, where: str, config: Mapping):
        self.where, self.config = where, config

    def has(self, names: tuple[str, ...]) -> bool:
        return any(self.config.get(name) is not None for name in names)

    def integer(self, names: tuple[str, ...], default: int | None = None) -> int:
        """The first of `names` that is there, an int of at least 1. Raises `ModelError` if none is and there is no default."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if type(value) is not int or not 1 <= value < 2**31:
                    raise ModelError(f"{self.where}: {name} is {value!r}; it must be an int of at least 1")
                return value
        if default is None:
            raise ModelError(f"{self.where} has none of {', '.join(names)}, as a config.json of a model with attention has; any "
                             "shape can be tuned with --problem TEXT")
        return default

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value not in (None, True, False):
            raise ModelError(f"{self.where}: {name} is {value!r}; it must be true or false")
        return bool(value)


def _head_dims(facts: _Facts, heads: int) -> tuple[int, int]:
    """(head dim of queries and keys, of values). Latent attention gives the one in two parts, plain and rotated."""
    if facts.has(("qk_rope_head_dim",)):
        head_dim = facts.integer(("qk_nope_head_dim",)) + facts.integer(("qk_rope_head_dim",))
        return head_dim, facts.integer(("v_head_dim",))
    if facts.has(HEAD_DIM):
        head_dim = facts.integer(HEAD_DIM)
    else:
        hidden = facts.integer(HIDDEN)
        if hidden % heads:
            raise ModelError(f"{facts.where}: it has no head_dim, and {hidden} hidden channels are no multiple of {heads} heads")
        head_dim = hidden // heads
    return head_dim, facts.integer(("v_head_dim",), head_dim)


def _kinds(facts: _Facts) -> tuple[Counter, tuple[str, ...]]:
    """(kind of attention -> layers of it, a sentence for each kind of layer that is none)."""
    layers = facts.integer(LAYERS)
    if layers > MAX_LAYERS:
        raise ModelError(f"{facts.where}: it has {layers} layers; allowed are {MAX_LAYERS}")
    types = facts.config.get("layer_types")
    if types is None:
        return Counter(_kinds_by_rule(facts, layers)), ()
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise ModelError(f"{facts.where}: layer_types is {types!r:.80}; it must be a list of names such as full_attention")
    kinds, left_out = Counter(), Counter()
    for kind in types[:layers]:
        (kinds if kind in KINDS else left_out)[KINDS.get(kind, kind)] += 1
    if not kinds:
        raise ModelError(f"{facts.where}: its layers are {', '.join(left_out)}; none is of a kind known here: {', '.join(KINDS)}")
    return kinds, tuple(f"{count} layers of kind {kind} are left out" for kind, count in left_out.items())


def _kinds_by_rule(facts: _Facts, layers: int) -> list[str]:
    """The kind of each layer in configs that do not list them."""
    off = facts.config.get("use_sliding_window") is False  # Qwen names a window that it does not use
    if off or not facts.has(("sliding_window",)):
        return ["causal"] * layers
    if facts.has(("sliding_window_pattern",)):  # Gemma 3: every n-th layer is global
        every = facts.integer(("sliding_window_pattern",))
        return ["sliding" if (layer + 1) % every else "causal" for layer in range(layers)]
    model = facts.config.get("model_type")
    if model in ("gemma2", "gpt_oss"):
        return ["causal" if layer % 2 else "sliding" for layer in range(layers)]
    if model in ("gemma3", "gemma3_text"):
        return ["sliding" if (layer + 1) % 6 else "causal" for layer in range(layers)]
    if facts.config.get("use_sliding_window") is True and facts.has(("max_window_layers",)):  # Qwen 2: the first ones are global
        first = min(facts.integer(("max_window_layers",)), layers)
        return ["causal"] * first + ["sliding"] * (layers - first)
    return ["sliding"] * layers


def _features(facts: _Facts, kind: str) -> dict:
    """What a kind of layer has beyond the causal mask."""
    features = {}
    if kind == "sliding":
        features["left"] = facts.integer(("sliding_window",)) - 1
    softcap = facts.config.get("attn_logit_softcapping")
    if softcap is not None:
        if not isinstance(softcap, (int, float)) or isinstance(softcap, bool):
            raise ModelError(f"{facts.where}: attn_logit_softcapping is {softcap!r}; it must be a number or null")
        features["softcap"] = softcap
    if facts.config.get("model_type") == "gpt_oss" or any(facts.flag(name) for name in SINK_FLAGS):
        features["sinks"] = True
    nested = facts.config.get("attn_config")  # MPT
    nested = nested if isinstance(nested, dict) else {}
    if facts.flag("alibi") or facts.config.get("model_type") == "bloom" or nested.get("alibi") is True:
        features["alibi"] = True
    return features


def _lengths(facts: _Facts) -> list[int]:
    longest = facts.integer(LONGEST, PREFILL[-1])
    return [length for length in PREFILL if length <= longest] or [longest]


def _dtype(facts: _Facts) -> str:
    name = facts.config.get("dtype") or facts.config.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in DTYPES:
        raise ModelError(f"{facts.where}: its dtype is {name!r}; allowed are {', '.join(DTYPES)}")
    return DTYPES[name]
