"""Which config to try next: `Search`, over the legal configs of one kernel. Knows nothing of GPUs or compilers.

Only legal configs that were never proposed come out: seeds first, then what has the largest expected gain by a `Surrogate` of
what was measured. benchmarks/tuning_efficiency.py counts how many it takes beside other searches; docs/log.md has what came out.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Callable, Iterable, Sequence

import numpy as np

from ..core.config import Config
from ..kernels.base import Kernel
from ..kernels.space import Space
from .points import binaries_of, changes, ordered, points_of
from .surrogate import Likeness, Surrogate

POOL = 1500  # configs that are compared at a time: half of them the best by estimate, half drawn, and what is near the best
LEADERS = 4  # of the fastest, whose neighbours are compared too
NEIGHBOUR_STEPS = 2  # single-step changes
MOST_NEIGHBOURS = 300  # of a leader
AS_GOOD = 0.9  # of the largest expected gain: such configs are drawn from
REFIT = 1.15  # so many times as many results, and the surrogate's shape is chosen anew
TRUSTED = 3
HORIZON = 8  # configs that "more search" stands for


class Search:
    """Proposes configs of `kernel` out of `space` (its legal configs). Not thread-safe: one thread drives it.

    `seeds` are tried first, in order; those outside `space` are dropped. `estimate_us` is what a config should take before
    anything is known; the first of `seeds` gives launch parameters for comparing by it. The same arguments and results give the
    same proposals.
    """

    def __init__(self, kernel: Kernel, space: Sequence[Config], seeds: Iterable[Config] = (),
                 estimate_us: Callable[[Config], float] = lambda config: 1.0, *, seed: int = 0):
        self.kernel = kernel
        self.space = Space.of(kernel, space)
        self.results: dict[Config, float | None] = {}  # time in us, or None for a config that failed
        self._parameters = [p for p in kernel.parameters if not p.derived]
        self._points, self._ordered = points_of(self.space), ordered(self._parameters)
        self._unseen = np.ones(len(self.space), dtype=bool)
        self._running: dict[int, None] = {}  # proposed and not told yet, in order
        self._seeds = deque(dict.fromkeys(place for place in map(self.space.place, seeds) if place is not None))
        self._likeness = Likeness([len(p.values) for p in self._parameters], self._ordered)
        self._rows, self._vectors = np.full(len(self.space), -1), np.zeros((0, self._likeness.width), np.float32)
        self._random = random.Random(seed)
        self._estimate_us, self._priors = estimate_us, np.full(len(self.space), np.nan)
        self._pool = self._compared()
        self._near: dict[int, np.ndarray] = {}
        self._shape: tuple[int, tuple | None] = 0, None  # (results, the surrogate's shape that they made most likely)
        self._offers: tuple[tuple, np.ndarray, np.ndarray] = (), np.zeros(0), np.zeros(0)

    @property
    def best(self) -> tuple[Config, float] | None:
        """The fastest config told so far and its time in us, or None."""
        timed = [(time, self.space.place(config)) for config, time in self.results.items() if time is not None]
        if not timed:
            return None
        time, i = min(timed)
        return self.space[i], time

    @property
    def remaining(self) -> int:
        """Configs not proposed yet."""
        return int(self._unseen.sum())

    @property
    def has_seeds(self) -> bool:
        while self._seeds and not self._unseen[self._seeds[0]]:
            self._seeds.popleft()
        return bool(self._seeds)

    def has(self, config: Config) -> bool:
        """Whether `config` is one of the legal ones."""
        return config in self.space

    def ask(self, best_us: float | None = None) -> Config | None:
        """The next config to try, or None if every legal one was proposed. `best_us`: of all searches (None: this one's)."""
        if self.has_seeds:
            return self._take(self._seeds.popleft())
        if not self._unseen.any():
            return None
        indices, gains = self._offered(best_us)
        good = indices[gains >= AS_GOOD * gains.max()]
        return self._take(int(self._random.choice(list(good))))

    def outlook(self, best_us: float | None = None) -> float:
        """What the next `HORIZON` configs are expected to gain at most, as a share of `best_us`: the sum of the largest gains."""
        if self.best is None or not self._unseen.any():
            return 0.0
        return float(np.sort(self._offered(best_us)[1])[-HORIZON:].sum())

    @property
    def informed(self) -> bool:
        """Whether enough was measured to believe the outlook: `TRUSTED` results for each free parameter. With fewer, on a
        made-up space whose estimates were wrong, a search saw nothing to gain at 28 results and 13 % from the best."""
        free = sum(int(column.min()) != int(column.max()) for column in self._points.T) if self.space else 0
        return len(self.results) >= min(TRUSTED * free, len(self.space))

    def tell(self, config: Config, time_us: float | None) -> None:
        """Reports a result: a time in us, or None for any failure. Also takes configs that were never asked for."""
        i = self.space.place(config)
        if i is None:
            return
        self._unseen[i] = False
        self._running.pop(i, None)
        self.results[config] = time_us

    def _take(self, i: int) -> Config:
        self._unseen[i] = False
        self._running[i] = None
        return self.space[i]

    def _compared(self) -> np.ndarray:
        """Indices of configs that are always compared: all, or of a large space the best by estimate and some drawn."""
        everything = np.arange(len(self.space))
        if len(everything) <= POOL:
            return everything
        launch = np.array([p.kind == "launch" for p in self._parameters], dtype=bool)
        base = self._points[self._seeds[0] if self._seeds else 0]
        steps = changes(self._points[:, launch], base[launch], self._ordered[launch]).sum(axis=1)
        nearest = np.argsort(steps, kind="stable")
        first = np.unique(binaries_of(self.space)[nearest], return_index=True)[1]
        likely = nearest[np.sort(first)]  # one config for each binary: that with launch parameters nearest to the base's
        best = likely[np.argsort(self._prior(likely), kind="stable")[:POOL // 2]]
        return np.union1d(best, self._random.sample(range(len(everything)), POOL // 2))

    def _prior(self, indices: np.ndarray) -> np.ndarray:
        """log of the estimates in us."""
        for i in indices[np.isnan(self._priors[indices])]:
            self._priors[i] = np.log(self._estimate_us(self.space[i]))
        return self._priors[indices]

    def _vectors_of(self, indices: np.ndarray) -> np.ndarray:
        if len(missing := indices[self._rows[indices] < 0]):
            self._rows[missing] = len(self._vectors) + np.arange(len(missing))
            self._vectors = np.concatenate([self._vectors, self._likeness.vectors(self._points[missing])])
        return self._vectors[self._rows[indices]]

    def _offered(self, best_us: float | None) -> tuple[np.ndarray, np.ndarray]:
        """(indices of unseen configs, what each is worth): the expected gain or, while nothing works, how likely it is to."""
        best_us = best_us or (self.best or (None, None))[1]
        key = len(self.results), tuple(self._running), best_us
        if self._offers[0] != key:
            indices = self._candidates()
            surrogate = self._surrogate()
            points, priors = self._vectors_of(indices), self._prior(indices)
            worth = surrogate.works(points) * np.exp(priors.min() - priors) if self.best is None else \
                surrogate.gains(points, priors, best_us)
            self._offers = key, indices, worth
        return self._offers[1:]

    def _candidates(self) -> np.ndarray:
        """Unseen configs to compare; any if there are no others."""
        ranked = sorted((time, self.space.place(config)) for config, time in self.results.items() if time is not None)
        near = [self._neighbours(i) for _, i in ranked[:LEADERS]] if len(self._pool) < len(self.space) else []
        found = np.unique(np.concatenate([self._pool, *near]))
        found = found[self._unseen[found]]
        return found if len(found) else np.flatnonzero(self._unseen)[:POOL]

    def _neighbours(self, i: int) -> np.ndarray:
        if i not in self._near:
            steps = changes(self._points, self._points[i], self._ordered).sum(axis=1)
            nearest = np.argsort(steps, kind="stable")[:MOST_NEIGHBOURS]
            self._near[i] = nearest[steps[nearest] <= NEIGHBOUR_STEPS]
        return self._near[i]

    def _surrogate(self) -> Surrogate:
        """Fitted to all results and, so that others are proposed meanwhile, to what is expected of configs under way."""
        told = np.array([self.space.place(config) for config in self.results], dtype=int)
        times = np.array([np.nan if time is None else time for time in self.results.values()], dtype=float)
        known = len(told) < REFIT * self._shape[0]
        fitted = Surrogate(self._likeness, self._vectors_of(told), times, self._prior(told), self._shape[1] if known else None)
        if not known:
            self._shape = len(told), fitted.shape
        if self._running and self.best is not None:
            running = np.array(list(self._running), dtype=int)
            believed = np.exp(fitted.expect(self._vectors_of(running), self._prior(running))[0])
            told, times = np.concatenate([told, running]), np.concatenate([times, believed])
            fitted = Surrogate(self._likeness, self._vectors_of(told), times, self._prior(told), fitted.shape)
        return fitted
