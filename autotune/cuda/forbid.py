"""Nothing compiles from here on: a server that has prepared all it needs wants an error, not a request that waits seconds.

    autotune.prepare("llama-3-8b")
    autotune.forbid_compiling()                  # for the process, or
    with autotune.forbid_compiling():            # for a block, in all of its threads
        ...
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_in_force = 0


class CompilingForbidden(RuntimeError):
    """A kernel would have to be compiled, and `forbid_compiling` is in force."""


class forbid_compiling:  # noqa: N801 it reads as the function that it is
    """Makes every later compile of a kernel raise `CompilingForbidden`. As a context manager it ends with its block."""

    def __init__(self):
        global _in_force
        with _lock:
            _in_force += 1
        self._ended = False

    def end(self) -> None:
        """Allows compiles again, unless somebody else forbids them."""
        global _in_force
        with _lock:
            _in_force -= not self._ended
            self._ended = True

    def __enter__(self) -> forbid_compiling:
        return self

    def __exit__(self, *_) -> None:
        self.end()


def check(target: str) -> None:
    """Raises `CompilingForbidden` if a compile for `target` may not begin."""
    if _in_force:
        raise CompilingForbidden(f"a kernel for {target} is not compiled yet, and autotune.forbid_compiling() is in force; call "
                                 "autotune.prepare() with the problem or the model before it")
