"""Counters on the device that launches draw tickets from: 0 whenever a launch begins, and left at 0 by it.

Their memory is the driver's own, not an array library's: a library may lend it from the pool of a graph that it records (torch
does so while `torch.compile(mode="reduce-overhead")` warms up, when no capture can be seen yet), and counters outlive that.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from functools import lru_cache

from . import launch
from .capture import PER_THREAD, stream_key

RESERVE = 1 << 18  # tickets that are asked of the driver at a time: 1 MB, enough for 128 calls of 2048 sequences and heads
LEAST_TICKETS = 4096
MOST_STREAMS = 1024  # of a device that have counters of their own, 16 MB: a program may make and destroy streams without end
RELAXED, NON_BLOCKING = 2, 1  # CU_STREAM_CAPTURE_MODE_RELAXED, cudaStreamNonBlocking

_lock = threading.Lock()
_in_use: dict[tuple, tuple[int, int]] = {}  # (device, stream_id, beside) -> (pointer, tickets)
_ids: list[tuple] = []  # free arguments of `stream_id`; list.pop and list.append are atomic
_reserve: dict[int, tuple[int, int]] = {}  # device -> (pointer of the next free one, tickets left)


def take(library, like, device: int, stream, count: int, capturing: bool, beside: bool = False) -> tuple[int, object]:
    """(pointer to `count` counters that are 0 whenever the launch begins, what must live until it has been enqueued).

    Launches that follow each other on one stream share their counters, but for one that may run `beside` the launch before it.
    `stream` is its `stream_id`: its handle may be that of one that was destroyed while launches of it were still to run. A
    captured graph may be replayed on any stream, beside anything else, so each captured launch has counters of its own, for
    good. Where none are left, or a stream cannot be told from others, `library` lends them, and what zeroes them is enqueued, or
    captured, before the launch: 1 us more.
    """
    key = (device, stream, beside) if not capturing else None
    entry = _in_use.get(key)
    if entry is not None and entry[1] >= count:
        return entry[0], None
    with _lock:
        if capturing:
            if _reserve.get(device, (0, 0))[1] >= count:
                return _draw(device, count), None
        elif key[1] is not None and (entry or len(_in_use) < MOST_STREAMS):
            entry = _in_use[key] = _draw(device, max(count, LEAST_TICKETS)), max(count, LEAST_TICKETS)
            return entry[0], None
    array = library.workspace(like, count, capturing)
    library.zero(array)
    return library.pointer(array), array


def stream_id(stream: int):
    """What names the stream of this handle among all that there ever are in this process, or None if the driver, older than
    CUDA 12, cannot say. 0.4 us."""
    if stream <= PER_THREAD:  # default streams, which nobody can destroy
        return stream_key(stream) if stream == PER_THREAD else (stream, None)
    ask = _id_of()
    if ask is None:
        return None
    try:
        arguments = _ids.pop()
    except IndexError:
        number = ctypes.c_ulonglong()
        arguments = number, ctypes.byref(number), ctypes.c_void_p()
    number, number_at, handle = arguments
    try:
        handle.value = stream
        return None if ask(handle, number_at) else number.value  # a handle that is none fails at the launch
    finally:
        _ids.append(arguments)


def set_aside(device: int) -> None:
    """Sees to it that launches on `device` that are captured next have counters. Not to be called under capture."""
    with _lock:
        if device not in _reserve:
            _reserve[device] = zeros(device, RESERVE), RESERVE


def _draw(device: int, count: int) -> int:
    """The pointer of `count` counters that nobody has had."""
    pointer, left = _reserve.get(device, (0, 0))
    if left < count:
        left = max(count, RESERVE)
        pointer = zeros(device, left)
    _reserve[device] = pointer + 4 * count, left - count
    return pointer


def zeros(device: int, count: int) -> int:
    """The pointer of `count` 32-bit numbers that are 0 for every stream. They are never freed: a graph may point into them.
    Raises `LaunchError`."""
    def make(runtime) -> int:
        pointer = runtime.malloc(4 * count)
        stream = runtime.streamCreateWithFlags(NON_BLOCKING)  # one that nobody captures
        try:
            runtime.memsetAsync(pointer, 0, 4 * count, stream)
            runtime.streamSynchronize(stream)
        finally:
            runtime.streamDestroy(stream)
        return pointer

    try:
        with _beside_captures():
            return launch.on_device(device, make)
    except RuntimeError as error:
        raise launch.LaunchError(f"{4 * count} bytes of counters cannot be had on CUDA device {device}: {error}",
                                 getattr(error, "status", 0)) from error


@contextmanager
def _beside_captures():
    """What this thread asks of CUDA meanwhile does not end a capture of another thread's, as an allocation otherwise may."""
    mode = ctypes.c_int(RELAXED)
    exchange = _exchange()
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@lru_cache(maxsize=1)
def _exchange():
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode


@lru_cache(maxsize=1)
def _id_of():
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetId
    except (OSError, AttributeError):
        return None
