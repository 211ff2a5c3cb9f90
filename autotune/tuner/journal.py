"""A journal file that many processes write at once and that survives what happens to files: `Journal`, an Optuna backend.

Optuna's own backend trusts every line: one spoiled byte makes the whole file unreadable, and a line that is left out would
shift the number of every later trial. Here each line carries a checksum, and each new trial its number. A line that cannot be
understood is passed over and counted in `spoiled`; a trial whose first line is lost leaves a gap, so that the others keep theirs.
The file is never moved or rewritten, stays readable for `optuna-dashboard`, and is locked (flock) only while a line is appended:
the lock ends with the process that holds it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from optuna.storages.journal import BaseJournalBackend

CREATE_STUDY, CREATE_TRIAL = 0, 4  # operations of Optuna's log format
OPERATIONS = range(11)
OF_TRIAL = range(5, 10)  # operations that name a trial
MOST_GAPS = 10_000  # lines that may be missing in a row; a larger gap is not believed
_SUM = re.compile(rb',"crc":(\d{1,10})\}$')


class Journal(BaseJournalBackend):
    """The log at `path`, which is created if it is not there. Raises OSError."""

    def __init__(self, path: Path):
        self._path = path
        self._refused: set[int] = set()  # lines that are JSON and that Optuna cannot apply
        self._last = -1  # the line that was handed out last
        self._read = _Reader(self._refused)
        self._known = _Reader(self._refused)  # what `append_logs` knows of the file
        with self._locked() as file:
            _cut_torn_line(file)

    @property
    def spoiled(self) -> int:
        """Lines that were passed over so far."""
        return self._read.spoiled

    def refuse_last(self) -> bool:
        """Passes over the line that was handed out last from now on: Optuna raised on it. False if it was refused before."""
        known = self._last in self._refused or self._last < 0
        self._refused.add(self._last)
        self._read = _Reader(self._refused)
        return not known

    def read_logs(self, log_number_from: int) -> Iterator[dict]:
        """Log entries from that number on, in the order of the file."""
        if log_number_from != self._read.count:
            self._read = _Reader(self._refused)
        with open(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            _must_be_regular(file, self._path)
            fresh = self._read.take(file)
        skipped = log_number_from - (self._read.count - len(fresh))
        for line, log in fresh[skipped:]:
            self._last = line
            yield log

    def append_logs(self, logs: list[dict]) -> None:
        """Appends all of `logs` or, if the disk is full, none."""
        with self._locked() as file:
            _cut_torn_line(file)
            self._known.take(file)
            text = b"".join(self._known.numbered(log) for log in logs)
            end = file.seek(0, os.SEEK_END)
            try:
                while text:  # an unbuffered write may take a part only
                    text = text[file.write(text):]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(end)
                raise

    @contextmanager
    def _locked(self):
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(self._path, flags, 0o666), "r+b", buffering=0) as file:
            _must_be_regular(file, self._path)
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


class _Reader:
    """Reads a growing log piece by piece: what was read, and how many studies and trials that makes."""

    def __init__(self, refused: set[int]):
        self._refused = refused
        self._offset = self._line = 0
        self._studies: set[str] = set()
        self._trials = 0
        self.count = 0  # entries handed out
        self.spoiled = 0

    def take(self, file) -> list[tuple[int, dict]]:
        """(line, entry) for what was appended since the last call; entries that stand for lost lines are among them."""
        file.seek(self._offset)
        data = file.read()
        data = data[:data.rfind(b"\n") + 1]  # another process may be writing the rest
        self._offset += len(data)
        found: list[tuple[int, dict]] = []
        for line in data.split(b"\n")[:-1]:
            log = None if self._line in self._refused else _parsed(line)
            entries = self._with_gaps(log) if log else None
            if entries is None:
                self.spoiled += 1
            else:
                found += [(self._line, entry) for entry in entries]
            self._line += 1
        self.count += len(found)
        return found

    def numbered(self, log: dict) -> bytes:
        """The line for `log`, which is counted at the next `take`."""
        if log["op_code"] == CREATE_TRIAL:
            log = {**log, "at": self._trials}
        text = json.dumps(log, separators=(",", ":")).encode()
        return text[:-1] + b',"crc":%d}\n' % zlib.crc32(text)

    def _with_gaps(self, log: dict) -> list[dict] | None:
        """`log`, after what stands for the lines that must have been before it. None if that is not to be believed."""
        operation, entries = log["op_code"], []
        if operation == CREATE_STUDY:
            self._studies.add(log["study_name"])
            return [log]
        study = log.get("study_id", 0) if operation not in OF_TRIAL else 0
        first = log.get("at", self._trials) if operation == CREATE_TRIAL else log.get("trial_id", -1) + 1
        if study - len(self._studies) > MOST_GAPS or first - self._trials > MOST_GAPS:
            return None
        while len(self._studies) <= study:
            name = f"lost-{len(self._studies)}"
            self._studies.add(name)
            entries.append({"op_code": CREATE_STUDY, "worker_id": "", "study_name": name, "directions": [1]})
        while self._trials < first:
            self._trials += 1
            entries.append({"op_code": CREATE_TRIAL, "worker_id": "", "study_id": study, "state": 3, "datetime_start": None,
                            "user_attrs": {"phase": "lost"}})
        self._trials += operation == CREATE_TRIAL
        return [*entries, log]


def _parsed(line: bytes) -> dict | None:
    """A line of the log, or None if it is none, or not what was written."""
    written = _SUM.search(line)
    if written and zlib.crc32(line[:written.start()] + b"}") != int(written[1]):
        return None
    try:
        log = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(log, dict) or type(log.get("op_code")) is not int or log["op_code"] not in OPERATIONS:
        return None
    numbers = all(type(log.get(name, 0)) is int and log.get(name, 0) >= 0 for name in ("study_id", "trial_id", "at"))
    named = log["op_code"] != CREATE_STUDY or isinstance(log.get("study_name"), str)
    needs = "trial_id" if log["op_code"] in OF_TRIAL else None if log["op_code"] == CREATE_STUDY else "study_id"
    whole = isinstance(log.get("worker_id"), str) and (needs is None or needs in log)
    return log if numbers and named and whole else None


def _cut_torn_line(file) -> None:
    """A writer that was killed leaves half a line. Whoever holds the lock may cut it off: nobody else is writing."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    start, tail = end, b""
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65536)
        file.seek(start)
        tail = file.read(min(65536, end - start))
    keep = start + tail.rfind(b"\n") + 1
    if keep < end:
        file.truncate(keep)


def _must_be_regular(file, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise OSError(0, "it is not a regular file", str(path))
