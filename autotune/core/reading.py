"""Files that somebody else wrote, read as data: databases, workloads, catalogues, a model's config.json.

    text = read_text(path, most_bytes=1 << 20)        # a regular file (or, if allowed, a pipe), bounded, UTF-8
    data = load_yaml(text)                            # bounded depth, no aliases, no name twice in a mapping
    data = load_json(text)
    f"{shown(value)} is no length"                    # one line that any terminal can show, whatever was in the file

Every fault is a `ReadError` with a sentence that goes after the file's name, whatever the loader underneath raises.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import stat
from functools import lru_cache
from pathlib import Path

MAX_DEPTH = 100  # of nested lists and mappings; the files of this project need 6
MAX_DIGITS = 64  # of a whole number; more only cost time, and Python refuses to print 4300
PIPE_SECONDS = 10.0  # for the next bytes of a pipe
CHUNK = 1 << 16
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))

# What a name stands for that is no file.
_KINDS = ((stat.S_ISFIFO, "Is a pipe, not a file"), (stat.S_ISCHR, "Is a device, not a file"),
          (stat.S_ISBLK, "Is a device, not a file"), (stat.S_ISDIR, os.strerror(errno.EISDIR)))


class ReadError(ValueError):
    """A file that cannot be read as what it should be; the message continues "FILE: ...".

    `opened` says whether its bytes could be read at all: if so, it is its content that is wrong.
    """

    def __init__(self, message: str, opened: bool = True):
        super().__init__(message)
        self.opened = opened

    def __reduce__(self):
        return ReadError, (str(self), self.opened)


def read_text(path: Path | str, most_bytes: int, pipe: bool = False) -> str:
    """The UTF-8 text of the file at `path`. Raises `FileNotFoundError` if there is none, else `ReadError`."""
    try:
        return read_bytes(path, most_bytes, pipe).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ReadError(f"not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_bytes(path: Path | str, most_bytes: int, pipe: bool = False) -> bytes:
    """The bytes of the regular file at `path`, at most `most_bytes`, or with `pipe` of a pipe until it is closed.

    Never waits for a file: what is neither (a device, a socket, a pipe that is not allowed) is refused, unread.
    Raises `FileNotFoundError` if nothing is there, else `ReadError`.
    """
    try:
        file = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise _unreadable(error) from None
    try:
        return contents(file, most_bytes, pipe)
    except OSError as error:
        raise _unreadable(error) from None
    finally:
        os.close(file)


def contents(file: int, most_bytes: int, pipe: bool = False) -> bytes:
    """`read_bytes` of a file that is open. Raises `ReadError`, `OSError`."""
    status = os.fstat(file)
    piped = pipe and stat.S_ISFIFO(status.st_mode)
    if not (piped or stat.S_ISREG(status.st_mode)):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "Not a file")
        raise ReadError(f"cannot be read: {kind}", opened=False)
    parts, size = [], 0
    while size <= most_bytes:
        if piped:
            _wait(file)
        part = os.read(file, min(CHUNK, most_bytes + 1 - size))
        if not part:
            return b"".join(parts)
        parts.append(part)
        size += len(part)
    raise ReadError(f"is larger than {_size(most_bytes)}, the most that is read of such a file", opened=False)


def _wait(file: int) -> None:
    """Until the pipe has bytes or its last writer is gone."""
    poll = select.poll()
    poll.register(file, select.POLLIN | select.POLLHUP)
    if not poll.poll(PIPE_SECONDS * 1000):
        raise ReadError(f"nothing was written into this pipe for {PIPE_SECONDS:g} s", opened=False)


def _unreadable(error: Exception) -> ReadError:
    return ReadError(f"cannot be read: {getattr(error, 'strerror', None) or error}", opened=False)


def _size(count: int) -> str:
    return f"{count >> 20} MB" if count >= 1 << 20 else f"{count >> 10} KB" if count >= 1 << 10 else f"{count} bytes"


def load_yaml(text: str) -> object:
    """The plain data in YAML `text`. Raises `ReadError` for what is no YAML, and for what YAML lets pass at a loss: an alias, a
    name that stands twice in a mapping, an endless number, more than `MAX_DEPTH` levels."""
    import yaml

    try:
        _check_events(text)
        return yaml.load(text, _loader())
    except ReadError:
        raise
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ReadError(f"{where}not YAML: {shown(error.problem or error.context, 300)}") from None
    except (MemoryError, RecursionError):  # the caller's state, not the file's fault: depth was bounded before
        raise
    except Exception as error:  # a tag's constructor raises whatever it likes: KeyError for `!!bool x`, IndexError for `!!int ''`
        raise ReadError(f"not YAML: {_said(error)}") from None


def _check_events(text: str) -> None:
    """Refuses aliases and deep nesting before anything is built of them: PyYAML's loaders recurse, before 6.0.4 without a bound,
    which ended the process at some 10,000 levels; its stream of events does not."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ReadError(f"line {event.start_mark.line + 1}: an alias ('*{shown(event.anchor)}'); a file that stands for more "
                            "than it holds is not read")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ReadError(f"line {event.start_mark.line + 1}: nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


@lru_cache(maxsize=1)
def _loader() -> type:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        def construct_mapping(self, node, deep=False):
            seen = set()
            for name in (name for name, _ in node.value if isinstance(name, yaml.ScalarNode)):
                if (name.tag, name.value) in seen:
                    twice = f"{shown(name.value)} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, twice, name.start_mark)
                seen.add((name.tag, name.value))
            return super().construct_mapping(node, deep)

        def bounded_int(self, node):
            if len(node.value) > MAX_DIGITS:
                raise yaml.constructor.ConstructorError(None, None, f"a number of {len(node.value)} digits", node.start_mark)
            return self.construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.bounded_int)
    return Loader


def load_json(text: str) -> object:
    """The plain data in JSON `text`. Raises `ReadError`, also for an endless number and for more than `MAX_DEPTH` levels."""
    try:
        data = json.loads(text, parse_int=_bounded_int)
    except RecursionError:
        raise ReadError(f"nested more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise ReadError(f"line {error.lineno}: not JSON: {error.msg}") from None
    except ValueError as error:
        raise error if isinstance(error, ReadError) else ReadError(f"not JSON: {_said(error)}") from None
    level, depth = [data], 0
    while level := [item for part in level if isinstance(part, (dict, list))
                    for item in (part.values() if isinstance(part, dict) else part)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ReadError(f"nested more than {MAX_DEPTH} deep")
    return data


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ReadError(f"a number of {len(digits)} digits")
    return int(digits)


def shown(value: object, most: int = 120) -> str:
    """`value` on one line that any terminal can show: text as it is if all of it is printable, else the escaped form of
    `repr`, cut after `most` characters."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        head = value[:most + 1]  # what is cut off is not escaped first
        text = head if head.isprintable() else repr(head)
    else:
        return quoted(value, most)
    return text if len(text) <= most else f"{text[:most]}..."


def quoted(value: object, most: int = 120) -> str:
    """`repr(value)`, on one line that any terminal can show, cut after `most` characters."""
    try:
        text = printable(repr(value[:most] if isinstance(value, (str, bytes)) else value))
    except Exception:  # nested too deep, digits without end
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def printable(text: str) -> str:
    """`text` with each character that a terminal might act upon written as its escape; newlines stay."""
    if text.isascii() and not _CONTROL.search(text):
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def _said(error: Exception) -> str:
    message = " ".join(str(error).split())
    return shown(message if isinstance(error, (ValueError, TypeError)) and message else f"{type(error).__name__} "
                                                                                        f"{message}".strip(), 200)
