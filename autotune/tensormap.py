"""Tensor maps: what the copy engine of sm_90 has to know of a tensor, encoded by the driver on the host.

The driver function is called through ctypes: it is one call, and its arguments are plain arrays.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from .kernels.base import Map

MAP_BYTES = 128
DATA_TYPES = {"fp16": 6, "bf16": 9}  # CUtensorMapDataType
SWIZZLE_128B, PROMOTE_L2_256B = 3, 3
ELEMENT_BYTES = 2
MAX_STRIDE_BYTES = 2**40
RANK = 4  # (column, row, head, batch)

_ones = (ctypes.c_uint32 * RANK)(1, 1, 1, 1)


class TensorMapError(RuntimeError):
    """The driver refused to encode a map, or there is no driver."""


@lru_cache(maxsize=4096)
def encode(shape: Map, dtype: str, pointer: int, columns: int, rows: int, heads: int, batch: int,
           batch_stride: int, row_stride: int, head_stride: int) -> bytes:
    """The 128 bytes of the map of a tensor (batch, rows, heads, columns) at device address `pointer`; strides in elements.

    Raises `TensorMapError` for what `unmappable` names.
    """
    tight = max(row_stride, columns) * ELEMENT_BYTES + 15 & -16
    strides = [stride * ELEMENT_BYTES if size > 1 else tight  # the stride of a single element must be legal too
               for size, stride in ((rows, row_stride), (heads, head_stride), (batch, batch_stride))]
    result = (ctypes.c_uint64 * 16)()
    buffer = (ctypes.c_uint64 * 24)()  # the driver wants 64-byte alignment
    aligned = ctypes.addressof(buffer) + 63 & -64
    status = _encoder()(
        aligned, DATA_TYPES[dtype], RANK, pointer, (ctypes.c_uint64 * RANK)(columns, max(rows, 1), heads, batch),
        (ctypes.c_uint64 * 3)(*strides), (ctypes.c_uint32 * RANK)(shape.columns, shape.rows, shape.heads, 1), _ones,
        0, SWIZZLE_128B, PROMOTE_L2_256B, 0)
    if status:
        raise TensorMapError(f"cuTensorMapEncodeTiled failed with CUresult {status} for a {dtype} tensor of shape "
                             f"{(batch, rows, heads, columns)} and strides {(batch_stride, row_stride, head_stride)}")
    ctypes.memmove(result, aligned, MAP_BYTES)
    return bytes(result)


def unmappable(sizes: tuple[int, int, int], strides: tuple[int, int, int]) -> str | None:
    """Why a tensor with (batch, rows, heads) of these sizes and strides in elements has no map, or None."""
    for name, size, stride in zip(("batch", "row", "head"), sizes, strides):
        if size > 1 and (stride <= 0 or stride * ELEMENT_BYTES >= MAX_STRIDE_BYTES):
            return f"its {name} stride is {stride} elements; the copy engine takes 1 to {MAX_STRIDE_BYTES // ELEMENT_BYTES - 1}"
    return None


@lru_cache(maxsize=1)
def _encoder():
    try:
        encoder = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise TensorMapError(f"the CUDA driver has no cuTensorMapEncodeTiled ({error}); a driver of CUDA 12 or newer has") from None
    encoder.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.c_void_p] * 4,
                        *[ctypes.c_int] * 4]
    return encoder
