"""How to compute it: `Config`, a kernel's name and a value for each of its parameters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, Mapping

from .reading import quoted

Value = int | bool | str


# Spaces hold some hundred thousand configs, which share their (name, value) pairs: 0.3 KB a config instead of 1.5.
_pairs: dict[tuple[str, Value], tuple[str, Value]] = {}


class ConfigError(ValueError):
    """A config that no kernel declares, with a sentence that says which value is wrong and what is allowed."""


@dataclass(frozen=True)
class Parameter:
    """One declared parameter of a kernel.

    `compile` parameters become constexprs; `launch` parameters are run-time values, so changing one costs no compile.
    A `derived` parameter is not searched: the kernel computes it, and a rule demands that value (smem_bytes). One that
    came later says what configs without it mean: `absent`. A launch parameter may need a compile parameter that is a bool:
    without that it has its first value, with it one of the others, or any if it is `optional`. With one that it is `barred` by
    it has its first value.
    """

    name: str
    values: tuple[Value, ...]  # legal values; () for a derived one
    kind: str  # "compile" or "launch"
    doc: str
    derived: bool = False
    absent: Value | None = None
    needs: str = ""
    optional: bool = False
    barred: str = ""

    def __post_init__(self):
        assert self.kind in ("compile", "launch"), self.kind
        assert not (self.needs or self.barred) or self.kind == "launch", self.name

    def values_beside(self, compiled: Mapping[str, Value]) -> tuple[Value, ...]:
        """The values that may go with these compile parameters."""
        if self.barred and compiled[self.barred]:
            return self.values[:1]
        if not self.needs:
            return self.values
        if not compiled[self.needs]:
            return self.values[:1]
        return self.values if self.optional else self.values[1:]


@dataclass(frozen=True)
class Config:
    """A kernel and its parameter values, in declared order. One line of text: ``forward_mma block_m=128 block_n=64 ...``."""

    kernel: str
    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, kernel: str, values: Mapping[str, Value]) -> Config:
        return cls(kernel, tuple([_pairs.setdefault(pair, pair) for pair in values.items()]))

    @cached_property
    def values(self) -> dict[str, Value]:
        return dict(self.items)

    def __getitem__(self, name: str) -> Value:
        for declared, value in self.items:
            if declared == name:
                return value
        raise KeyError(name)

    @cached_property
    def text(self) -> str:
        return " ".join([self.kernel, *(f"{name}={_format(value)}" for name, value in self.items)])

    def __str__(self) -> str:
        return self.text

    @cached_property
    def digest(self) -> str:
        """8 hex digits that name this config in file names and logs."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:8]

    def as_dict(self) -> dict[str, Value]:
        """The YAML form: ``{kernel: forward_mma, block_m: 128, ...}``."""
        return {"kernel": self.kernel, **self.values}


def parse_values(text: str) -> tuple[str, dict[str, str]]:
    """Splits one line of config text into the kernel's name and raw, untyped values.

    The result is not a `Config` yet: `kernels.config_from_text` types it against the kernel's declared parameters.
    """
    kernel, *pairs = text.split()  if text.split() else [""]
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name in values:
            raise ConfigError(f"config {quoted(text, 300)}: {quoted(pair)} is not NAME=VALUE with a name that stands once")
        values[name] = value
    return kernel, values


def typed(parameters: Iterable[Parameter], raw: Mapping[str, object], where: str) -> dict[str, Value]:
    """`raw` values (text or YAML scalars) as legal values of the declared parameters, in declared order.

    This is the only door through which a value from a file or a user reaches a template. Raises `ConfigError`
    for an unknown name, a missing one, or a value that is not declared.
    """
    parameters = tuple(parameters)
    names = [p.name for p in parameters]
    for name in raw:
        if name not in names:
            raise ConfigError(f"{where}: {quoted(name)} is not a parameter; declared are {', '.join(names)}")
    values: dict[str, Value] = {}
    for parameter in parameters:
        if parameter.name not in raw and parameter.absent is not None:
            values[parameter.name] = parameter.absent
            continue
        if parameter.name not in raw:
            raise ConfigError(f"{where}: parameter {parameter.name!r} is missing")
        values[parameter.name] = _typed_value(parameter, raw[parameter.name], where)
    return values


def _typed_value(parameter: Parameter, raw: object, where: str) -> Value:
    if parameter.derived:
        if type(raw) is int and raw >= 0:
            return raw
        if isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) < 12:
            return int(raw)
        raise ConfigError(f"{where}: {parameter.name} is {quoted(raw)}; it must be a count of bytes")
    for value in parameter.values:
        if (type(raw) is type(value) and raw == value) or (isinstance(raw, str) and raw == _format(value)):
            return value
    raise ConfigError(f"{where}: {parameter.name} is {quoted(raw)}; legal values are {', '.join(map(_format, parameter.values))}")


def _format(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
