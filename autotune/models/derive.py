"""What a config.json says of attention: `derive(config)` gives every kind of layer with its count, and what is left out.

A name that may change attention and is not understood is refused (`Facts.refuse_unread`), so a reading is right or there is none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Mapping

from ..core.problem import ProblemError
from ..core.reading import quoted, shown
from .catalogue import LayerKind, ModelError
from .facts import Facts, OTHERWISE
from .layers import FULL, SLIDING, layers_of
from .shapes import Heads, heads_of
from .vocabulary import Family, vocabulary

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SINK_FLAGS = {FULL: "add_full_attention_sink_bias", SLIDING: "add_swa_attention_sink_bias"}


@dataclass(frozen=True)
class Derived:
    """A model's attention. `longest` is the most tokens a sequence can have, or None if nothing says so; `left_out` has a
    sentence for each kind of layer that no kernel here computes; `unread` names the parts that are other models (vision,
    sound)."""

    title: str
    dtype: str
    kinds: tuple[LayerKind, ...]
    longest: int | None
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    fixed_length: bool = False  # every sequence is `longest` tokens, as those of an image are


def derive(config: Mapping, where: str = "config.json") -> Derived:
    """The attention of the model that `config` describes. Raises `ModelError` with a sentence that begins with `where`."""
    dtype, unread, parent = None, [], None
    while True:
        dtype = _dtype(config, where) or dtype
        name = next((part for part in vocabulary().parts if isinstance(config.get(part), dict)), None)
        family = _family(config, where, parent)
        if name is None or family.towers:
            break
        _refuse_beside(config, name, where, family)
        unread += [part for part, value in config.items() if part != name and isinstance(value, dict) and _is_part(part)]
        config, parent = config[name], family
    if family.refuse:
        raise ModelError(f"{where}: a model of type {shown(family.name)} {family.refuse}; {OTHERWISE}")
    read = _towers if family.towers else _encoder_and_decoder if family.encoder_decoder else _stack
    derived = read(config, where, family)
    return replace(derived, dtype=dtype or derived.dtype, unread=tuple(dict.fromkeys(unread + list(derived.unread))))


def _is_part(name: str) -> bool:
    return name.endswith("_config") and not any(word in name for word in ("quant", "compression", "projector", "generation"))


def _dtype(config: Mapping, where: str) -> str | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise ModelError(f"{where}: its dtype is {quoted(name, 60)}; allowed are {', '.join(DTYPES)}")
    return DTYPES[name]


def _family(config: Mapping, where: str, parent: Family | None) -> Family:
    """What is known of the model's type. One that is not known may be read if its architecture is a causal language model."""
    words = vocabulary()
    said, architectures = config.get("model_type"), config.get("architectures")
    if said is not None and not isinstance(said, str):
        raise ModelError(f"{where}: model_type is {quoted(said, 60)}; it must be a name")
    if architectures is not None and not (isinstance(architectures, list)
                                          and all(isinstance(name, str) for name in architectures)):
        raise ModelError(f"{where}: architectures is {quoted(architectures, 60)}; it must be a list of names")
    if any("bidirec" in name.lower() for name in architectures or ()) or said and "bidirec" in said:
        raise ModelError(f"{where}: its class is {quoted((architectures or [said])[0], 60)}, whose mask is not known; "
                         f"{OTHERWISE}")
    if said in words.families:
        return words.families[said]
    if said and (child := next((family for family in words.families.values() if family.parent == said), None)):
        return child  # such a file without its text_config, or what stands around that
    if not said and architectures and (known := words.of_architecture(architectures[0])):
        return words.families[known]
    if not said and parent:
        return parent
    return Family(said or (architectures or [""])[0], known=False)


def _is_causal_model(config: Mapping, family: Family) -> bool:
    names = config.get("architectures") or ()
    return family.known or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _refuse_beside(config: Mapping, part: str, where: str, family: Family) -> None:
    """Refuses names beside the language model's part that say of attention what that part does not."""
    words, inner = vocabulary(), config[part]
    sizes = {name for names in words.names.values() for name in names}
    facts = Facts(where, {}, family)
    for name, value in config.items():
        if not (isinstance(value, dict) or name in inner and (inner[name] == value or name in sizes)):
            facts.refuse_unknown(name, value)


