"""Configs as points: the place of each value among its parameter's declared ones, and single-step changes between points."""

from __future__ import annotations

from typing import Iterable, Sequence

import numpy as np

from ..core.config import Config, Parameter
from ..kernels.base import Kernel
from ..kernels.space import Items, Space


def points_of(space: Space) -> np.ndarray:
    """(configs, searched parameters) int16, in the order of both."""
    searched = [p for p in space.kernel.parameters if not p.derived]
    compiled = coordinates([p for p in searched if p.kind == "compile"], [binary.compiled for binary in space.binaries])
    launch = [p for p in searched if p.kind == "launch"]
    shared = {id(binary.launches): binary.launches for binary in space.binaries}
    kinds = {key: coordinates(launch, launches) for key, launches in shared.items()}
    launched = [kinds[id(binary.launches)] for binary in space.binaries]
    return np.concatenate([compiled[binaries_of(space)], np.concatenate(launched or [coordinates(launch, [])])], axis=1)


def binaries_of(space: Space) -> np.ndarray:
    """(configs,): the number of each one's binary."""
    return np.repeat(np.arange(len(space.binaries)), [len(binary.launches) for binary in space.binaries])


def coordinates(parameters: Sequence[Parameter], rows: Sequence[Items]) -> np.ndarray:
    """(rows, parameters) int16: of the `parameters` in each of `rows`."""
    places = {(p.name, value): i for p in parameters for i, value in enumerate(p.values)}
    names = {p.name for p in parameters}
    found = [[places[item] for item in items if item[0] in names] for items in rows]
    return np.array(found, dtype=np.int16).reshape(len(rows), len(parameters))


def ordered(parameters: Sequence[Parameter]) -> np.ndarray:
    """(parameters,) bool: which are numeric."""
    return np.array([all(type(value) is int for value in p.values) for p in parameters], dtype=bool)


def changes(points: np.ndarray, point: np.ndarray, numeric: np.ndarray) -> np.ndarray:
    """Single-step changes by parameter: a numeric one counts its steps, others 0 or 1."""
    difference = np.abs(points - point)
    return np.where(numeric, difference, difference > 0)


def steps_between(kernel: Kernel, one: Config, other: Config) -> float:
    """Single-step changes of compile parameters between a config of `kernel` and another; infinite if that is of another
    kernel."""
    if one.kernel != other.kernel:
        return float("inf")
    parameters = [p for p in kernel.parameters if p.kind == "compile" and not p.derived]
    here, there = coordinates(parameters, [one.items, other.items])
    return int(changes(here, there, ordered(parameters)).sum())


def diverse(ranked: Iterable[Config], count: int, parameters: Iterable[Parameter], steps: int = 2) -> list[Config]:
    """The first `count` of `ranked` (best first) that lie at least `steps` single-step changes apart."""
    parameters = [p for p in parameters if not p.derived]
    numeric = ordered(parameters)
    chosen: list[Config] = []
    points: list[np.ndarray] = []
    for config in ranked:
        if len(chosen) == count:
            break
        point = coordinates(parameters, [config.items])[0]
        if all(changes(point, other, numeric).sum() >= steps for other in points):
            chosen.append(config)
            points.append(point)
    return chosen
