"""Functions of configs that run once for each combination of the values that they read: most read few of many."""

from __future__ import annotations

from typing import Callable, Generic, Mapping, TypeVar

from ..core.config import Value

Result = TypeVar("Result")


class Watched:
    """Stands in for a config, and for its values, and notes which are read. Those that are not given are `derive`d: reading one
    is reading what it follows from. Of a config it has no more, so a function that asks for its text or its items fails."""

    def __init__(self, given: Mapping[str, Value], derive: Callable[[Mapping[str, Value]], Mapping[str, Value]] | None = None):
        self._given, self._derive = given, derive
        self.read: list[str] = []

    @property
    def values(self) -> Watched:
        return self

    def __getitem__(self, name: str) -> Value:
        if name in self._given:
            self.read.append(name)
            return self._given[name]
        if self._derive is None:
            raise KeyError(name)
        return self._derive(self)[name]

    def get(self, name: str, default: object = None) -> object:
        try:
            return self[name]
        except KeyError:
            return default


class Remembered(Generic[Result]):
    """`function` of a config or of its values, without running it again where what it read was the same.

    Its results are told apart by all values that any run has read. Another run that would read more has, up to there, the same
    values, so it differs in those: what a run reads is decided by what it read before.
    """

    def __init__(self, function: Callable[[Watched], Result],
                 derive: Callable[[Mapping[str, Value]], Mapping[str, Value]] | None = None):
        self._function, self._derive = function, derive
        self.names: list[str] = []  # of values that were read
        self._results: dict[tuple[Value, ...], Result] = {}

    def __call__(self, values: Mapping[str, Value]) -> Result:
        key = tuple([values[name] for name in self.names])
        if key in self._results:
            return self._results[key]
        watched = Watched(values, self._derive)
        result = self._function(watched)
        if more := [name for name in dict.fromkeys(watched.read) if name not in self.names]:
            self.names += more
            self._results.clear()
            key = tuple([values[name] for name in self.names])
        self._results[key] = result
        return result
