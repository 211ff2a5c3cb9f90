"""Which layers of a model attend, and how: one word a layer, from whichever of the many ways a config.json has to say it.

A layer is `full` (every key that causality allows), `sliding` (a window), or the name of something that no kernel here computes
(linear attention, chunks, cross attention, nothing at all), which is counted and left out.
"""

from __future__ import annotations

from typing import Callable

from ..core.reading import quoted, shown
from .facts import Facts
from .vocabulary import vocabulary

FULL, SLIDING = "full", "sliding"
NEMOTRON_H = {"*": FULL, "M": "mamba", "-": "mlp", "E": "moe"}


def layers_of(facts: Facts) -> list[str]:
    """The word of each layer, in order. Raises `ModelError` where the file contradicts itself or does not say."""
    count = facts.layers()
    said = {name: rule(facts, name, count) for name, rule in RULES if _said(facts, name)}
    found = next(iter(said.values())) if said else _by_family(facts, count)
    for name, other in said.items():
        if [word in (FULL, SLIDING) for word in other] != [word in (FULL, SLIDING) for word in found]:
            raise facts.error(f"{next(iter(said))} and {name} do not say the same of its {count} layers")
    facts.used.update(OTHER_WAYS + CHUNKED * facts.family.chunked)
    if facts.family.last_full and found[-1] == SLIDING:
        found[-1] = FULL  # as the model's class has it
    if not {FULL, SLIDING} & set(found):
        raise facts.error(f"its layers are {', '.join(sorted(set(found)))}; none is of a kind known here: "
                          f"{', '.join(name for name, kind in vocabulary().kinds.items() if kind != 'left_out')}")
    return found


def _said(facts: Facts, name: str) -> bool:
    """Whether the file says the layers by `name`, or its model's class does and the file says them in no other way."""
    if name in facts.family.unread:
        return False
    if any(facts.given.get(other) is not None for other, _ in RULES):
        return facts.given.get(name) is not None
    return facts.config.get(name) is not None


def _exactly(facts: Facts, name: str, found: list, count: int, spare: int = 0) -> list:
    """`found` of which there must be `count`; `spare` more are of layers that predict tokens further on."""
    if len(found) not in (count, count + spare):
        raise facts.error(f"{name} is of {len(found)} layers, but there are {count}; it must say what each layer is")
    return found[:count]


def _named(facts: Facts, name: str, count: int) -> list[str]:
    """A list of names, one a layer."""
    names = facts.items(name, str, "a list of names such as full_attention, one a layer")
    predicting = facts.config.get("num_nextn_predict_layers") is not None
    spare = facts.integer("num_nextn_predict_layers", 0, least=0) if predicting else 0
    return [_word(facts, name, kind) for kind in _exactly(facts, name, names, count, spare)]


def _word(facts: Facts, name: str, kind: str) -> str:
    word = vocabulary().kinds.get(kind)
    if word is None:
        raise facts.error(f"{name} has a layer of kind {shown(kind, 40)}; known are {', '.join(vocabulary().kinds)}")
    return kind if word == "left_out" else word


def _cycled(facts: Facts, name: str, count: int) -> list[str]:
    """A list of names that repeats over the layers."""
    names = facts.items(name, str, "a list of names such as recurrent, attention")
    if not 1 <= len(names) <= count:
        raise facts.error(f"{name} is of {len(names)} layers, but there are {count}; it must have 1 to {count} names")
    # What is called attention there has the model's window.
    words = [SLIDING if word == FULL and facts.family.window_name else word
             for word in (_word(facts, name, kind) for kind in names)]
    return [words[layer % len(words)] for layer in range(count)]


def _letters(facts: Facts, name: str, count: int) -> list[str]:
    text = facts.get(name)
    if not isinstance(text, str) or set(text) - NEMOTRON_H.keys():
        raise facts.error(f"{name} is {quoted(text, 80)}; it must be letters of {''.join(NEMOTRON_H)}, one a layer")
    return [NEMOTRON_H[letter] for letter in _exactly(facts, name, list(text), count)]


def _bits(zero: str, one: str) -> Callable[[Facts, str, int], list[str]]:
    def rule(facts: Facts, name: str, count: int) -> list[str]:
        bits = facts.items(name, int, "a list of 0 and 1, one a layer")
        if set(bits) - {0, 1}:
            raise facts.error(f"{name} is {quoted(bits, 80)}; it must be a list of 0 and 1, one a layer")
        return [one if bit else zero for bit in _exactly(facts, name, bits, count)]
    return rule


