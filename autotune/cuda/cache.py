"""The cache folder: what was compiled, kept for the next process. It may be deleted, damaged, full, read-only or somebody else's;
none of that is an error of a call, which has its binary in memory by then.

An entry is a folder of files with one sum over all of them and the entry's name. It is written beside and renamed, so a reader
sees a whole entry or none. What is read from it is executed, so it must be of this user or of root, and nobody else may be able
to write it; a folder that a group shares on purpose (`Trust`) is the exception. docs/database.md says how that is set up.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Mapping

from ..core.folders import NoFolder, named_folder, user_folder
from ..core.reading import ReadError, contents, shown

SUM = "sum.txt"
MAX_FILE_BYTES = 256 << 20
SCRATCH, OLD = ".new-", ".old-"
LEFT_BEHIND_S = 86400  # what a killed process left is removed when it is a day old
TRIES = 20  # to put an entry where others are putting theirs

_GROUP, _OTHERS = stat.S_IWGRP, stat.S_IWOTH


class CacheError(OSError):
    """The cache folder cannot be used, where there is no other place."""

    @classmethod
    def of(cls, folder: Path, error: OSError) -> CacheError:
        return cls(f"the cache folder {shown(folder)} cannot be written ({error.strerror or error}); free some space, or set "
                   "AUTOTUNE_CACHE to a folder that can be written")


class CacheWarning(UserWarning):
    """The cache is of no use, so the next process compiles again. Said once for each folder and reason."""


def cache_dir() -> Path:
    """The folder of compiled binaries: $AUTOTUNE_CACHE, or the user's cache folder. Raises `CacheError` if there is neither."""
    try:
        return named_folder("AUTOTUNE_CACHE") or user_folder("cache", "AUTOTUNE_CACHE")
    except NoFolder as error:
        raise CacheError(f"compiled kernels cannot be kept: {error}") from None


@dataclass(frozen=True)
class Trust:
    """Whose files are used. `team` is the group of a cache folder that is set up for one: with the set-group-id bit, writable for
    a group that this process is in, and for nobody beyond it (chmod 2775 or 2770). Its members run what the others compiled."""

    team: int | None

    @classmethod
    def of(cls, folder: Path | None) -> Trust:
        try:
            status = os.stat(folder)
        except (OSError, ValueError, TypeError):
            return cls(None)
        shared = status.st_mode & stat.S_ISGID and status.st_mode & _GROUP and not status.st_mode & _OTHERS
        return cls(status.st_gid if shared and status.st_gid in {os.getegid(), *os.getgroups()} else None)

    def refuses(self, status: os.stat_result) -> str:
        """Why a file or folder is not used, "" if it is."""
        if status.st_mode & _OTHERS:
            return "everybody may write it"
        if self.team is not None and status.st_gid == self.team:
            return ""
        if status.st_uid not in (os.geteuid(), 0):
            return f"it belongs to another user (uid {status.st_uid})"
        if status.st_mode & _GROUP and not _private(status.st_gid):
            return f"a group (gid {status.st_gid}) may write it"
        return ""

    @property
    def mode(self) -> int:
        """Of new folders, before the umask: a team's can be written by it, others by nobody else."""
        return 0o755 if self.team is None else 0o2775


def _private(gid: int) -> bool:
    """Whether this is the group of one user that many systems give each: then its rights are the owner's."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def read_entry(folder: Path, names: Iterable[str], trust: Trust) -> dict[str, bytes] | None:
    """The files of the entry at `folder`: its name -> bytes; None if it is absent, damaged, or not to be trusted (said once)."""
    try:
        entry = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        _check(os.fstat(entry), trust)
        files = {name: _read(entry, name, trust) for name in (*names, SUM)}
    except _Refused as refused:
        tell(folder.parent, "trust", f"{shown(folder.name)} in the cache folder {shown(folder.parent)} is not used: "
             f"{refused}; set AUTOTUNE_CACHE to a folder that is yours alone")
        return None
    except (OSError, ReadError):
        return None
    finally:
        os.close(entry)
    return files if files.pop(SUM) == _sum(folder.name, files) else None


def read_file(path: Path, trust: Trust | None) -> bytes:
    """The bytes of one file, if `trust` does not refuse it (None: of the package itself). Raises `OSError`, `ReadError`."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if trust is not None and (reason := trust.refuses(os.fstat(file))):
            tell(path.parent, "trust", f"{shown(path)} is not used: {reason}; set AUTOTUNE_CACHE to a folder that is yours alone")
            raise OSError(reason)
        return contents(file, MAX_FILE_BYTES)
    finally:
        os.close(file)


