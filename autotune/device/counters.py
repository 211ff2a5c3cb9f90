"""Counters on the device that launches draw tickets from: 0 whenever a launch begins, and left at 0 by it."""

from __future__ import annotations

import threading

from .capture import PER_THREAD, stream_key

RESERVE = 1 << 18  # tickets set aside for captured graphs at a time: 1 MB, enough for 128 calls of 2048 sequences and heads
LEAST_TICKETS = 4096

_lock = threading.Lock()
_in_use: dict[tuple, tuple[object, int, int]] = {}  # (library, device, stream_key, beside) -> (array, pointer, tickets)
_reserve: dict[tuple, tuple[object, int, int]] = {}  # (library, device) -> (array, pointer of the next free one, tickets left)
_kept: list[object] = []  # arrays that captured graphs point into


def take(library, like, device: int, stream: int, count: int, capturing: bool, beside: bool = False) -> tuple[int, object]:
    """(pointer to `count` counters that are 0 whenever the launch begins, what must live until it has been enqueued).

    Launches that follow each other on one stream share their counters, but for one that may run `beside` the launch before it. A
    captured graph may be replayed on any stream, beside anything else, so each captured launch has counters of its own, for good.
    """
    with _lock:
        if not capturing:
            key = library, device, stream if stream != PER_THREAD else stream_key(stream), beside
            entry = _in_use.get(key)
            if entry is None or entry[2] < count:
                array = library.zeros_int32(like, (max(count, LEAST_TICKETS),))
                entry = _in_use[key] = array, library.pointer(array), max(count, LEAST_TICKETS)
                if (library, device) not in _reserve:
                    set_aside(library, like, device)
            return entry[1], entry[0]
        array, pointer, left = _reserve.get((library, device), (None, 0, 0))
        if left >= count:
            _reserve[library, device] = array, pointer + 4 * count, left - count
            return pointer, array
    array = library.zeros_int32(like, (count,))  # zeroed by the graph at every replay: 1 us more
    _kept.append(array)
    return library.pointer(array), array


def set_aside(library, like, device: int) -> None:
    """Allocates counters for launches that will be captured. Waits for the device, so that they are 0 on every stream."""
    array = library.zeros_int32(like, (RESERVE,))
    library.synchronize(device)
    _kept.append(array)
    _reserve[library, device] = array, library.pointer(array), RESERVE