def _indices(inside: str, outside: str) -> Callable[[Facts, str, int], list[str]]:
    def rule(facts: Facts, name: str, count: int) -> list[str]:
        chosen = facts.items(name, int, "a list of layers")
        _check_indices(facts, name, chosen, 0, count)
        return [inside if layer in chosen else outside for layer in range(count)]
    return rule


def _check_indices(facts: Facts, name: str, chosen: list[int], first: int, count: int) -> None:
    if len(set(chosen)) != len(chosen) or not all(first <= layer < first + count for layer in chosen):
        raise facts.error(f"{name} is {quoted(chosen, 80)}; it must be different layers from {first} to {first + count - 1}")


def _kimi(facts: Facts, name: str, count: int) -> list[str]:
    """Two lists of layers, counted from 1, which together are all."""
    facts.mapping(name)
    inner = facts.inner(name)
    full, linear = (inner.items(part, int, "a list of layers, counted from 1") for part in ("full_attn_layers", "kda_layers"))
    _check_indices(inner, "full_attn_layers and kda_layers", full + linear, 1, count)
    if len(full) + len(linear) != count:
        raise inner.error(f"full_attn_layers and kda_layers are {len(full) + len(linear)} layers together, but there are {count}")
    return [FULL if layer + 1 in full else "linear_attention" for layer in range(count)]


def _period(facts: Facts, name: str, count: int) -> list[str]:
    period, offset = facts.integer(name), facts.integer("attn_layer_offset", least=0)
    if offset >= period:
        raise facts.error(f"attn_layer_offset is {offset}; it must be below {name}, which is {period}")
    return [FULL if layer % period == offset else "mamba" for layer in range(count)]


def _interval(facts: Facts, name: str, count: int) -> list[str]:
    every = facts.integer(name)
    return [FULL if (layer + 1) % every == 0 else "linear_attention" for layer in range(count)]