def _stack(config: Mapping, where: str, family: Family) -> Derived:
    """One stack of layers."""
    facts = Facts(where, config, family)
    if not any(isinstance(config.get(name), list) for name in facts.names("heads")):
        facts.integer("heads")  # a file that says none is no model's with attention: said before what else is wrong
    if not _is_causal_model(config, family):
        raise ModelError(f"{where}: a model of type {shown(family.name or 'that it does not say')} is not known here, and no "
                         f"architecture says that it is a causal language model; {OTHERWISE}")
    facts = Facts(where, config, _case(facts))
    words = layers_of(facts)
    kinds = _kinds(facts, words, heads_of(facts, words))
    longest, fixed = _longest(facts)
    facts.refuse_unread()
    left_out = Counter(word for word in words if word not in (FULL, SLIDING))
    return Derived(family.name or "model", "bf16", kinds, longest,
                   tuple(f"{count} layers of kind {name} are left out" for name, count in left_out.items()), fixed_length=fixed)


def _case(facts: Facts) -> Family:
    """Sizes of one model_type that attend differently, as Baichuan's 7B and 13B do."""
    family = facts.family
    if not family.cases:
        return family
    name, value = family.cases["of"], facts.get(family.cases["of"])
    if not isinstance(value, int) or value not in family.cases:
        raise facts.error(f"{name} is {quoted(value, 40)}; known of a model of type {family.name} are "
                          f"{', '.join(str(case) for case in family.cases if case != 'of')}; {OTHERWISE}")
    return replace(family, **family.cases[value])


def _kinds(facts: Facts, words: list[str], heads: list[Heads]) -> tuple[LayerKind, ...]:
    """Layers that attend alike, counted, in the order in which the first of each comes."""
    causal = _is_causal(facts)
    softcap = facts.number("softcap") or 0.0
    alibi = _has_alibi(facts)
    sinks = {word: facts.family.sinks or facts.flag("sinks") | facts.flag(flag) for word, flag in SINK_FLAGS.items()}
    facts.flag("sinks")
    counts = Counter((word, shape) for word, shape in zip(words, heads) if word in (FULL, SLIDING))
    windows = _window(facts, causal) if SLIDING in words else (None, None)
    for name in (*facts.names("window"), *([facts.family.window_name] if facts.family.window_name else [])):
        facts.used.add(name)
    kinds = []
    for (word, shape), count in counts.items():
        left, right = windows if word == SLIDING else (None, None)
        base = ("sliding" if causal else "local") if word == SLIDING else ("causal" if causal else "full")
        alike = sum(1 for other, _ in counts if other == word)
        name = base if alike == 1 else f"{base} {shape.heads_q}x{shape.heads_kv}"
        kinds.append(_checked(facts, LayerKind(name, count, shape.heads_q, shape.heads_kv, shape.head_dim, shape.head_dim_v, left,
                               0 if causal else right, softcap, alibi, sinks[word], shape.compressed)))
    return tuple(kinds)


def _checked(facts: Facts, kind: LayerKind) -> LayerKind:
    """`kind`, if there can be a problem of it."""
    try:
        kind.problem("bf16", seqlen_q=8, seqlen_k=8)
    except ProblemError as error:
        raise facts.error(str(error)) from None
    return kind


def _is_causal(facts: Facts) -> bool:
    causal = facts.flag("causal", facts.family.mask == "causal")
    for name in facts.names("bidirectional"):
        value = facts.get(name)
        if value not in (None, True, False, "all", "vision") or isinstance(value, (int, float)) and not isinstance(value, bool):
            raise facts.error(f"{name} is {quoted(value, 60)}; it must be true, false, all or vision")
        causal = causal and value not in (True, "all")  # vision: of an image's tokens only, in a prompt
    if facts.family.mask == "full" and facts.config.get("is_decoder") is not None:
        causal = facts.flag("is_decoder")
    return causal


