"""Streams and signals of a command: what a terminal lacks is escaped, a standard error that is closed or full stops nothing, and
SIGTERM and SIGHUP end a command as Ctrl-C does, with what was found kept."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import Iterator

from ..core.reading import printable


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP. `code` is the exit code that a shell gives such a process."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class _Stderr:
    """Standard error, whose faults are nobody's business: the exit code says how it went."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):  # full; closed
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


@contextmanager
def prepared() -> Iterator[None]:
    """Both streams and both signals as a command needs them; as they were when the block ends."""
    stderr = sys.stderr
    for stream in (sys.stdout, stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.stderr = _Stderr(open(os.devnull, "w") if stderr is None else stderr)
    handlers = _catch((signal.SIGTERM, getattr(signal, "SIGHUP", None)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if stderr is not None:
            sys.stderr = stderr


def _catch(numbers) -> dict:
    """The handlers that were there. What is ignored (nohup) stays ignored, and what somebody handles stays his."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, _stop) for number in numbers
            if number is not None and signal.getsignal(number) is signal.SIG_DFL}


def _stop(number: int, frame) -> None:
    raise Stopped(number)


def say(line: str) -> None:
    """A line on standard error."""
    print(printable(line), file=sys.stderr, flush=True)
