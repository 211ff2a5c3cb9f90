"""Typed reading of one part of a config.json, which knows afterwards what of it was not read."""

from __future__ import annotations

import math
from typing import Iterator, Mapping

from ..core.reading import quoted, shown
from .catalogue import ModelError
from .vocabulary import Family, vocabulary

MAX_LAYERS = 10_000
OTHERWISE = "any shape can be tuned with --problem TEXT"


class Facts:
    """A mapping of a config.json with its family's defaults. Every read is noted; `refuse_unread` then looks at the rest.

    A value that is there and cannot be meant is a `ModelError` naming it. null is as good as absent, but for a default: what a
    file says to be null is null.
    """

    def __init__(self, where: str, config: Mapping, family: Family):
        self.where, self.family, self.given = where, family, config
        things = vocabulary().names
        filled = {name: value for name, value in family.defaults.items() if not self._said(name, config)}
        if not any(config.get(name) is not None for thing in ("heads", "layers", "hidden") for name in things[thing]):
            filled = {**family.sizes, **filled}
        if not any(name in config for thing in ("heads", "heads_kv") for name in things[thing]):
            filled = {**family.heads, **filled}
        self.config = {**filled, **config}
        self.used: set[str] = set(family.unread)

    @staticmethod
    def _said(name: str, config: Mapping) -> bool:
        """Whether `config` has `name`, under any of the names of the same thing."""
        alike = next((names for names in vocabulary().names.values() if name in names), (name,))
        return any(other in config for other in alike)

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.where}: {message}")

    def get(self, name: str) -> object:
        self.used.add(name)
        return self.config.get(name)

    def names(self, thing: str) -> tuple[str, ...]:
        return vocabulary().names.get(thing, (thing,))

    def has(self, thing: str) -> bool:
        return any(self.config.get(name) is not None for name in self.names(thing))

    def _values(self, thing: str) -> Iterator[tuple[str, object]]:
        return ((name, value) for name in self.names(thing) if (value := self.get(name)) is not None)

    def integer(self, thing: str, default: int | None = None, least: int = 1) -> int:
        """`thing` under any of its names, an int of at least `least`. Raises `ModelError` if it is none, if two names disagree,
        or if it is not there and has no default."""
        found: tuple[str, int] | None = None
        for name, value in self._values(thing):
            if type(value) is not int or not least <= value < 2**31:
                raise self.error(f"{name} is {quoted(value)}; it must be an int of at least {least}")
            if found and found[1] != value:
                raise self.error(f"{found[0]} is {found[1]}, but {name}, which means the same, is {value}")
            found = found or (name, value)
        if found:
            return found[1]
        if default is None:
            raise ModelError(f"{self.where} has none of {', '.join(self.names(thing))}, as a config.json of a model with "
                             f"attention has; {OTHERWISE}")
        return default

    def flag(self, thing: str, default: bool = False) -> bool:
        """`thing`, true or false. Raises `ModelError` for anything else."""
        for name, value in self._values(thing):
            if not isinstance(value, bool):
                raise self.error(f"{name} is {quoted(value)}; it must be true or false")
            default = value
        return default

    def number(self, thing: str) -> float | None:
        """`thing`, a finite number, or None. Raises `ModelError`."""
        for name, value in self._values(thing):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300 or math.isnan(value):
                raise self.error(f"{name} is {quoted(value)}; it must be a number or null")
            return value
        return None

    def items(self, name: str, kind: type, what: str) -> list:
        """The list called `name`, its items all of one type. Raises `ModelError` saying `what` it must be."""
        value = self.get(name)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(f"{name} is {quoted(value, 80)}; it must be {what}")
        return value

    def mapping(self, name: str) -> Mapping:
        """The mapping called `name`, empty if it is null or absent. Raises `ModelError`."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{name} is {quoted(value, 80)}; it must be an object")
        return value or {}

    def inner(self, name: str) -> Facts:
        """Typed reading of the mapping called `name`."""
        return Facts(f"{self.where}: {name}", self.mapping(name), Family(self.family.name))

    def layers(self) -> int:
        layers = self.integer("layers") if not self.family.twice else 2 * self.integer(self.family.twice)
        if self.family.twice and self.config.get("num_hidden_layers") is not None:
            self.used.add("num_hidden_layers")
        if layers > MAX_LAYERS:
            raise self.error(f"it has {layers} layers; allowed are {MAX_LAYERS}")
        return layers

    def refuse_unread(self) -> None:
        """Raises `ModelError` for a name that may change attention and that nothing has read."""
        for name, value in self.given.items():
            if name not in self.used:
                self.refuse_unknown(name, value)

    def refuse_unknown(self, name: str, value: object, path: str = "") -> None:
        """Raises `ModelError` if `name` looks like attention, is not known to be harmless, and is not off."""
        words = vocabulary()
        if _is_off(name, value):
            return
        neutral = self.family.neutral.get(name, words.neutral.get(name))
        if neutral is not None and any(value == allowed and type(value) is type(allowed) for allowed in neutral):
            return
        if words.is_shaped(name):
            raise self.error(f"{shown(path + name)} is {quoted(value, 60)}; it may change attention, and nothing here reads it "
                             f"in a model of type {shown(self.family.name)}; {OTHERWISE}")
        if isinstance(value, dict) and not words.is_harmless(name):
            for inner, item in value.items():
                self.refuse_unknown(str(inner), item, f"{path}{name}.")


def _is_off(name: str, value: object) -> bool:
    """Whether `value` says that what `name` stands for is not there. A switch that is off is no sign if off is what is
    special."""
    return value in (None, "", [], {}) or (
        value is False and name.startswith(("use_", "enable_", "add_", "has_", "with_")) and "causal" not in name)
