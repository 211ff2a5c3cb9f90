"""A second stream beside a caller's, for two launches of one call that may run at the same time.

    with streams.beside(device, stream) as other:
        first.launch(other, ...)
        second.launch(stream, ...)     # on SMs that the first one leaves

Both begin when all that was enqueued on the stream before has ended, and what is enqueued on it later waits for both. Captured
into a CUDA graph, they become branches of it. A higher priority for the first one's stream changes nothing on an H200.
"""

from __future__ import annotations

from contextlib import nullcontext

from .capture import PER_THREAD, stream_key

NON_BLOCKING, NO_TIMING = 1, 2  # cudaStreamNonBlocking, cudaEventDisableTiming

DEFAULT_STREAMS = 0, 1, 2  # of whatever device is current: handles of the legacy one (two of them) and of a thread's own

_beside: dict[tuple, Beside] = {}  # by device and stream_key


class Beside:
    """A stream, and the events that tie it to the one that it is beside. Each stream has its own, as two threads may capture
    theirs at the same time. It lives as long as the process: a graph may hold it."""

    __slots__ = ("stream", "_of", "_current", "_begin", "_end", "_record", "_wait")

    def __init__(self, device: int, stream: int):
        on_device, runtime = _cuda()
        self._of = stream
        self._current = on_device(device) if stream in DEFAULT_STREAMS else nullcontext()
        self._record, self._wait = runtime.eventRecord, runtime.streamWaitEvent
        with on_device(device):
            self.stream = runtime.streamCreateWithFlags(NON_BLOCKING)
            self._begin, self._end = (runtime.eventCreateWithFlags(NO_TIMING) for _ in range(2))

    def begin(self) -> Beside:
        """What is enqueued here from now on waits for what has been on the caller's stream."""
        self._order(self._begin, self._of, self.stream)
        return self

    def join(self) -> None:
        """What is enqueued on the caller's stream from now on waits for what has been here."""
        self._order(self._end, self.stream, self._of)

    def __enter__(self) -> int:
        return self.begin().stream

    def __exit__(self, *_) -> None:
        self.join()

    def _order(self, event: int, before: int, after: int) -> None:
        """What is enqueued on `after` from now on waits for what has been on `before`."""
        with self._current:
            self._record(event, before)
            self._wait(after, event)


def beside(device: int, stream: int) -> Beside:
    """The stream beside `stream` (a cudaStream_t as int), to be entered."""
    key = device, stream if stream != PER_THREAD else stream_key(stream)
    found = _beside.get(key)
    if found is None:
        found = _beside.setdefault(key, Beside(device, stream))
    return found


def fork(device: int, stream: int) -> Beside:
    """The stream beside `stream`, begun; its `join` must follow."""
    return beside(device, stream).begin()


def _cuda() -> tuple:
    from cupy.cuda import Device, runtime

    return Device, runtime
