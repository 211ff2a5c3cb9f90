"""One file of the tuning database: what it holds (`read`), its text (`dump`), and a writer that loses nothing (`merge_into`).

`read` never raises for what a file holds: what is bad is left out and said (`File.error`, `File.quarantined`). `merge_into`
locks, reads again, merges, writes beside, fsyncs and renames, so that writers at the same time lose nothing and a crash
leaves the old file. It moves an unreadable file aside and carries entries that this version cannot use along, unchanged.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..core.problem import OPS
from .record import GpuKey, Record, RecordError, merge

SCHEMA = 1
# Schema n -> a function from a file's data in schema n to the same in n + 1. Old files are converted as they are read.
CONVERTERS: dict[int, Callable[[dict], dict]] = {}

FIELDS = ("schema", "gpu", "op", "records", "quarantined")
MAX_DIGITS = 64  # of a number in a file; more only cost time, and Python refuses to print 4300

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
        return f"{_shown(self.problem, 120)}: {_shown(self.reason, 1000)}"


def _shown(value: object, most: int) -> str:
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


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


def read(path: Path, wanted: Callable[[GpuKey], bool] = lambda gpu: True) -> File:
    """What `path` holds; records are parsed only if `wanted(gpu)`. Raises nothing, whatever the file is like."""
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        return File(path)
    except UnicodeDecodeError as error:
        return File(path, error=f"{path}: not UTF-8 text ({error.reason} at byte {error.start})")
    except OSError as error:
        return File(path, error=f"{path}: cannot be read: {error.strerror}", replaceable=False)
    try:
        head = _parse(text.partition("\nrecords:")[0])  # a few lines, which spare parsing the files of other GPUs
        if head.get("schema") == SCHEMA and "op" in head and "gpu" in head:
            file = _file(path, head)
            if not wanted(file.gpu):
                return file
        data = _converted(_parse(text))
        file = _file(path, data)
        return _with_entries(file, data) if wanted(file.gpu) else file
    except _NewerSchema as error:
        return File(path, error=f"{path}: {error}", replaceable=False)
    except RecordError as error:
        return File(path, error=f"{path}: {error}")


class _NewerSchema(Exception):
    pass


def _parse(text: str) -> Mapping:
    import yaml

    try:
        if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise RecordError("an alias ('*name'); a file that stands for more than it holds is not read")
        data = yaml.load(text, _loader())
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecordError(f"{where}not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:  # an impossible date, a list as a key, ...
        raise RecordError(f"not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict):
        raise RecordError("not a tuning database: expected a mapping with schema, gpu, op and records")
    return data


@lru_cache(maxsize=1)
def _loader() -> type:
    """A safe loader that refuses what plain YAML lets pass at a loss: a name that stands twice in a mapping, endless numbers."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        def construct_mapping(self, node, deep=False):
            seen = set()
            for name in (name for name, _ in node.value if isinstance(name, yaml.ScalarNode)):
                if (name.tag, name.value) in seen:
                    twice = f"{_shown(name.value, 120)} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, twice, name.start_mark)
                seen.add((name.tag, name.value))
            return super().construct_mapping(node, deep)

        def bounded_int(self, node):
            if len(node.value) > MAX_DIGITS:
                raise yaml.constructor.ConstructorError(None, None, f"a number of {len(node.value)} digits", node.start_mark)
            return self.construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.bounded_int)
    return Loader


def _converted(data: dict) -> dict:
    schema = data.get("schema")
    if type(schema) is not int or schema < 1:
        raise RecordError(f"schema is {schema!r}; it must be an int from 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise _NewerSchema(f"schema {schema} is newer than {SCHEMA}, the newest that this autotune reads; "
                           "install a newer autotune, or set AUTOTUNE_DB to another folder")
    for version in range(schema, SCHEMA):
        data = CONVERTERS[version](data)
    return data


def _file(path: Path, data: dict) -> File:
    op = data.get("op")
    if op not in OPS:
        raise RecordError(f"op is {op!r}; allowed are {', '.join(OPS)}")
    return File(path, GpuKey.from_entry(data.get("gpu")), op)


def _with_entries(file: File, data: dict) -> File:
    records, kept = data.get("records") or {}, data.get("quarantined") or []
    if unknown := [name for name in data if name not in FIELDS]:  # a writer would lose them
        raise RecordError(f"{_shown(unknown[0], 120)} is not a field of a tuning database; allowed are {', '.join(FIELDS)}")
    if not isinstance(records, dict) or not isinstance(kept, list):
        raise RecordError("records must be a mapping from problem to entry, and quarantined a list")
    for item in kept:
        if not isinstance(item, dict) or set(item) != {"problem", "reason", "entry"}:
            raise RecordError("each item of quarantined must be a mapping with exactly problem, reason and entry")
    entries = [*records.items(), *((item["problem"], item["entry"]) for item in kept)]
    good, bad = [], []
    for problem, entry in entries:  # quarantined ones are tried too: this may be the version that understands them
        try:
            record = Record.from_entry(problem, entry, file.gpu)
            if record.problem.op != file.op:
                raise RecordError(f"op is {record.problem.op!r} in a file of {file.op!r}")
            good.append(record)
        except RecordError as error:
            quarantined = Quarantined(problem, str(error), entry)
            bad += [quarantined] if quarantined not in bad else []
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
    text = dump(gpu, op, merge(file.records, records).values(), file.quarantined)
    if file.gpu is None or path.read_bytes() != text.encode():
        _replace(path, text)


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


def _replace(path: Path, text: str) -> None:
    """Puts `text` at `path` in one step: readers see the old file or the new one, and so does a machine that lost power."""
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        with open(beside, "w", encoding="utf-8", newline="\n") as out:
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
