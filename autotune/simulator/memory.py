"""The arrays of a simulated launch, as a file that the program maps where the kernel's pointers point."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import numpy as np

from ..kernels.base import Map
from .compiler import HostFault

BASE_ADDRESS = 1 << 36  # low enough for address spaces of 39 bits, far from everything else of the program
PAGE = mmap.PAGESIZE
GUARD_PAGES = 16
SWIZZLE_BYTES = 128  # of every tensor map


class Memory:
    """The file that holds the arrays. Each stands between pages that cannot be touched: `at_end`, against the page after it,
    else against the one before it, so that a plain pointer that leaves it on that side is caught at once."""

    def __init__(self, at_end: bool):
        self.address: dict[str, int] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self._parts: list[tuple[int, bytes]] = []
        self._lines: list[str] = []
        self._outputs: list[tuple[int, np.ndarray]] = []
        self._end = 0
        self._at_end = at_end

    def add(self, name: str, array: np.ndarray, writable: bool) -> None:
        """Copies `array` with the memory between its elements, which the kernel must not touch."""
        self.arrays[name] = array
        low, data, mask = _span(array)
        self._guard()
        size = -(-len(data) // PAGE) * PAGE
        offset = self._end + (size - len(data) if self._at_end else 0)
        self.address[name] = BASE_ADDRESS + offset + (array.ctypes.data - low)
        self._parts.append((offset, data))
        self._end += size
        self._guard()
        mask_at = self.add_bytes(mask)
        self._lines.append(f"buffer {name} {offset} {len(data)} {mask_at} {int(writable)}")
        if writable:  # then strides are above 0
            self._outputs.append((offset + (array.ctypes.data - low), array))

    def add_bytes(self, data: bytes) -> int:
        """Their offset, a multiple of the page size."""
        offset = self._end
        self._parts.append((offset, data))
        self._end += -(-max(len(data), 1) // PAGE) * PAGE
        return offset

    def _guard(self) -> None:
        self._lines.append(f"guard {self._end} {GUARD_PAGES * PAGE}")
        self._end += GUARD_PAGES * PAGE

    @contextmanager
    def file(self) -> Iterator[tuple[Path, list[str]]]:
        """(the file, the job's lines that describe it). It is there meanwhile; when the block ends, outputs are copied back.

        Raises `HostFault` if there is no room for it.
        """
        try:
            file = tempfile.NamedTemporaryFile(prefix="autotune-simulation-")
        except OSError as error:
            raise HostFault.of("arrays of a simulation", tempfile.gettempdir(), error) from None
        with file:
            try:
                self._fill(file.fileno())
            except OSError as error:
                raise HostFault.of("arrays of a simulation", Path(file.name).parent, error) from None
            yield Path(file.name), [f"memory {BASE_ADDRESS} {self._end}", *self._lines]
            for offset, array in self._outputs:
                raw = os.pread(file.fileno(), _extent(array), offset)
                array[...] = np.ndarray(array.shape, array.dtype, raw, strides=array.strides)

    def _fill(self, file: int) -> None:
        """Takes the whole file's room on the disk: what is mapped and finds none later is a crash."""
        os.truncate(file, self._end)
        if self._end and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, self._end)
        for offset, data in self._parts:
            while data:
                count = os.pwrite(file, data, offset)
                data, offset = data[count:], offset + count


def _extent(array: np.ndarray) -> int:
    """Bytes from the lowest to the end of the highest element."""
    return sum((n - 1) * abs(stride) for n, stride in zip(array.shape, array.strides)) + array.itemsize if array.size else 0


def _span(array: np.ndarray) -> tuple[int, bytes, bytes]:
    """(address, bytes, mask) of the memory from the lowest to the highest element; the mask is 1 where there is an element."""
    extent = _extent(array)
    first = sum((n - 1) * -stride for n, stride in zip(array.shape, array.strides) if stride < 0) if array.size else 0
    low = array.ctypes.data - first
    raw = (ctypes.c_ubyte * extent).from_address(low) if extent else b""
    mask = np.zeros(extent, np.uint8)
    if extent:
        view = np.lib.stride_tricks.as_strided(mask[first:], (*array.shape, array.itemsize), (*array.strides, 1))
        view[...] = 1
    return low, bytes(raw), mask.tobytes()


def tensor_map(shape: Map, itemsize: int, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The 128 bytes of runtime/sim.hpp's Tensor for a (batch, rows, heads, columns) array with these strides, in elements, of all
    but the last axis."""
    (batch, rows, heads, columns), (batch_stride, row_stride, head_stride) = sizes, (stride * itemsize for stride in strides)
    return struct.pack("16Q", address, columns, rows, heads, batch, row_stride, head_stride, batch_stride,
                       shape.columns, shape.rows, shape.heads, itemsize, SWIZZLE_BYTES, 0, 0, 0)
