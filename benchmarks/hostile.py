"""Hostile files, drawn from a grammar of mutations: what `robustness.py` feeds to every reader."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Callable, Iterator

TOKENS = [
    "!!bool x",
    "!!int ''",
    "!!float ''",
    "!!int '-'",
    "!!timestamp x",
    "!!python/object/apply:os.system ['true']",
    "!x y",
    "&a [*a]",
    "*a",
    "<<: *a",
    "2024-13-45",
    "0x",
    ".nan",
    "-.inf",
    "1e999",
    "1" * 5000,
    "1:" * 3000 + "1",
    "null",
    "~",
    "{}",
    "[]",
    "''",
    "[" * 3000,
    "- " * 3000,
    "{a: " * 500,
    "? " * 500,
    "\x1b[2J",
    "\x9b31m",
    "\u202e",
    "\x00",
    "\ud7ff",
    "a: b: c",
    "%YAML 9.9\n---",
    "---",
    "...",
    "|",
    ">",
    "'",
    '"',
    "\t",
    "../../etc",
    "; touch marked",
    "$(touch marked)",
    "`touch marked`",
    "A" * 20000,
    "true",
    "-1",
    "1e-9",
    '"\\u0000"',
    "Infinity",
    "NaN",
    '{"a": ' * 2000,
    "9" * 400,
    "\ufeff",
    "<<<<<<< HEAD",
    "=======",
    ">>>>>>> theirs",
]


def mutated(text: str, draw: random.Random) -> bytes:
    """`text` after 1 to 4 mutations."""
    for _ in range(draw.randint(1, 4)):
        text = draw.choice(_MUTATIONS)(text, draw)
    data = text.encode(errors="surrogatepass")
    if draw.random() < 0.1 and data:  # bytes that are no text
        at = draw.randrange(len(data))
        data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
    return data


def _insert(text: str, draw: random.Random) -> str:
    at = draw.randint(0, len(text))
    return text[:at] + draw.choice(TOKENS) + text[at:]


def _for_a_value(text: str, draw: random.Random) -> str:
    """One token in place of a word, a number or whatever stands between two delimiters."""
    begin = draw.randint(0, len(text))
    begin = max(text.rfind(mark, 0, begin) for mark in (" ", ":", ",", "[", "{", "\n")) + 1
    ends = [end for mark in (" ", ",", "]", "}", "\n") if (end := text.find(mark, begin)) >= 0]
    return text[:begin] + draw.choice(TOKENS) + text[min(ends, default=len(text)) :]


def _cut(text: str, draw: random.Random) -> str:
    return text[: draw.randint(0, len(text))]


def _without_a_line(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    del lines[draw.randrange(len(lines))]
    return "\n".join(lines)


def _line_twice(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    lines.insert(draw.randrange(len(lines) + 1), draw.choice(lines))
    return "\n".join(lines)


def _indented(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    lines[at] = " " * draw.randint(1, 9) + lines[at]
    return "\n".join(lines)


def _wrapped(text: str, draw: random.Random) -> str:
    opened, closed = draw.choice((("[", "]"), ("{a: ", "}"), ("- ", "")))
    depth = draw.choice((1, 30, 99, 150, 5000))
    return opened * depth + text + closed * depth


_MUTATIONS: list[Callable] = [
    _insert,
    _for_a_value,
    _for_a_value,
    _cut,
    _without_a_line,
    _line_twice,
    _indented,
    _wrapped,
]


def no_files(folder: Path) -> Iterator[Path]:
    """Things in a file's place that are no file, or have no end."""
    for number, make in enumerate(
        (
            os.mkfifo,
            os.mkdir,
            lambda path: os.symlink("/dev/zero", path),
            lambda path: os.symlink(path, path),
            lambda path: os.symlink("/dev/tty", path),
            lambda path: os.symlink("/proc/self/mem", path),
            _sparse,
        )
    ):
        path = folder / f"no-file-{number}"
        make(path)
        yield path


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)
