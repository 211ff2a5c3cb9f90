"""Workspaces that launches on one stream use one after the other, so that a call allocates none.

Their memory is the driver's own, as that of counters is and for the same reason. It is never freed, so only so much of it is
made; beyond that, calls allocate from their arrays' library.
"""

from __future__ import annotations

import threading

from . import counters
from .launch import LaunchError

LEAST_BYTES, MOST_BYTES = 1 << 20, 1 << 24  # of a stream's; those that it outgrew have less than that together
MOST_OF_A_DEVICE = 1 << 26
NONE = 0, 0

_lock = threading.Lock()
_of_stream: dict[tuple, tuple[int, int]] = {}  # (device, stream_id) -> (pointer, bytes)
_made: dict[int, int] = {}  # device -> bytes


def find(device: int, stream, size: int) -> int:
    """The pointer of `size` bytes for a launch on the stream that `counters.stream_id` calls `stream`, or 0: there are none.

    For one kernel that begins with no other one, and not for a captured one. What follows it on the stream has the same bytes:
    of two kernels, one could find between them what another thread's call left."""
    pointer, room = _of_stream.get((device, stream), NONE)
    if room >= size or stream is None or size > MOST_BYTES:
        return pointer if room >= size else 0
    with _lock:
        pointer, room = _of_stream.get((device, stream), NONE)  # another thread may have been quicker
        return pointer if room >= size else _make(device, stream, max(LEAST_BYTES, 1 << (size - 1).bit_length()))


def _make(device: int, stream, room: int) -> int:
    made = _made.get(device, 0)
    if made + room > MOST_OF_A_DEVICE:
        return 0
    try:
        pointer = counters.zeros(device, room // 4)
    except LaunchError:  # no memory is left: a library may have some in its pool
        _made[device] = MOST_OF_A_DEVICE
        return 0
    _made[device] = made + room
    _of_stream[device, stream] = pointer, room
    return pointer
