"""CuPy, imported where it is needed: one sentence if that fails, and a Ctrl-C at that moment is not lost.

CuPy makes a folder for its own kernels when it is imported, and fails where it cannot: without a home folder, or with one that
cannot be written, as in many containers. Then it is given a folder below $AUTOTUNE_CACHE, if that is set.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from contextlib import contextmanager
from operator import attrgetter
from typing import Iterator

_HOME_FOLDER = "CUPY_CACHE_DIR"


class CupyMissing(ImportError):
    """CuPy cannot be imported, with the reason and the command or variable that helps."""


def cupy_part(name: str):
    """The part `name` of CuPy, such as ``cuda.runtime``. Raises `CupyMissing`."""
    if _without_home():
        _lend_folder()
    try:
        return _imported(name)
    except CupyMissing:
        raise
    except OSError as error:
        if not _lend_folder():
            raise _no_folder(error) from None
    try:
        return _imported(name)
    except OSError as error:
        raise _no_folder(error) from None


def _imported(name: str):
    try:
        return attrgetter(name)(importlib.import_module("cupy"))
    except ImportError as error:
        raise CupyMissing(f"CuPy is not installed ({error}); pip install 'cupy-cuda13x[ctk]' (driver 580 or newer) or "
                          "'cupy-cuda12x[ctk]' brings CuPy and NVRTC") from None
    except OSError:
        for module in [module for module in sys.modules if module.partition(".")[0] == "cupy"]:
            del sys.modules[module]  # half imported
        raise
    except Exception as error:
        raise CupyMissing(f"CuPy cannot be imported ({type(error).__name__}: {error})") from None


def _without_home() -> bool:
    """Whether CuPy would make a folder named `~` in the current one."""
    return os.path.expanduser("~") == "~"


def _lend_folder() -> bool:
    ours = os.environ.get("AUTOTUNE_CACHE")
    if not ours or _HOME_FOLDER in os.environ:
        return False
    os.environ[_HOME_FOLDER] = os.path.join(os.path.expanduser(ours), "cupy")
    return True


def _no_folder(error: OSError) -> CupyMissing:
    return CupyMissing(f"CuPy cannot be imported ({error.strerror or error}: {error.filename}), because it cannot keep its "
                       f"kernels "
                       f"there; set {_HOME_FOLDER} to a folder that can be written")


@contextmanager
def interrupts_held() -> Iterator[None]:
    """SIGINT waits until the block has ended.

    NVRTC's first compile of a process installs a handler of its own for some 50 ms, which ends the process with code 4 (in a
    thread of another library it crashes). It leaves a signal alone that is ignored. One that this thread blocks is kept, though
    it is ignored. Only the main thread can do that.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before, handler = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}), signal.getsignal(signal.SIGINT)
    if handler is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
