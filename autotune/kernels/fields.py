"""Params, the one by-value argument of every kernel: its fields, where their values come from, and how they lie in memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..core.masks import KINDS
from ..core.problem import Static

UNBOUNDED = 2**30 - 2**16  # a window side that hides nothing
LOG2E = 1.4426950408889634
MAX_FLOAT = 3.4e38  # what a float of Params can hold
LEAST_ALIBI_SCALE = 1e-30  # slopes are divided by the scale, and must stay floats; scores this small are 0 beside any slope

# C type in the Params struct -> struct format code. Natural alignment; sizes are those of every CUDA target.
FIELD_CODES = {"TensorMap": "128s", "pointer": "Q", "long long": "q", "int": "i", "unsigned": "I", "float": "f"}


@dataclass(frozen=True)
class Field:
    """One member of a kernel's Params. `type` is a C type; a pointer type ends in ``*``.

    `of` says where a launch takes the value from: an expression over what `Kernel.known` gives for a problem and config, and else
    over the fields of a `Call`. Without it the value is that of the same name.
    """

    type: str
    name: str
    doc: str = ""
    of: str = ""

    @property
    def code(self) -> str:
        return FIELD_CODES["pointer" if self.type.endswith("*") else self.type]


def mask_fields(static: Static) -> tuple[Field, ...]:
    """The numbers of a mask that may differ from call to call."""
    return tuple(Field("int", name, doc, of=f"bounds.{name}") for name, doc in KINDS[static.mask].items())


def params_format(fields: tuple[Field, ...]) -> str:
    """`struct` format that packs `fields` as the compiler lays them out (native alignment, tail padding included)."""
    return "@" + "".join(field.code for field in fields) + "0q"


def params_bytes(fields: tuple[Field, ...]) -> int:
    return struct.calcsize(params_format(fields))


def reciprocal(divisor: int) -> tuple[int, int]:
    """(magic, shift): n // divisor == n * magic >> (31 + shift) for 0 <= n < 2^31."""
    shift = (divisor - 1).bit_length()
    return (1 << 31 + shift) // divisor + 1, shift


def bounded(side: int | None) -> int:
    """A side of a window, as kernels take it."""
    return UNBOUNDED if side is None else min(side, UNBOUNDED)
