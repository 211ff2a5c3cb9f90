"""Lists of problems in a YAML file, for `--workload FILE`: named groups, and which of them a result summarises.

    title: Forward attention on an H200
    summary: {d64_geomean: d64, window: window}         # optional: name in a result -> group, or list of groups
    groups:
      d64: [forward-bf16-b1-h32x32-q16384-k16384-d64-causal]
      window: [forward-bf16-b1-h64x8-q65536-k65536-d64-causal-left127-sinks]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Mapping

from ..core.problem import EXAMPLE, Problem, ProblemError

MAX_BYTES = 1 << 20
_FIELDS = {"title", "summary", "groups"}
_SHAPE = f"lists of problems by name, such as `groups: {{mine: [{EXAMPLE}]}}`"


class WorkloadError(ValueError):
    """A workload file that cannot be read, with a sentence that says where it is wrong."""


@dataclass(frozen=True)
class Workload:
    """Groups of problems, each simplified and each once in a group. `summary` has the problems that each name stands for."""

    title: str
    groups: Mapping[str, tuple[Problem, ...]]
    summary: Mapping[str, tuple[Problem, ...]]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Every problem once, in the file's order."""
        return tuple(dict.fromkeys(problem for group in self.groups.values() for problem in group))


def read_workload(path: Path) -> Workload:
    """The workload in the file at `path`. Raises `WorkloadError` naming the group and the entry that is wrong."""
    import yaml

    try:
        if path.stat().st_size > MAX_BYTES:
            raise WorkloadError(f"{path} is larger than {MAX_BYTES >> 20} MB; a workload is a short list of problems")
        data = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}; name a YAML file with {_SHAPE}") from None
    except yaml.MarkedYAMLError as error:
        raise WorkloadError(f"{path} is not YAML: line {error.problem_mark.line + 1}: {error.problem}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise WorkloadError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, Mapping) or not {"groups"} <= data.keys() <= _FIELDS:
        raise WorkloadError(f"{path} must be a mapping with groups, and perhaps title and summary: {_SHAPE}")
    groups = _groups(path, data["groups"])
    summary = {name: _members(path, name, chosen, groups) for name, chosen in _mapping(path, data, "summary").items()}
    return Workload(str(data.get("title", path.stem)), MappingProxyType(groups), MappingProxyType(summary))


def _groups(path: Path, raw: object) -> dict[str, tuple[Problem, ...]]:
    if not isinstance(raw, Mapping) or not raw:
        raise WorkloadError(f"{path}: groups is {raw!r}; it must be a mapping of names to lists of problems")
    groups = {}
    for name, texts in raw.items():
        if not isinstance(texts, list) or not texts:
            raise WorkloadError(f"{path}: group {name} is {texts!r}; it must be a list of problems")
        try:
            groups[str(name)] = tuple(dict.fromkeys(Problem.parse(text).simplified() for text in texts))
        except (ProblemError, TypeError) as error:  # TypeError: an entry that is a list or a mapping
            raise WorkloadError(f"{path}: group {name}: {error}") from None
    return groups


def _members(path: Path, name: str, chosen: object, groups: Mapping[str, tuple[Problem, ...]]) -> tuple[Problem, ...]:
    names = chosen if isinstance(chosen, list) else [chosen]
    if unknown := [group for group in names if not isinstance(group, str) or group not in groups]:
        raise WorkloadError(f"{path}: summary {name} names {unknown[0]!r}; the groups are {', '.join(groups)}")
    return tuple(dict.fromkeys(problem for group in names for problem in groups[group]))


def _mapping(path: Path, data: Mapping, field: str) -> Mapping:
    value = data.get(field, {})
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise WorkloadError(f"{path}: {field} is {value!r}; it must be a mapping")
    return value