def _groups(facts: Facts, name: str, count: int) -> list[str]:
    """The last layer of each group, and what is left over after the last whole group."""
    size = facts.integer(name)
    return [FULL if (layer + 1) % size == 0 or layer >= count // size * size else "linear_attention" for layer in range(count)]


def _dense(facts: Facts, name: str, count: int) -> list[str]:
    every = facts.integer(name)
    return [FULL if (layer + 1) % every == 0 else "block_sparse_attention" for layer in range(count)]


def _blocks(facts: Facts, name: str, count: int) -> list[str]:
    """Blocks that were searched for one by one. Each that attends says how many query heads share a key head."""
    blocks = _exactly(facts, name, facts.items(name, dict, "a list of objects, one a layer"), count)
    return [_block(facts, f"{name}[{layer}].attention", block.get("attention")) for layer, block in enumerate(blocks)]


def _block(facts: Facts, where: str, block: object) -> str:
    if not isinstance(block, dict):
        raise facts.error(f"{where} is {quoted(block, 60)}; it must be an object")
    for name, value in block.items():
        if name not in ("no_op", "replace_with_linear", "n_heads_in_group", "num_key_value_heads"):
            facts.refuse_unknown(name, value, f"{where}.")
    for switch, kind in (("no_op", "no_op"), ("replace_with_linear", "linear")):
        value = block.get(switch)
        if value not in (None, True, False) or isinstance(value, int) and not isinstance(value, bool):
            raise facts.error(f"{where}.{switch} is {quoted(value, 60)}; it must be true or false")
        if value:
            return kind
    return FULL


def _gpt_neo(facts: Facts, name: str, count: int) -> list[str]:
    """[[kinds, times], ...]: the kinds repeat so often."""
    found: list[str] = []
    for entry in facts.items(name, list, "a list of [kinds, times]"):
        if len(entry) != 2 or not isinstance(entry[0], list) or type(entry[1]) is not int or \
                not 0 <= entry[1] * len(entry[0]) <= count:
            raise facts.error(f"{name} has {shown(entry, 60)}; it must be a list of [kinds, times], {count} layers in all")
        found += [_word(facts, name, str(kind)) for kind in entry[0]] * entry[1]
    return _exactly(facts, name, found, count)


def _pattern(facts: Facts, name: str, count: int) -> list[str]:
    """Every n-th layer is full; or letters, L for a window and G for all, that repeat."""
    pattern = facts.get(name)
    if not facts.has("window") and facts.given.get("sliding_window", ...) is None:
        return [FULL] * count  # a pattern of windows that the model does not have
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise facts.error(f"{name} is {quoted(pattern, 60)}; it must be letters L and G, or a number")
        return [SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in range(count)]
    every = facts.integer(name)
    return [SLIDING if (layer + 1) % every else FULL for layer in range(count)]


# How configs say it, the most explicit way first. The first that is there counts, as it does in the models' classes.
RULES: tuple[tuple[str, Callable[[Facts, str, int], list[str]]], ...] = (
    ("block_configs", _blocks),
    ("layer_types", _named),
    ("layers_block_type", _named),
    ("block_types", _cycled),
    ("_block_types", _cycled),
    ("hybrid_override_pattern", _letters),
    ("hybrid_layer_pattern", _bits(zero=FULL, one=SLIDING)),
    ("attn_type_list", _bits(zero="linear_attention", one=FULL)),
    ("linear_attn_config", _kimi),
    ("attn_layer_indices", _indices(FULL, "mamba")),
    ("full_attn_idxs", _indices(FULL, "conv")),
    ("hybrid_layer_ids", _indices(FULL, "mamba")),
    ("cross_attention_layers", _indices("cross_attention", FULL)),
    ("attn_layer_period", _period),
    ("full_attention_interval", _interval),
    ("layer_group_size", _groups),
    ("dense_attention_every_n_layers", _dense),
    ("attention_types", _gpt_neo),
)
# Names that a model's class does not look at once another way has said it.
OTHER_WAYS = (*(name for name, _ in RULES), "sliding_window_pattern", "_sliding_window_pattern", "attn_layer_offset",
              "max_window_layers", "use_sliding_window", "global_attn_every_n_layers", "no_rope_layers", "no_rope_layer_interval",
              "attention_layers")
CHUNKED = ("attention_chunk_size",)






def _by_family(facts: Facts, count: int) -> list[str]:
    """Where no list says it: what the model's class does with a window."""
    family = facts.family
    if family.listed:
        raise facts.error(f"it does not say which of its layers attend, as a model of type {shown(family.name)} must, by "
                          f"{', '.join(name for name, _ in RULES[:3])} or a name of its own; any shape can be tuned with "
                          "--problem TEXT")
    if family.chunked:
        return _chunked(facts, count)
    if facts.config.get("use_sliding_window") is not None and not facts.flag("use_sliding_window"):
        return [FULL] * count  # Qwen names a window that it does not use
    if not facts.has(family.window_name or "window"):
        return [FULL] * count
    return _windows(facts, count, family.window)


def _windows(facts: Facts, count: int, rule: str) -> list[str]:
    """Which layers the window is for."""
    if rule == "all":
        return [SLIDING] * count
    if rule == "even":
        return [FULL if layer % 2 else SLIDING for layer in range(count)]
    if rule == "last" or facts.config.get("use_sliding_window") and facts.has("max_window_layers"):
        first = facts.integer("max_window_layers", least=0)
        return [SLIDING if layer >= first else FULL for layer in range(count)]
    if rule == "first":
        every = facts.integer("global_attn_every_n_layers")
        return [SLIDING if layer % every else FULL for layer in range(count)]
    if rule == "no_rope":
        return [FULL if roped else SLIDING for roped in _roped(facts, count)]
    if facts.has(facts.family.pattern):
        return _pattern(facts, facts.family.pattern, count)
    window = next(name for name in facts.names("window") if facts.config.get(name) is not None)
    raise facts.error(f"{window} is {quoted(facts.config[window], 40)}, but which layers of a model of type "
                      f"{shown(facts.family.name)} it is for is not known; say it by layer_types, or name the problems with "
                      "--problem TEXT")


def _chunked(facts: Facts, count: int) -> list[str]:
    """Layers with rotary positions attend within chunks, the others to everything."""
    if facts.config.get("attention_chunk_size") is None:
        facts.used |= {"attention_chunk_size", "no_rope_layers"}
        return [FULL] * count
    facts.integer("attention_chunk_size")
    return ["chunked_attention" if roped else FULL for roped in _roped(facts, count)]


def _roped(facts: Facts, count: int) -> list[bool]:
    """Whether each layer turns queries and keys by their position."""
    if facts.get("no_rope_layers"):
        return [bool(word == "one") for word in _bits(zero="zero", one="one")(facts, "no_rope_layers", count)]
    every = facts.integer("no_rope_layer_interval")
    return [(layer + 1) % every != 0 for layer in range(count)]
