"""Lists of problems in a YAML file, for `--workload FILE`: named groups, and which of them a result summarises.

    title: Forward attention on an H200
    summary: {d64_geomean: d64, window: window}         # optional: name in a result -> group, or list of groups
    groups:
      d64: [forward-bf16-b1-h32x32-q16384-k16384-d64-causal]
      window: [forward-bf16-b1-h64x8-q65536-k65536-d64-causal-left127-sinks]
    calls: {window: 12}            # optional: how often each problem of a group is called; tuning searches longest where time is
    spent
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Mapping

from ..core.problem import EXAMPLE, Problem, ProblemError
from ..core.reading import ReadError, load_yaml, quoted, read_text, shown

MAX_BYTES = 1 << 20
MAX_NAME = 100  # letters
_FIELDS = {"title", "summary", "groups", "calls"}
_SHAPE = f"lists of problems by name, such as `groups: {{mine: [{EXAMPLE}]}}`"


class WorkloadError(ValueError):
    """A workload file that cannot be read, with a sentence that says where it is wrong."""


@dataclass(frozen=True)
class Workload:
    """Groups of problems, each simplified and each once in a group. `summary` has the problems that each name stands for, `calls`
    how often those are called of which the file says it."""

    title: str
    groups: Mapping[str, tuple[Problem, ...]]
    summary: Mapping[str, tuple[Problem, ...]]
    calls: Mapping[Problem, float] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every problem once, in the file's order."""
        return tuple(dict.fromkeys(problem for group in self.groups.values() for problem in group))


def read_workload(path: Path) -> Workload:
    """The workload in the file at `path`. Raises `WorkloadError` naming the group and the entry that is wrong."""
    try:
        data = load_yaml(read_text(path, MAX_BYTES, pipe=True))
    except FileNotFoundError:
        raise WorkloadError(f"{path} cannot be read: No such file or directory; name a YAML file with {_SHAPE}") from None
    except ReadError as error:
        what = f"is not YAML: {str(error).replace('not YAML: ', '', 1)}" if error.opened else error
        raise WorkloadError(f"{path} {what}; name a YAML file with {_SHAPE}") from None
    if not isinstance(data, Mapping) or not {"groups"} <= data.keys() <= _FIELDS:
        raise WorkloadError(f"{path} must be a mapping with groups, and perhaps title, summary and calls: {_SHAPE}")
    groups = _groups(path, data["groups"])
    summary = {name: _members(path, name, chosen, groups) for name, chosen in _mapping(path, data, "summary").items()}
    title = data.get("title", path.stem)
    if not isinstance(title, (str, int, float)):
        raise WorkloadError(f"{path}: title is {quoted(title)}; it must be text")
    calls = MappingProxyType(_calls(path, data, groups))
    return Workload(shown(str(title)), MappingProxyType(groups), MappingProxyType(summary), calls)


def _groups(path: Path, raw: object) -> dict[str, tuple[Problem, ...]]:
    if not isinstance(raw, Mapping) or not raw:
        raise WorkloadError(f"{path}: groups is {quoted(raw)}; it must be a mapping of names to lists of problems")
    groups = {}
    for name, texts in ((_name(path, name), texts) for name, texts in raw.items()):
        if not isinstance(texts, list) or not texts:
            raise WorkloadError(f"{path}: group {name} is {quoted(texts)}; it must be a list of problems")
        try:
            groups[name] = tuple(dict.fromkeys(Problem.parse(text).simplified() for text in texts))
        except (ProblemError, TypeError) as error:  # TypeError: an entry that is a list or a mapping
            raise WorkloadError(f"{path}: group {name}: {error}") from None
    return groups


def _name(path: Path, name: object) -> str:
    """A group's name, which stands in tables and results: a line of text, or a number."""
    if type(name) not in (str, int, float) or not str(name).isprintable() or not 0 < len(str(name)) <= MAX_NAME:
        raise WorkloadError(f"{path}: a group is called {quoted(name)}; a name is a line of at most {MAX_NAME} letters")
    return str(name)


def _members(path: Path, name: str, chosen: object, groups: Mapping[str, tuple[Problem, ...]]) -> tuple[Problem, ...]:
    name, names = _name(path, name), chosen if isinstance(chosen, list) else [chosen]
    if unknown := [group for group in names if not isinstance(group, str) or group not in groups]:
        raise WorkloadError(f"{path}: summary {name} names {quoted(unknown[0])}; the groups are {shown(', '.join(groups), 1000)}")
    return tuple(dict.fromkeys(problem for group in names for problem in groups[group]))


def _calls(path: Path, data: Mapping, groups: Mapping[str, tuple[Problem, ...]]) -> dict[Problem, float]:
    """A problem of several groups is called as often as they say together."""
    counts: dict[Problem, float] = {}
    for name, count in _mapping(path, data, "calls").items():
        if name not in groups:
            raise WorkloadError(f"{path}: calls names {quoted(name)}; the groups are {shown(', '.join(groups), 1000)}")
        if type(count) not in (int, float) or not 0 < count < 1e18:
            raise WorkloadError(f"{path}: calls of {name} is {quoted(count)}; it must be a number above 0")
        for problem in groups[name]:
            counts[problem] = counts.get(problem, 0.0) + count
    return counts


def _mapping(path: Path, data: Mapping, field: str) -> Mapping:
    value = data.get(field, {})
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise WorkloadError(f"{path}: {field} is {quoted(value)}; it must be a mapping")
    return value
