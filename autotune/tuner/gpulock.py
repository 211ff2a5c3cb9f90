"""One tune at a time on a GPU: two would poison each other's timings.

The lock is a file of this user, named by the GPU's UUID, and, where the system lets it, the GPU's device node, which users and
containers share. Both are flock, so they end with the process; no link is followed, and nothing is written into what is locked.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable

from ..database.view import user_root


class LockError(OSError):
    """The lock of a GPU cannot be taken, with a sentence that says which file and what to do."""


def lock_folder() -> Path:
    """$XDG_RUNTIME_DIR if it is this user's alone, else a folder beside the user's database."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        try:
            facts = os.stat(runtime)
        except OSError:
            facts = None
        if facts and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return Path(runtime) / "autotune"
    return user_root() / "locks"


def lock_path(device: int) -> Path:
    """The lock file of the GPU at CUDA index `device`: its name is the GPU's UUID, so that it is one GPU's on every machine."""
    from cupy.cuda import runtime  # needs no CUDA context

    uuid = runtime.getDeviceProperties(device).get("uuid", b"")
    name = bytes(uuid).hex() if isinstance(uuid, (bytes, bytearray)) else re.sub(r"[^\w-]", "", str(uuid))
    if not name.strip("0"):
        name = re.sub(r"[^\w-]", "-", runtime.deviceGetPCIBusId(device))
    return lock_folder() / f"gpu-{name}.lock"


def device_node(device: int, drivers: Path = Path("/proc/driver/nvidia/gpus")) -> Path | None:
    """``/dev/nvidia0``, by what the driver says of the GPU's bus; None where that is not to be found out."""
    from cupy.cuda import runtime

    try:
        facts = (drivers / runtime.deviceGetPCIBusId(device).lower() / "information").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    minor = re.search(r"Device Minor:\s*(\d+)", facts)
    return Path(f"/dev/nvidia{minor[1]}") if minor else None


@contextmanager
def gpu_lock(device: int, say: Callable[[str], None]):
    """Holds the GPU at CUDA index `device`. Waits for another tune, and says so. Raises `LockError`."""
    with ExitStack() as held:
        held.enter_context(held_file(lock_path(device), say))
        node = device_node(device)
        if node is not None:
            held.enter_context(held_file(node, say, ours=False))
        yield


@contextmanager
def held_file(path: Path, say: Callable[[str], None], ours: bool = True):
    """An exclusive flock on `path`. A file of ours is made if it is not there; another's that cannot be opened is let be."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_RDWR | os.O_CREAT if ours else os.O_RDONLY)
    try:
        if ours:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, flags, 0o600)
    except OSError as error:
        if not ours:
            yield
            return
        raise _fault(path, error) from None
    try:
        try:
            if ours and not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(0, "it is not a regular file")
            _flock(file, path, say)
        except OSError as error:
            if ours:
                raise _fault(path, error) from None
        yield
    finally:
        os.close(file)


def _flock(file: int, path: Path, say: Callable[[str], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(f"waiting for another tune on this GPU (it holds {path})")
        fcntl.flock(file, fcntl.LOCK_EX)


def _fault(path: Path, error: OSError) -> LockError:
    return LockError(f"{path}, the lock of this GPU, cannot be used ({error.strerror or error}); move it away, or set "
                     "XDG_RUNTIME_DIR or AUTOTUNE_DB to a folder of your own")
