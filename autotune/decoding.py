"""The fields of a decode launch's Params, from arrays of any kind: what `verify`, the simulator and calls share."""

from __future__ import annotations

from typing import Mapping, Sequence

from .kernels.decode import DECODE_POINTERS, DECODE_TENSORS, Launches


def params(launches: Launches, pointers: Mapping[str, int], strides: Mapping[str, Sequence[int]], table_stride: int = 0) -> tuple:
    """All fields in order. `pointers` by name (absent: none); `strides` of q, k, v and out by (batch or page, row, head), in
    elements."""
    return (*(pointers.get(name, 0) for name in DECODE_POINTERS), *(s for name in DECODE_TENSORS for s in strides[name]),
            table_stride, *launches.scalars)


def workspace(launches: Launches, head_dim_v: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the float32 arrays that a launch needs, empty if it needs none."""
    if not launches.slots:
        return {}
    return {"partial_o": (launches.slots, launches.rows, head_dim_v), "partial_statistics": (launches.slots, launches.rows, 2)}
