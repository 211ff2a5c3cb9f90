"""Tensor maps: what TMA of sm_90 has to know of a tensor, encoded by the driver on the host.

The driver function is called through ctypes: it is one call, and its arguments are plain arrays, which are kept from call to
call, because making them costs more than the encoding itself.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

from ..kernels.base import Map

MAP_BYTES = 128
# Ready-made arguments of the driver: ctypes takes them twice as fast as ints.
DATA_TYPES = {"fp16": ctypes.c_int(6), "bf16": ctypes.c_int(9)}  # CUtensorMapDataType
NONE, SWIZZLE_128B, PROMOTE_L2_256B = ctypes.c_int(0), ctypes.c_int(3), ctypes.c_int(3)
ELEMENT_BYTES = 2
MAX_STRIDE = 2**40 // ELEMENT_BYTES  # elements; the driver takes less than this
RANK = ctypes.c_int(4)  # (column, row, head, batch)

_ARRAYS = struct.Struct("=4Q3Q4I4I")  # sizes, strides in bytes of all but the first, box, steps between a box's elements
_scratch: list[_Scratch] = []  # free ones; list.pop and list.append are atomic


class TensorMapError(RuntimeError):
    """The driver refused to encode a map, or there is no driver."""


class Unmappable(TensorMapError):
    """A tensor that no map describes. The message says why; it follows the tensor's name."""


class _Scratch:
    """The arrays of one driver call, in one block: the map, which must lie at a multiple of 64 bytes, then its arguments.
    `begin` and `end` are the map's place in `block`; the arguments begin at `end`."""

    __slots__ = ("block", "begin", "end", "map", "pointer", "sizes", "strides", "box", "steps")

    def __init__(self):
        self.block = (ctypes.c_char * (64 + MAP_BYTES + _ARRAYS.size))()
        start = ctypes.addressof(self.block)
        self.begin = -start & 63
        self.end = self.begin + MAP_BYTES
        self.map, self.pointer, self.sizes = (ctypes.c_void_p(at) for at in (start + self.begin, 0, start + self.end))
        self.strides, self.box, self.steps = (ctypes.c_void_p(start + self.end + offset) for offset in (32, 56, 72))


@lru_cache(maxsize=4096)
def encode(shape: Map, dtype: str, pointer: int, columns: int, rows: int, heads: int, batch: int,
           batch_stride: int, row_stride: int, head_stride: int) -> bytes:
    """The 128 bytes of the map of a tensor (batch, rows, heads, columns) at device address `pointer`; strides in elements.

    Cached: a call that is repeated takes 0.2 us, a new one 2. Raises `Unmappable` for what `unmappable` names, and
    `TensorMapError` if the driver refuses.
    """
    if not (0 < batch_stride < MAX_STRIDE and 0 < row_stride < MAX_STRIDE and 0 < head_stride < MAX_STRIDE):
        if reason := unmappable((batch, rows, heads), (batch_stride, row_stride, head_stride)):
            raise Unmappable(reason)
    tight = max(row_stride, columns) * ELEMENT_BYTES + 15 & -16  # the stride of a single element must be legal too
    try:
        scratch = _scratch.pop()
    except IndexError:
        scratch = _Scratch()
    try:
        scratch.pointer.value = pointer
        _ARRAYS.pack_into(scratch.block, scratch.end, columns, max(rows, 1), heads, batch,
                          row_stride * ELEMENT_BYTES if rows > 1 else tight, head_stride * ELEMENT_BYTES if heads > 1 else tight,
                          batch_stride * ELEMENT_BYTES if batch > 1 else tight,
                          shape.columns, shape.rows, shape.heads, 1, 1, 1, 1, 1)
        status = _encoder()(scratch.map, DATA_TYPES[dtype], RANK, scratch.pointer, scratch.sizes, scratch.strides, scratch.box,
                            scratch.steps, NONE, SWIZZLE_128B, PROMOTE_L2_256B, NONE)
        if status:
            raise TensorMapError(f"cuTensorMapEncodeTiled failed with CUresult {status} for a {dtype} tensor of shape "
                                 f"{(batch, rows, heads, columns)} and strides {(batch_stride, row_stride, head_stride)}")
        return scratch.block[scratch.begin:scratch.end]
    finally:
        _scratch.append(scratch)


def unmappable(sizes: tuple[int, int, int], strides: tuple[int, int, int]) -> str | None:
    """Why a tensor with (batch, rows, heads) of these sizes and strides in elements has no map, or None."""
    for name, size, stride in zip(("batch", "row", "head"), sizes, strides):
        if size > 1 and (stride <= 0 or stride >= MAX_STRIDE):
            return f"its {name} stride is {stride} elements; TMA takes 1 to {MAX_STRIDE - 1}"
    return None


@lru_cache(maxsize=1)
def _encoder():
    try:
        return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise TensorMapError(f"the CUDA driver has no cuTensorMapEncodeTiled ({error}); one of CUDA 12 or newer has") from None