def _has_alibi(facts: Facts) -> bool:
    inner = facts.config.get("attn_config")
    nested = Facts(f"{facts.where}: attn_config", inner, Family("")).flag("alibi") if isinstance(inner, dict) else False
    return facts.flag("alibi") or nested or facts.family.alibi


def _window(facts: Facts, causal: bool) -> tuple[int, int]:
    """(left, right) of a window. A causal one of W tokens is the token itself and W - 1 before it."""
    name = facts.family.window_name or "window"
    width = facts.integer(name)
    if causal:
        return width - 1, 0
    if facts.family.both_sides != "half":
        raise facts.error(f"{next(n for n in facts.names(name) if facts.config.get(n))} is {width} without a causal mask; how "
                          f"far it reaches to either side in a model of type {shown(facts.family.name)} is not known; "
                          f"{OTHERWISE}")
    return width // 2, width // 2


def _longest(facts: Facts) -> tuple[int | None, bool]:
    if facts.family.tokens is not None:
        size, patch = facts.integer("image_size"), facts.integer("patch_size")
        if patch > size or (size // patch) ** 2 > 1 << 20:
            raise facts.error(f"image_size is {size} and patch_size {patch}; an image must have 1 to {1 << 20} patches")
        return (size // patch) ** 2 + facts.family.tokens, True
    for name in facts.names("longest"):
        value = facts.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1):
            raise facts.error(f"{name} is {quoted(value, 60)}; it must be an int of at least 1")
    value = next((value for name in facts.names("longest") if (value := facts.config.get(name)) is not None), None)
    return (None if value is None or value >= 2**31 else int(value)), False


def _towers(config: Mapping, where: str, family: Family) -> Derived:
    """Two models side by side, such as one of text and one of images."""
    read = [(part.removesuffix("_config"), _tower(config, where, part, known)) for part, known in family.towers.items()]
    kinds = tuple(replace(kind, name=f"{name} {kind.name}", longest=tower.longest, fixed_length=tower.fixed_length)
                  for name, tower in read for kind in tower.kinds)
    facts = Facts(where, {name: value for name, value in config.items() if name not in family.towers}, family)
    facts.refuse_unread()
    return Derived(family.name, read[0][1].dtype, kinds, None, tuple(note for _, tower in read for note in tower.left_out))


def _tower(config: Mapping, where: str, part: str, known: str) -> Derived:
    inner = config.get(part)
    if inner is not None and not isinstance(inner, dict):
        raise ModelError(f"{where}: {part} is {quoted(inner, 60)}; it must be an object")
    return derive({"model_type": known, **(inner or {})}, f"{where}: {part}")


def _encoder_and_decoder(config: Mapping, where: str, family: Family) -> Derived:
    """A stack that reads and one that writes, which also attends across to the first."""
    facts = Facts(where, config, family)
    hidden = facts.integer("hidden")
    facts.used.update(("is_encoder_decoder", "num_hidden_layers", "is_decoder", "add_cross_attention"))
    longest, _ = _longest(facts)
    kinds = []
    for side, name, right, tokens in (("encoder", "encoder full", None, "max_source_positions"),
                                      ("decoder", "decoder causal", 0, "max_target_positions")):
        heads, layers = facts.integer(f"{side}_attention_heads"), facts.integer(f"{side}_layers")
        if layers > 10_000:
            raise facts.error(f"{side}_layers is {layers}; allowed are 10000")
        if hidden % heads:
            raise facts.error(f"{hidden} hidden channels are no multiple of {heads} heads")
        kinds.append(LayerKind(name, layers, heads, heads, hidden // heads, hidden // heads, None, right,
                               longest=facts.integer(tokens, longest or 1024)))
    facts.used.update(facts.names("heads"))
    facts.refuse_unread()
    return Derived(family.name, "bf16", tuple(kinds), longest,
                   (f"cross attention of {kinds[1].layers} decoder layers is left out",))


