"""SIGTERM and SIGHUP end a tune as Ctrl-C does: what was measured is kept, and no kernel is blamed for the end."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager

ENDING = ("SIGTERM", "SIGHUP")


@contextmanager
def ending_as_interrupts():
    """Within it those signals raise `KeyboardInterrupt`, if this is the main thread and they would have ended the process."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ENDING:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup's SIG_IGN stays
                before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
