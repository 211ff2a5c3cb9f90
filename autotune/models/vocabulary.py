"""The words of config.json files: `vocabulary.yaml`, read once. Which names mean one thing, which look like attention, and what
the class of each known model fills in."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Mapping

from ..core.reading import load_yaml

PATH = Path(__file__).with_name("vocabulary.yaml")


@dataclass(frozen=True)
class Family:
    """What is known of models of one model_type; the fields are those of an entry in vocabulary.yaml."""

    name: str
    known: bool = True
    parent: str = ""
    mask: str = "causal"
    window: str = ""
    window_name: str = ""
    pattern: str = "sliding_window_pattern"
    both_sides: str = ""
    kv: str = ""
    twice: str = ""
    refuse: str = ""
    listed: bool = False
    last_full: bool = False
    chunked: bool = False
    doubled: bool = False
    sinks: bool = False
    alibi: bool = False
    encoder_decoder: bool = False
    tokens: int | None = None  # beside an image's patches
    defaults: Mapping = field(default_factory=dict)
    sizes: Mapping = field(default_factory=dict)
    heads: Mapping = field(default_factory=dict)
    neutral: Mapping = field(default_factory=dict)
    towers: Mapping = field(default_factory=dict)
    cases: Mapping = field(default_factory=dict)
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    names: Mapping[str, tuple[str, ...]]
    parts: tuple[str, ...]
    kinds: Mapping[str, str]  # what a list of layers calls one -> full, sliding or left_out
    shaped: tuple[str, ...]
    harmless: tuple[str, ...]
    neutral: Mapping[str, tuple]
    families: Mapping[str, Family]

    def is_shaped(self, name: str) -> bool:
        """Whether `name` looks as if it were about attention and is not known to be harmless."""
        return any(word in name.lower() for word in self.shaped) and not self.is_harmless(name)

    def is_harmless(self, name: str) -> bool:
        """Whether `name` is known to change nothing that is tuned."""
        return any(fnmatchcase(name.lower(), pattern) for pattern in self.harmless)

    def family(self, model_type: str) -> Family:
        """The family called `model_type`; one that is not known if there is none."""
        return self.families.get(model_type) or Family(model_type, known=False)

    def of_architecture(self, architecture: str) -> str | None:
        """The model_type whose class is called `architecture`, as GptOssForCausalLM is of gpt_oss."""
        name = architecture.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model").lower()
        return next((known for known in self.families if _bare(known) == name), None)


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    """The vocabulary that comes with the package."""
    data = load_yaml(PATH.read_text(encoding="utf-8"))
    kinds = {name: kind for kind, names in data["layers"].items() for name in names}
    return Vocabulary({thing: tuple(names) for thing, names in data["names"].items()}, tuple(data["parts"]), kinds,
                      tuple(data["shaped"]), tuple(data["harmless"]),
                      {name: tuple(values) for name, values in data["neutral"].items()},
                      _families(data["models"], {name: count for count, names in data["key_heads"].items() for name in names}))


def _families(entries: list[Mapping], key_heads: Mapping[str, int]) -> dict[str, Family]:
    families: dict[str, Family] = {}
    for entry in entries:
        facts = {name: tuple(value) if name == "unread" else value for name, value in entry.items() if name != "types"}
        for name in entry["types"]:
            if name in families:
                raise ValueError(f"{PATH.name}: {name} stands twice")
            defaults = dict(facts.get("defaults", {}))
            if name in key_heads:
                defaults.setdefault("num_key_value_heads", key_heads[name])
            families[name] = Family(name, **{**facts, "defaults": defaults})
    return families


def _bare(model_type: str) -> str:
    return model_type.removesuffix("_text").replace("_", "").replace("-", "").lower()
