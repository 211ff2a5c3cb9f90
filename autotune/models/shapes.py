"""Heads and head dims of a layer, from the many names that configs have for them."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.reading import quoted
from .facts import Facts
from .layers import SLIDING
from .vocabulary import Family


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, the head dims of queries and keys and of values. `compressed`: keys and values are made of a
    latent vector, which is what a cache holds."""

    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    compressed: bool = False


def heads_of(facts: Facts, words: list[str]) -> list[Heads]:
    """The `Heads` of each layer, in order; those of layers that do not attend mean nothing."""
    if any(isinstance(facts.config.get(name), list) for thing in ("heads", "heads_kv") for name in facts.names(thing)):
        return _listed(facts, len(words))
    common = _common(facts)
    if facts.config.get("block_configs") is not None:
        return [_of_block(facts, common, layer) for layer in range(len(words))]
    full, sliding = _of_full(facts, common), _of_sliding(facts, common)
    return _one_by_one(facts, [sliding if word == SLIDING else full for word in words])


def _one_by_one(facts: Facts, heads: list[Heads]) -> list[Heads]:
    """Layers whose heads a mapping by their numbers changes, as transformers writes them for Gemma 4."""
    if facts.config.get("per_layer_config") is None:
        return heads
    heads = list(heads)
    for name, change in facts.mapping("per_layer_config").items():
        if not (name.isascii() and name.isdigit() and len(name) < 6 and int(name) < len(heads)) or not isinstance(change, dict):
            raise facts.error(f"per_layer_config has {quoted(name, 40)}: {quoted(change, 40)}; it must be objects by the numbers "
                              "of layers")
        inner = Facts(f"{facts.where}: per_layer_config: {name}", change, Family(facts.family.name))
        one = heads[int(name)]
        heads[int(name)] = _changed(facts, one, inner.integer("heads", one.heads_q), inner.integer("heads_kv", one.heads_kv),
                                    inner.integer("head_dim", one.head_dim), None)
        inner.refuse_unread()
    return heads


def _common(facts: Facts) -> Heads:
    heads = facts.integer("heads")
    if is_compressed(facts):
        return _compressed(facts, heads)
    head_dim = _head_dim(facts, heads)
    value_dim = facts.config.get("v_head_dim")
    facts.used.update(("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"))  # 0 or null here
    return Heads(heads, _heads_kv(facts, heads), head_dim, facts.integer("v_head_dim", head_dim) if value_dim else head_dim)


def is_compressed(facts: Facts) -> bool:
    """Whether attention is latent (MLA): keys have a part of their own for positions, of qk_rope_head_dim channels."""
    said = facts.config.get("use_mla")
    if said is not None and not facts.flag("use_mla"):
        return False
    return bool(said) or any(facts.config.get(name) not in (None, 0) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))


def _compressed(facts: Facts, heads: int) -> Heads:
    """In prompts every query head has keys and values of its own, whatever num_key_value_heads says."""
    head_dim = facts.integer("qk_nope_head_dim") + facts.integer("qk_rope_head_dim")
    facts.used.update((*facts.names("head_dim"), *facts.names("heads_kv"), *facts.names("hidden")))
    value_dim = facts.integer("v_head_dim", 0) or _divided(facts, facts.integer("hidden"), heads)
    if facts.has("heads_kv") and heads % facts.integer("heads_kv"):
        raise facts.error(f"{heads} heads are no multiple of {facts.integer('heads_kv')} key heads")
    return Heads(heads, heads, head_dim, value_dim, compressed=True)


def _head_dim(facts: Facts, heads: int) -> int:
    facts.used.update(facts.names("hidden"))
    if facts.family.doubled:  # Zamba 2's shared layers attend over what comes in and the embedding beside it
        return _divided(facts, 2 * facts.integer("hidden"), heads)
    if facts.has("head_dim"):
        return facts.integer("head_dim")
    return _divided(facts, facts.integer("hidden"), heads)


