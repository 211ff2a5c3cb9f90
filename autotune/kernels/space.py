"""The configs of a kernel that are legal: `Space`, which makes them when they are asked for, and `legal_configs`."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence, overload

from ..core.config import Config, Parameter, Value
from ..core.gpu import Gpu
from ..core.problem import Static
from .reads import Remembered

if TYPE_CHECKING:
    from .base import Kernel

Items = tuple[tuple[str, Value], ...]  # of a config, or of a part of it


class Launches(tuple):
    """The launch parameters, `Items` each, that go with some compile parameters."""

    @cached_property
    def places(self) -> dict[Items, int]:
        return {items: n for n, items in enumerate(self)}


class Binary(NamedTuple):
    """Configs of a space that follow each other and share a binary: its compile parameters, with each of `launches`."""

    compiled: Items
    launches: Launches


class Space(Sequence[Config]):
    """Configs of one kernel, in order. Some hundred thousand share a few thousand binaries, so only those are stored."""

    def __init__(self, kernel: Kernel, binaries: Iterable[Binary]):
        self.kernel = kernel
        self.binaries = [binary for binary in binaries if binary.launches]
        self._ends = list(accumulate(len(binary.launches) for binary in self.binaries))

    @classmethod
    def of(cls, kernel: Kernel, configs: Iterable[Config]) -> Space:
        """The space of these `configs`, in their order."""
        if isinstance(configs, Space):
            return configs
        groups = groupby(configs, kernel.compile_key)
        return cls(kernel, (Binary(key, Launches(config.items[len(key):] for config in group)) for key, group in groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, i: int) -> Config: ...

    @overload
    def __getitem__(self, i: slice) -> tuple[Config, ...]: ...

    def __getitem__(self, i):
        if isinstance(i, slice):
            return tuple(self[n] for n in range(*i.indices(len(self))))
        i = range(len(self))[i]
        n = bisect_right(self._ends, i)
        return self._config(n, i - self._ends[n])

    def __iter__(self) -> Iterator[Config]:
        name = self.kernel.name
        return (Config(name, compiled + launch) for compiled, launches in self.binaries for launch in launches)

    def __add__(self, other: Space) -> Space:
        return Space(self.kernel, self.binaries + other.binaries)

    def __contains__(self, config: object) -> bool:
        return self.place(config) is not None

    def place(self, config: Config) -> int | None:
        """Where `config` stands, or None."""
        key = self.kernel.compile_key(config)
        for n in self._numbers.get(key, ()) if config.kernel == self.kernel.name else ():
            launches = self.binaries[n].launches
            if (place := launches.places.get(config.items[len(key):])) is not None:
                return self._ends[n] - len(launches) + place
        return None

    @cached_property
    def _numbers(self) -> dict[Items, list[int]]:
        """Of `binaries`; only in a space that was put together from configs there may be several with the same parameters."""
        numbers: dict[Items, list[int]] = {}
        for n, binary in enumerate(self.binaries):
            numbers.setdefault(binary.compiled, []).append(n)
        return numbers

    def _config(self, n: int, launch: int) -> Config:
        compiled, launches = self.binaries[n]
        return Config(self.kernel.name, compiled + launches[launch])

    def compiling(self, keep: Callable[[Config], bool]) -> Space:
        """Those of which `keep` is true. It is asked once for each binary, so it may read compile parameters only."""
        return Space(self.kernel, (binary for n, binary in enumerate(self.binaries) if keep(self._config(n, 0))))

    def launching(self, values: Mapping[str, Value]) -> Space:
        """Those whose launch parameters have these values."""
        wanted = set(values.items())
        kept = {id(launches): launches for _, launches in self.binaries}
        kept = {key: Launches(items for items in launches if wanted.issubset(items)) for key, launches in kept.items()}
        return Space(self.kernel, (Binary(compiled, kept[id(launches)]) for compiled, launches in self.binaries))


@lru_cache(maxsize=8)  # of some MB
def legal_configs(kernel: Kernel, static: Static, gpu: Gpu) -> Space:
    """Every config of `kernel` that is searched and breaks no rule, in canonical order."""
    # Launch parameters, which no rule reads, are the same wherever the compile parameters that some of them need are the same.
    needed = {name for parameter in kernel.parameters for name in (parameter.needs, parameter.barred) if name}
    launches: dict[tuple[Value, ...], Launches] = {}
    compiled = [parameter for parameter in kernel.parameters if parameter.kind == "compile"]
    derive = Remembered(partial(kernel.derive, static))
    binaries = []
    for values in _legal_values(kernel, static, gpu):
        key = tuple([values[name] for name in needed])
        if key not in launches:
            launches[key] = Launches(Config.of(kernel.name, launch).items for launch in kernel.launch_combinations(values))
        values = {**values, **derive(values)}
        binaries.append(Binary(Config.of(kernel.name, {p.name: values[p.name] for p in compiled}).items, launches[key]))
    return Space(kernel, binaries)


def _legal_values(kernel: Kernel, static: Static, gpu: Gpu) -> list[dict[str, Value]]:
    """The compile parameters of the legal configs that are searched, without derived ones.

    Of 138,240 combinations of `forward_wgmma` 12,544 are legal at D 64. A rule reads few parameters, so these are combined as
    rules come to read them, and what one refuses is not combined with the rest.
    """
    searched = [p for p in kernel.parameters if p.kind == "compile" and not p.derived]
    rules = [lambda values: not kernel.searched(static, values, gpu)]
    rules += [lambda values, rule=rule: rule(static, values, gpu) for rule in kernel.rules]
    left, legal = searched, [{p.name: p.values[0] for p in searched}]  # first values stand for those that nothing has read yet
    for rule in rules:
        refuses = Remembered(rule, partial(kernel.derive, static))
        read = None
        while read != []:
            for values in legal:
                refuses(values)
            read = [p for p in left if p.name in refuses.names]
            left = [p for p in left if p not in read]
            legal = _combined(legal, read)
        legal = [values for values in legal if not refuses(values)]
    places = {(p.name, value): n for p in searched for n, value in enumerate(p.values)}
    return sorted(_combined(legal, left), key=lambda values: [places[item] for item in values.items()])


def _combined(some: list[dict[str, Value]], parameters: Iterable[Parameter]) -> list[dict[str, Value]]:
    """Each of `some` with each value of each of `parameters`."""
    for parameter in parameters:
        some = [{**values, parameter.name: value} for values in some for value in parameter.values]
    return some
