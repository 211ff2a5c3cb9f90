"""A second stream beside a caller's, for two launches of one call that may run at the same time.

    with fork.beside(device, stream) as other:
        first.launch(other, ...)
        second.launch(stream, ...)     # on SMs that the first one leaves

Both begin when all that was enqueued on the stream before has ended, and what is enqueued on it later waits for both. Captured
into a CUDA graph, they become branches of it. A higher priority for the first one's stream changes nothing on an H200.
"""

from __future__ import annotations

NON_BLOCKING, NO_TIMING = 1, 2  # cudaStreamNonBlocking, cudaEventDisableTiming

_beside: dict[tuple[int, int], Beside] = {}  # by (device, stream)


class Beside:
    """A stream, and the events that tie it to the one that it is beside. Each stream has its own, as two threads may capture
    theirs at the same time. It lives as long as the process: a graph may hold it."""

    __slots__ = ("stream", "_of", "_begin", "_end", "_record", "_wait")

    def __init__(self, device: int, stream: int):
        on_device, runtime = _cuda()
        self._of = stream
        self._record, self._wait = runtime.eventRecord, runtime.streamWaitEvent
        with on_device(device):
            self.stream = runtime.streamCreateWithFlags(NON_BLOCKING)
            self._begin, self._end = (runtime.eventCreateWithFlags(NO_TIMING) for _ in range(2))

    def __enter__(self) -> int:
        self._record(self._begin, self._of)
        self._wait(self.stream, self._begin)
        return self.stream

    def __exit__(self, *_) -> None:
        self._record(self._end, self.stream)
        self._wait(self._of, self._end)


def beside(device: int, stream: int) -> Beside:
    """The stream beside `stream` (a cudaStream_t as int), to be entered."""
    found = _beside.get((device, stream))
    if found is None:
        found = _beside.setdefault((device, stream), Beside(device, stream))
    return found


def _cuda() -> tuple:
    from cupy.cuda import Device, runtime

    return Device, runtime