def _divided(facts: Facts, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise facts.error(f"it has no head_dim, and {hidden} hidden channels are no multiple of {heads} heads")
    return hidden // heads


def _heads_kv(facts: Facts, heads: int) -> int:
    """One for each query head where nothing says otherwise, as in the models' classes."""
    config = facts.config
    if facts.family.kv == "falcon":
        facts.used.add("multi_query")
        if facts.flag("new_decoder_architecture"):
            return facts.integer("heads_kv", heads)
        facts.used.update(facts.names("heads_kv"))  # Falcon 7B says 71 there and has 1
        return 1 if facts.flag("multi_query") else heads
    if facts.family.kv == "chatglm":
        facts.used.add("multi_query_group_num")
        return facts.integer("multi_query_group_num") if facts.flag("multi_query_attention") else facts.integer("heads_kv", heads)
    if config.get("attn_config") is not None:
        return _of_attn_config(facts, heads)
    if config.get("multi_query") is not None and facts.flag("multi_query"):
        return facts.integer("heads_kv", 1)
    return facts.integer("heads_kv", facts.integer("multi_query_group_num", heads))


def _of_attn_config(facts: Facts, heads: int) -> int:
    """MPT and DBRX keep what they say of attention in a mapping of its own."""
    inner = facts.inner("attn_config")
    facts.used.add("attn_config")
    kind = inner.get("attn_type")
    if kind not in (None, "multihead_attention", "multiquery_attention", "grouped_query_attention"):
        raise inner.error(f"attn_type is {quoted(kind, 40)}; known are multihead_attention, multiquery_attention and "
                          "grouped_query_attention")
    inner.used.update(facts.names("alibi"))
    heads_kv = inner.integer("heads_kv", 1 if kind == "multiquery_attention" else heads)
    if inner.config.get("sliding_window_size") == -1:
        inner.used.add("sliding_window_size")
    inner.refuse_unread()
    return heads_kv


def _of_full(facts: Facts, common: Heads) -> Heads:
    """Gemma 4 gives its layers without a window other heads."""
    heads_kv = common.heads_kv
    if facts.config.get("attention_k_eq_v") is not False:
        heads_kv = facts.integer("num_global_key_value_heads", heads_kv)
    facts.used.add("num_global_key_value_heads")
    return _changed(facts, common, common.heads_q, heads_kv, facts.integer("global_head_dim", 0) or None, None)


def _of_sliding(facts: Facts, common: Heads) -> Heads:
    """MiMo V2 and Step 3.5 give their layers with a window other heads."""
    heads = facts.integer("heads_sliding", common.heads_q)
    heads_kv = facts.integer("swa_num_key_value_heads", common.heads_kv)
    head_dim, value_dim = (facts.integer(name, 0) or None for name in ("swa_head_dim", "swa_v_head_dim"))
    if facts.config.get("attention_other_setting") is not None:
        facts.mapping("attention_other_setting")
        other = facts.inner("attention_other_setting")
        if other.get("attention_type") not in (None, "sliding_attention"):
            raise other.error(f"attention_type is {quoted(other.get('attention_type'), 40)}; known is sliding_attention")
        heads, heads_kv = other.integer("heads"), other.integer("heads_kv", heads_kv)
        head_dim = other.integer("head_dim", 0) or head_dim
        other.refuse_unread()
    return _changed(facts, common, heads, heads_kv, head_dim, value_dim)


def _changed(facts: Facts, common: Heads, heads: int, heads_kv: int, head_dim: int | None, value_dim: int | None) -> Heads:
    if common.compressed and (heads, heads_kv, head_dim, value_dim) != (common.heads_q, common.heads_kv, None, None):
        raise facts.error("some of its layers have heads of their own, which is not understood of latent attention")
    same = common.head_dim_v == common.head_dim
    head_dim_v = value_dim or (head_dim if head_dim and same else common.head_dim_v)
    return Heads(heads, heads_kv, head_dim or common.head_dim, head_dim_v, common.compressed)


def _of_block(facts: Facts, common: Heads, layer: int) -> Heads:
    """`n_heads_in_group` query heads share a key head."""
    attention = facts.config["block_configs"][layer]["attention"]
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return common
    where = f"block_configs[{layer}].attention"
    if (heads_kv := attention.get("num_key_value_heads")) is None:
        group = attention.get("n_heads_in_group")
        if type(group) is not int or group < 1 or common.heads_q % group:
            raise facts.error(f"{where}.n_heads_in_group is {quoted(group, 40)}; it must divide {common.heads_q} heads")
        heads_kv = common.heads_q // group
    if type(heads_kv) is not int or heads_kv < 1:
        raise facts.error(f"{where}.num_key_value_heads is {quoted(heads_kv, 40)}; it must be an int of at least 1")
    return Heads(common.heads_q, heads_kv, common.head_dim, common.head_dim_v)


def _listed(facts: Facts, count: int) -> list[Heads]:
    """OpenELM and Deci have numbers of heads for each layer."""
    heads, heads_kv = (_one_a_layer(facts, thing, count) for thing in ("heads", "heads_kv"))
    facts.used.update(facts.names("hidden"))
    if facts.has("head_dim"):
        dims = [facts.integer("head_dim")] * count
    else:
        dims = [_divided(facts, facts.integer("hidden"), number) for number in heads]
    return [Heads(query, key, dim, dim) for query, key, dim in zip(heads, heads_kv or heads, dims)]


def _one_a_layer(facts: Facts, thing: str, count: int) -> list[int]:
    name = next((name for name in facts.names(thing) if isinstance(facts.config.get(name), list)), None)
    if name is None:
        return [facts.integer(thing)] * count if facts.has(thing) or thing == "heads" else []
    values = facts.items(name, int, f"an int, or a list of {count} ints, one a layer")
    if len(values) != count or not all(1 <= value < 2**31 for value in values):
        raise facts.error(f"{name} is {quoted(values, 60)}; it must be {count} ints of at least 1, one a layer")
    facts.used.update(other for other in facts.names(thing) if facts.config.get(other) is None)
    return values
