"""One file of the tuning database: what it holds (`read`), its text (`dump`), and a writer that loses nothing (`merge_into`).

`read` never raises for what a file holds: what is bad is left out and said (`File.error`, `File.quarantined`). `merge_into`
locks, reads again, merges, writes beside, fsyncs and renames, so that writers at the same time lose nothing and a crash
leaves the old file. It moves an unreadable file aside and carries entries that this version cannot use along, unchanged.
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.problem import OPS
from ..core.reading import ReadError, load_yaml, quoted, read_text, shown
from .record import GpuKey, Record, RecordError, after, merge

SCHEMA = 3


def _without_source_hashes(data: dict) -> dict:
    """Schema 1 hashed sources with their comments. What such a hash would be without is not known, so the cubin's remains."""
    records, kept = data.get("records"), data.get("quarantined")
    entries = list(records.values()) if isinstance(records, dict) else []
    entries += [item.get("entry") for item in kept if isinstance(item, dict)] if isinstance(kept, list) else []
    for entry in entries:
        if isinstance(entry, dict):
            entry.pop("source_sha256", None)
    return data


# Schema n -> a function from a file's data in schema n to the same in n + 1. Old files are converted as they are read.
# Schema 2 wrote all of a default's and a tie's config, where 3 writes what differs from the winner's; `Record` reads both.
CONVERTERS: dict[int, Callable[[dict], dict]] = {1: _without_source_hashes, 2: dict}

FIELDS = ("schema", "gpu", "op", "records", "quarantined")
MAX_BYTES = 32 << 20  # of a file; what ships for a GPU is under 500 KB

LOCK_TIMEOUT_S = 60  # a writer holds the lock for well under a second
_HINT = "set AUTOTUNE_DB to a folder that can be written"
_HEADER = """\
# Tuning results of one GPU and op, sorted by problem. Times are microseconds. `autotune tune` writes this file,
# `autotune db check` says whether every entry is legal and current.
"""


class DatabaseError(RuntimeError):
    """A database that cannot be written, with a sentence that says where, why and what to do."""


@dataclass(frozen=True)
class Quarantined:
    """An entry that this version cannot use, and why. Writers keep it as it is, for a version that can."""

    problem: object
    reason: str
    entry: object

    @property
    def said(self) -> str:
        """One line that any terminal can show, whatever the entry holds."""
        return f"{shown(self.problem, 120)}: {shown(self.reason, 1000)}"


@dataclass(frozen=True)
class File:
    """What one database file holds. `error` is why nothing of it could be read, "" if it could."""

    path: Path
    gpu: GpuKey | None = None
    op: str = ""
    records: tuple[Record, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    error: str = ""
    replaceable: bool = True  # False: not ours to move aside (a newer version's file, or one we may not read)


def read(path: Path, wanted: Callable[[GpuKey], bool] = lambda gpu: True, entry: Callable[[str], bool] | None = None) -> File:
    """What `path` holds; records are parsed only if `wanted(gpu)`, and, in a file laid out as `dump` does it, only those of which
    `entry(name)`. Raises nothing, whatever the file is like."""
    try:
        text = read_text(path, MAX_BYTES)
        head = _parse(text.partition("\nrecords:")[0])  # a few lines, which spare parsing the files of other GPUs
        if head.get("schema") == SCHEMA and "op" in head and "gpu" in head:
            file = _file(path, head)
            if not wanted(file.gpu):
                return file
            text = _only(text, entry) if entry else text
        data = _converted(_parse(text))
        file = _file(path, data)
        return _with_entries(file, data) if wanted(file.gpu) else file
    except FileNotFoundError:
        return File(path)
    except ReadError as error:
        return File(path, error=f"{path}: {error}", replaceable=error.opened)
    except _NewerSchema as error:
        return File(path, error=f"{path}: {error}", replaceable=False)
    except RecordError as error:
        return File(path, error=f"{path}: {error}")


# These begin with the newline before, which is found several times faster than a `^` at any line.
_ENTRY = re.compile(r"\n  ([a-z][^\s:]*):$", re.MULTILINE)
_LINE = re.compile(r"\n  \S")
_REST = re.compile(r"\n\S")


def _only(text: str, entry: Callable[[str], bool]) -> str:
    """`text` without the records that are not wanted. All of it if it is not laid out as `dump` does: then YAML must tell."""
    begin = text.find("\nrecords:\n")
    if begin < 0:
        return text
    begin += len("\nrecords:")
    rest = _REST.search(text, begin)
    end = rest.start() if rest else len(text)
    marks = list(_ENTRY.finditer(text, begin, end))
    if not marks or marks[0].start() != begin or len(_LINE.findall(text, begin, end)) != len(marks):
        return text
    starts = [mark.start() for mark in marks] + [end]
    kept = "".join(text[starts[n]:starts[n + 1]] for n, mark in enumerate(marks) if entry(mark[1]))
    return text[:begin] + (kept or " {}") + text[end:]


class _NewerSchema(Exception):
    pass


def _parse(text: str) -> Mapping:
    data = load_yaml(text)
    if not isinstance(data, dict):
        raise RecordError("not a tuning database: expected a mapping with schema, gpu, op and records")
    return data


def _converted(data: dict) -> dict:
    schema = data.get("schema")
    if type(schema) is not int or schema < 1:
        raise RecordError(f"schema is {quoted(schema)}; it must be an int from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise _NewerSchema(f"schema {schema} is newer than {SCHEMA}, the newest that this autotune reads; "
                           "install a newer autotune, or set AUTOTUNE_DB to another folder")
    for version in range(schema, SCHEMA):
        data = CONVERTERS[version](data)
    return data


def _file(path: Path, data: dict) -> File:
    op = data.get("op")
    if op not in OPS:
        raise RecordError(f"op is {quoted(op)}; allowed are {', '.join(OPS)}")
    return File(path, GpuKey.from_entry(data.get("gpu")), op)


def _with_entries(file: File, data: dict) -> File:
    records, kept = data.get("records") or {}, data.get("quarantined") or []
    if unknown := [name for name in data if name not in FIELDS]:  # a writer would lose them
        raise RecordError(f"{shown(unknown[0], 120)} is not a field of a tuning database; allowed are {', '.join(FIELDS)}")
    if not isinstance(records, dict) or not isinstance(kept, list):
        raise RecordError("records must be a mapping from problem to entry, and quarantined a list")
    for item in kept:
        if not isinstance(item, dict) or set(item) != {"problem", "reason", "entry"}:
            raise RecordError("each item of quarantined must be a mapping with exactly problem, reason and entry")
    entries = [*records.items(), *((item["problem"], item["entry"]) for item in kept)]
    good, bad, seen = [], [], set()
    for problem, entry in entries:  # quarantined ones are tried too: this may be the version that understands them
        try:
            record = Record.from_entry(problem, entry, file.gpu)
            if record.problem.op != file.op:
                raise RecordError(f"op is {record.problem.op!r} in a file of {file.op!r}")
            good.append(record)
        except RecordError as error:
            if (key := repr((problem, entry))) not in seen:
                seen.add(key)
                bad.append(Quarantined(problem, str(error), entry))
    return File(file.path, file.gpu, file.op, tuple(merge(good).values()), tuple(bad))


def merge_into(folder: Path, gpu: GpuKey, op: str, records: Iterable[Record]) -> Path:
    """Merges `records`, all of `gpu` and `op`, into their file in the database at `folder`, and returns that file.

    Raises `DatabaseError` if it cannot be written (read-only folder, full disk, lock held); it is as it was then.
    """
    import filelock

    path = folder / gpu.name / f"{op}.yaml"
    try:
        if read(path, lambda other: False).gpu not in (None, gpu):  # same name, other chip: a slice of one, or other memory
            path = folder / f"{gpu.name}-{gpu.sms}sm-{gpu.l2_bytes >> 20}mib-{gpu.memory_clock_mhz}mhz" / path.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_TIMEOUT_S):
            _merge_locked(path, gpu, op, records)
    except filelock.Timeout:
        raise DatabaseError(f"{path} was not written: another process has held its lock for {LOCK_TIMEOUT_S} s; "
                            f"end that process, or {_HINT}") from None
    except OSError as error:
        raise DatabaseError(f"{path} was not written: {error.strerror or error}; {_HINT}") from error
    return path