class _Refused(Exception):
    pass


def _check(status: os.stat_result, trust: Trust) -> None:
    if reason := trust.refuses(status):
        raise _Refused(reason)


def _read(entry: int, name: str, trust: Trust) -> bytes:
    """What is read is what was judged: the open file, whatever its name stands for by now."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, dir_fd=entry)
    try:
        _check(os.fstat(file), trust)
        return contents(file, MAX_FILE_BYTES)
    finally:
        os.close(file)


def _sum(name: str, files: Mapping[str, bytes]) -> bytes:
    """Over the entry's name, which is its key, and over every file and its name: nothing can be exchanged for another's."""
    total = hashlib.sha256(name.encode())
    for file in sorted(files):
        total.update(f"\0{file}\0{hashlib.sha256(files[file]).hexdigest()}".encode())
    return f"{total.hexdigest()}\n".encode()


def keep(folder: Path, files: Mapping[str, bytes], trust: Trust) -> None:
    """Puts the entry where the next process finds it, or says once why that cannot be. Raises nothing."""
    try:
        with scratch(folder, trust) as beside:
            for name, data in files.items():
                (beside / name).write_bytes(data)
            seal(beside, folder, trust)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        tell(folder.parent, "write", f"the cache folder {shown(folder.parent)} cannot be written ({reason}), so the next process "
             "compiles again; free some space, or set AUTOTUNE_CACHE to a folder that can be written")


@contextmanager
def scratch(folder: Path, trust: Trust) -> Iterator[Path]:
    """A new folder beside `folder`, for `seal`; what is left of it when the block ends is removed. Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    beside = folder.with_name(f"{SCRATCH}{os.getpid()}-{secrets.token_hex(8)}")
    os.mkdir(beside, trust.mode)  # not mkdtemp, whose folders only their owner can read
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def seal(beside: Path, folder: Path, trust: Trust) -> None:
    """Makes the files in `beside` the entry `folder`. If another process has put an intact one there, that stays."""
    names = sorted(os.listdir(beside))
    (beside / SUM).write_bytes(_sum(folder.name, {name: (beside / name).read_bytes() for name in names}))
    for file in beside.iterdir():
        executable = file.stat().st_mode & stat.S_IXUSR
        if trust.team is None and file.stat().st_mode & _GROUP:  # a umask of 002: the group may read
            file.chmod(0o755 if executable else 0o644)
    for _ in range(TRIES):
        try:
            os.rename(beside, folder)
            return
        except OSError as error:
            last = error
        if read_entry(folder, names, trust) is not None:
            return
        discard(folder)  # damaged, or not to be trusted; if another process was faster, the next rename says so
    raise last


def discard(folder: Path) -> None:
    """Deletes an entry, if there is one, by another name, so that nobody reads half of it. Raises `OSError`."""
    old = folder.with_name(f"{OLD}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        os.rename(folder, old)
    except FileNotFoundError:
        return
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Removes what killed processes left: they cannot do it, and nobody else knows these names."""
    oldest = time.time() - LEFT_BEHIND_S
    for item in [item for item in os.scandir(folder) if item.name.startswith((SCRATCH, OLD))]:
        try:
            if item.stat(follow_symlinks=False).st_mtime < oldest:
                _remove(Path(item.path))
        except OSError:
            continue  # another process sweeps too, or it is another user's


_told: set[tuple[str, str]] = set()
_telling = threading.Lock()


def tell(folder: Path, kind: str, message: str) -> None:
    """Warns once a process for each folder and kind. Raises nothing, also where warnings are errors: the call goes on."""
    with _telling:
        if (str(folder), kind) in _told:
            return
        _told.add((str(folder), kind))
    try:
        warnings.warn(message, CacheWarning, stacklevel=3)
    except Warning:
        pass
