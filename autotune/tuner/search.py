"""Which config to try next: `Search`, over the legal configs of one kernel. Knows nothing of GPUs or compilers.

Only legal configs that were never proposed come out. Proposals come from seeds first, then in turn from Optuna's TPE
sampler and from the unseen neighbours of the best so far. On a smooth synthetic attention space, de-duplication and
validity mattered more than the sampler (48 to 52 evaluations to the optimum, against 110 to never without them), so
an illegal or repeated proposal of the sampler is replaced by the nearest unseen legal config.

Two stages: first the compile parameters, with launch parameters near the default's; then, when the caller says it is
late or the first stage is exhausted, mostly the launch parameters of the few best (these cost no compile).
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import contextmanager
from typing import Iterable, Sequence

import numpy as np
import optuna

from ..core.config import Config, Parameter
from ..kernels.base import Kernel

STARTUP = 12  # told results before TPE stops sampling at random; seeds count
FEW = 4  # skeletons whose launch parameters the second stage varies
LATE_STAGE_ONE = 4  # every so many-th proposal of the second stage is still one of the first
NEIGHBOUR_STEPS = 2  # how far from the best a neighbour may be, in single-step changes


class Search:
    """Proposes configs of `kernel` out of `space` (its legal configs). Not thread-safe: one thread drives it.

    `seeds` are tried first, in order; those outside `space` are dropped. The first of `seeds` also gives the launch
    parameters of the first stage. The same arguments and the same results give the same proposals.
    """

    def __init__(self, kernel: Kernel, space: Sequence[Config], seeds: Iterable[Config] = (), seed: int = 0):
        self.kernel = kernel
        self.space = tuple(space)
        self.results: dict[Config, float | None] = {}  # time in us, or None for a config that failed
        self._parameters = [p for p in kernel.parameters if not p.derived]
        self._index = {config: i for i, config in enumerate(self.space)}
        self._points = _coordinates(self._parameters, self.space)
        self._ordered = _ordered(self._parameters)
        self._unseen = np.ones(len(self.space), dtype=bool)
        self._seeds = deque(dict.fromkeys(self._index[s] for s in seeds if s in self._index))
        self._groups: dict[tuple, list[int]] = {}
        for i, config in enumerate(self.space):
            self._groups.setdefault(kernel.compile_key(config), []).append(i)
        self._skeleton = self._first_stage()
        self._random = random.Random(seed)
        with quiet_optuna():
            self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed))
        self._distributions = {p.name: optuna.distributions.CategoricalDistribution([p.values[i] for i in np.unique(column)])
                               for p, column in zip(self._parameters, self._points.T) if p.kind == "compile" and self.space}
        self._trials: dict[int, optuna.Trial] = {}
        self._turn = 0

    @property
    def _compiled(self) -> list[Parameter]:
        return [p for p in self._parameters if p.kind == "compile"]

    @property
    def best(self) -> tuple[Config, float] | None:
        """The fastest config told so far and its time in us, or None."""
        timed = [(time, self._index.get(config, -1), config) for config, time in self.results.items() if time is not None]
        if not timed:
            return None
        time, _, config = min(timed, key=lambda entry: entry[:2])
        return config, time

    @property
    def remaining(self) -> int:
        """Configs not proposed yet."""
        return int(self._unseen.sum())

    @property
    def has_seeds(self) -> bool:
        self._drop_seen_seeds()
        return bool(self._seeds)

    def has(self, config: Config) -> bool:
        """Whether `config` is one of the legal ones."""
        return config in self._index

    def ask(self, late: bool = False) -> Config | None:
        """The next config to try, or None if every legal one was proposed. `late`: vary launch parameters now."""
        self._drop_seen_seeds()
        if self._seeds:
            return self._take(self._seeds.popleft())
        if not self._unseen.any():
            return None
        skeleton_left = bool(self._unseen[self._skeleton].any())
        self._turn += 1
        if not skeleton_left or (late and self._turn % LATE_STAGE_ONE):
            variant = self._launch_variant()
            if variant is not None:
                return self._take(variant)
        if not skeleton_left:
            return self._take(int(np.flatnonzero(self._unseen)[0]))
        neighbour = self._neighbour() if self._turn % 2 == 0 else None
        return self._take(neighbour) if neighbour is not None else self._sample()

    def tell(self, config: Config, time_us: float | None) -> None:
        """Reports a result: a time in us, or None for any failure. Also takes configs that were never asked for."""
        if config not in self._index:
            return
        i = self._index[config]
        if i not in self._trials:
            self._take(i)
        self.results[config] = time_us
        trial = self._trials.pop(i)
        if time_us is None:  # PRUNED counts as worst; TPE would not learn from FAIL
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, time_us)

    def _first_stage(self) -> np.ndarray:
        """One config for each set of compile parameters: the one whose launch parameters are nearest to the base's."""
        if not self.space:
            return np.zeros(0, dtype=int)
        launch = np.array([p.kind == "launch" for p in self._parameters], dtype=bool)
        base = self._points[self._seeds[0] if self._seeds else 0]
        steps = self._steps(base, np.arange(len(self.space)), launch)
        return np.array([min(group, key=lambda i: (steps[i], i)) for group in self._groups.values()])

    def _steps(self, point: np.ndarray, among: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
        """Single-step changes from `point` to each of `among`, in `columns` if they are given."""
        changes = _changes(self._points[among].astype(int), point, self._ordered)
        return (changes if columns is None else changes[:, columns]).sum(axis=1)

    def _drop_seen_seeds(self) -> None:
        while self._seeds and not self._unseen[self._seeds[0]]:
            self._seeds.popleft()

    def _ranked(self) -> list[int]:
        """Indices of the timed configs, fastest first."""
        timed = [(time, self._index[config]) for config, time in self.results.items() if time is not None]
        return [i for _, i in sorted(timed)]

    def _launch_variant(self) -> int | None:
        """Of the few best skeletons, the unseen config that changes fewest launch parameters, a better skeleton's first."""
        leaders: dict[tuple, int] = {}
        for i in self._ranked():
            leaders.setdefault(self.kernel.compile_key(self.space[i]), i)
        offers = []
        for rank, (key, leader) in enumerate(list(leaders.items())[:FEW]):
            group = np.array([i for i in self._groups[key] if self._unseen[i]], dtype=int)
            if len(group):
                changed = (self._points[group] != self._points[leader]).sum(axis=1)
                offers.append((int(changed.min()) + rank, rank, int(group[np.argmin(changed)])))
        return min(offers)[2] if offers else None

    def _neighbour(self) -> int | None:
        """An unseen first-stage config one or two steps from the best, or from the second or third best if it has none."""
        left = self._skeleton[self._unseen[self._skeleton]]
        compiled = np.array([p.kind == "compile" for p in self._parameters], dtype=bool)
        for i in self._ranked()[:3]:
            steps = self._steps(self._points[i], left, compiled)
            nearest = int(steps.min())
            if nearest <= NEIGHBOUR_STEPS:
                return int(self._random.choice(left[steps == nearest]))
        return None

    def _sample(self) -> Config:
        trial = self._study.ask()
        wanted = np.array([self._suggested(trial, p) for p in self._parameters])
        compiled = np.array([p.kind == "compile" for p in self._parameters], dtype=bool)
        left = self._skeleton[self._unseen[self._skeleton]]
        steps = self._steps(wanted, left, compiled)
        nearest = int(left[np.argmin(steps)])
        if steps.min() == 0:
            self._trials[nearest] = trial
            self._unseen[nearest] = False
            return self.space[nearest]
        legal = (self._steps(wanted, self._skeleton, compiled) == 0).any()
        state = optuna.trial.TrialState.FAIL if legal else optuna.trial.TrialState.PRUNED  # FAIL: TPE forgets it
        self._study.tell(trial, state=state)
        return self._take(nearest)

    def _suggested(self, trial: optuna.Trial, parameter: Parameter) -> int:
        if parameter.kind != "compile":
            return 0
        choices = self._distributions[parameter.name].choices
        return parameter.values.index(trial.suggest_categorical(parameter.name, choices))

    def _take(self, i: int) -> Config:
        """Marks config `i` as proposed and makes it a running trial, so that the constant liar knows of it."""
        self._unseen[i] = False
        config = self.space[i]
        self._study.enqueue_trial({p.name: config[p.name] for p in self._compiled})
        self._trials[i] = trial = self._study.ask()
        for parameter in self._compiled:
            trial.suggest_categorical(parameter.name, self._distributions[parameter.name].choices)
        return config


def steps_between(kernel: Kernel, one: Config, other: Config) -> float:
    """Single-step changes of compile parameters between a config of `kernel` and another; infinite if that is of another
    kernel."""
    if one.kernel != other.kernel:
        return float("inf")
    parameters = [p for p in kernel.parameters if p.kind == "compile" and not p.derived]
    here, there = _coordinates(parameters, [one, other]).astype(int)
    return int(_changes(here, there, _ordered(parameters)).sum())


def diverse(ranked: Sequence[Config], count: int, parameters: Iterable[Parameter], steps: int = 2) -> list[Config]:
    """The first `count` of `ranked` (best first) that lie at least `steps` single-step changes apart."""
    parameters = [p for p in parameters if not p.derived]
    ordered = _ordered(parameters)
    chosen: list[Config] = []
    points: list[np.ndarray] = []
    for config in ranked:
        if len(chosen) == count:
            break
        point = _coordinates(parameters, [config])[0].astype(int)
        if all(_changes(point, other, ordered).sum() >= steps for other in points):
            chosen.append(config)
            points.append(point)
    return chosen


def _coordinates(parameters: Sequence[Parameter], space: Sequence[Config]) -> np.ndarray:
    """(configs, parameters) int16: the index of each value among its parameter's declared ones."""
    places = {(p.name, value): i for p in parameters for i, value in enumerate(p.values)}
    names = {p.name for p in parameters}
    rows = [[places[item] for item in config.items if item[0] in names] for config in space]
    return np.array(rows, dtype=np.int16).reshape(len(space), len(parameters))


def _ordered(parameters: Sequence[Parameter]) -> np.ndarray:
    """(parameters,) bool: which are numeric."""
    return np.array([all(type(value) is int for value in p.values) for p in parameters], dtype=bool)


def _changes(points: np.ndarray, point: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Single-step changes by parameter: a numeric one (`ordered`) counts its steps, others 0 or 1."""
    difference = np.abs(points - point)
    return np.where(ordered, difference, difference > 0)


@contextmanager
def quiet_optuna():
    """Without Optuna's line for each new study. Its verbosity is the whole process's, so it is put back."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