def _merge_locked(path: Path, gpu: GpuKey, op: str, records: Iterable[Record]) -> None:
    file = read(path)
    if file.error and not file.replaceable:
        raise DatabaseError(f"not written: {file.error}")
    if file.error:
        aside = _move_aside(path)
        warnings.warn(f"{file.error}; moved aside to {aside}, and a new file was begun", stacklevel=2)
    elif file.gpu not in (None, gpu) or file.op not in ("", op):
        raise DatabaseError(f"{path} was not written: it is about another GPU or op; move it away, or {_HINT}")
    _sweep(path)
    known = merge(file.records)
    dated = [after(record, known.get(record.key)) for record in records]
    text = dump(gpu, op, merge(known.values(), dated).values(), file.quarantined)
    if file.gpu is None or path.read_bytes() != text.encode():
        replace(path, text)


def dump(gpu: GpuKey, op: str, records: Iterable[Record], quarantined: Iterable[Quarantined] = ()) -> str:
    """The text of a database file. The same records give the same text, in whatever order they come."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    def block(data: object) -> str:
        return yaml.dump(data, Dumper=dumper, sort_keys=False, default_flow_style=None, width=130, allow_unicode=True)

    ordered = sorted(records, key=lambda record: _natural(record.problem.text))
    entries = {record.problem.text: record.as_entry() for record in ordered}
    text = _HEADER + block({"schema": SCHEMA, "gpu": gpu.as_entry(), "op": op}) + block({"records": entries})
    if kept := [{"problem": bad.problem, "reason": bad.reason, "entry": bad.entry} for bad in quarantined]:
        text += block({"quarantined": sorted(kept, key=repr)})
    return text


def _natural(text: str) -> list:
    """Sort key by which q8192 comes before q16384."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def _move_aside(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.unreadable-{number}")):
        number += 1
    os.rename(path, aside)
    return aside


def _beside(path: Path) -> Path:
    """The folder in which a new file is made: that of the file itself, where `path` is a link to it."""
    return Path(os.path.realpath(path))


def _sweep(path: Path) -> None:
    """Removes what killed writers left. The lock is held, so none of them lives."""
    target = _beside(path)
    left = re.compile(re.escape(f".{target.name}.") + r"\d+\.new")
    for item in os.scandir(target.parent):
        if left.fullmatch(item.name):
            os.unlink(item.path)


def replace(path: Path, text: str) -> None:
    """Puts `text` at `path` in one step: readers see the old file or the new one, and so does a machine that lost power."""
    target = _beside(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    beside.unlink(missing_ok=True)  # of a killed process that had this one's number
    try:
        with open(beside, "x", encoding="utf-8", newline="\n") as out:  # "x" follows no link that somebody put there
            if target.exists():
                os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
