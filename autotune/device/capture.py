"""What a stream is doing: whether it is being captured into a graph, and which stream a handle names."""

from __future__ import annotations

import itertools
import threading
from functools import lru_cache

PER_THREAD = 2  # the handle of a thread's own default stream

_of_thread, _threads = threading.local(), itertools.count()


@lru_cache(maxsize=1)
def _runtime():
    from cupy_backends.cuda.api import runtime

    return runtime


def is_capturing(stream: int) -> bool:
    """Whether `stream` (a cudaStream_t) is being captured into a graph.

    For the legacy default stream CUDA answers with an error while another stream is captured: then nothing may be loaded
    either, so that is a yes.
    """
    runtime = _runtime()
    try:
        return runtime.streamIsCapturing(stream)
    except RuntimeError:
        return True


def stream_key(stream: int):
    """What names the stream of this handle among those that there are: each thread has a default stream of its own, with one
    handle. A stream that comes after one that was destroyed may have its handle."""
    if stream != PER_THREAD:
        return stream
    try:
        return stream, _of_thread.number
    except AttributeError:
        _of_thread.number = next(_threads)  # get_ident of a thread that has ended is given to another one
        return stream, _of_thread.number
