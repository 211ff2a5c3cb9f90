"""The loop of a tune: ask for configs, compile ahead in threads, measure one at a time, tell.

What compiles and what measures are passed in, so the same loop runs on a GPU, on recorded trials and on a formula.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import Callable, Sequence

from ..core.config import Config
from ..core.measurement import Measurement
from .search import Search

LATE = 0.6  # share of the budget after which launch parameters are varied
LIVE = 1.3  # a kernel whose best is within this factor of the overall best goes on being searched
CHANCE = 48  # configs that a kernel without any working one gets before it is given up
COMPILE_ONLY = 0.25  # of a trial: what a config counts that is not measured, because it spills for example
IMPROVEMENT = 0.005  # a smaller gain does not count as one


@dataclass(frozen=True)
class Budget:
    """When to stop: after `trials` measured configs, after `seconds`, or after `patience` in a row without a gain.

    A config that cannot be measured, because it does not compile or spills, counts `COMPILE_ONLY`.
    """

    trials: int
    seconds: float
    patience: int


Build = Callable[[Config], "object | Measurement"]  # a binary, or why there is none; called in threads
Evaluate = Callable[[Config, object, "float | None"], Measurement]  # config, binary, best time so far in us
Observe = Callable[[Config, Measurement], None]


def explore(searches: Sequence[Search], build: Build, evaluate: Evaluate, budget: Budget, executor: Executor, window: int,
            observe: Observe = lambda config, measurement: None) -> str:
    """Runs `searches` until the budget is used up and returns why it stopped, as a few words.

    `window` configs are under way at a time: enough to keep all compile threads busy, no more, because each is chosen
    without knowing how the others end. Results are in each search's `results`. The time budget may be overrun until the
    first config works, by at most three times. Exceptions of `build` and `evaluate` end the loop and come out.
    """
    loop = _Loop(searches, budget)
    running: dict[Future, tuple[Search, Config]] = {}
    try:
        while True:
            while len(running) < window and not loop.over(len(running)):
                asked = loop.ask()
                if asked is None:
                    break
                running[executor.submit(build, asked[1])] = asked
            if not running:
                return loop.reason or loop.exhausted()
            wait(running, loop.seconds_left(), return_when=FIRST_COMPLETED)
            if loop.out_of_time():
                return "time is up"
            ready = next((future for future in running if future.done()), None)  # first asked, first measured
            if ready is None:
                continue
            search, config = running.pop(ready)
            built = ready.result()
            measurement = built if isinstance(built, Measurement) else evaluate(config, built, loop.best_us)
            loop.tell(search, config, measurement, COMPILE_ONLY if built is measurement else 1)
            observe(config, measurement)
    finally:
        for future in running:
            future.cancel()


class _Loop:
    """What `explore` knows while it runs."""

    def __init__(self, searches: Sequence[Search], budget: Budget):
        self.searches = [search for search in searches if search.space]
        self.budget = budget
        self.began = time.monotonic()
        self.told = 0.0
        self.stale = 0.0  # of `told`, since the last gain
        self.asked = dict.fromkeys(map(id, self.searches), 0)
        self.best_us = min((s.best[1] for s in self.searches if s.best), default=None)
        self.reason = ""

    def ask(self) -> tuple[Search, Config] | None:
        search = self._choose()
        config = search.ask(late=self._used() >= LATE) if search else None
        if config is None:
            return None
        self.asked[id(search)] += 1
        return search, config

    def tell(self, search: Search, config: Config, measurement: Measurement, cost: float) -> None:
        ok = measurement.ok
        search.tell(config, measurement.time_us)
        self.told += cost
        if ok and (self.best_us is None or measurement.time_us < self.best_us * (1 - IMPROVEMENT)):
            self.stale = 0
        else:
            self.stale += 0 if any(s.has_seeds for s in self.searches) else cost
        if ok:
            self.best_us = min(measurement.time_us, self.best_us or measurement.time_us)

    def over(self, running: int) -> bool:
        self.reason = ""
        if self.told + running >= self.budget.trials:
            self.reason = f"{self.budget.trials} configs were measured"
        elif self.best_us is not None and self.stale >= self.budget.patience:
            self.reason = f"no gain in {self.budget.patience} configs"
        return bool(self.reason)

    def exhausted(self) -> str:
        untried = any(search.remaining for search in self.searches)
        return "none of the configs tried works" if untried and self.best_us is None else "every promising config was tried"

    def seconds_left(self) -> float:
        limit = self.budget.seconds * (1 if self.best_us is not None else 4)
        return max(0.0, self.began + limit - time.monotonic())

    def out_of_time(self) -> bool:
        return self.seconds_left() == 0

    def _used(self) -> float:
        elapsed = time.monotonic() - self.began
        return max(self.told / self.budget.trials, elapsed / self.budget.seconds, self.stale / self.budget.patience)

    def _choose(self) -> Search | None:
        """Seeds of every kernel first; then, of the kernels that keep up with the best, the one asked least."""
        for search in self.searches:
            if search.has_seeds:
                return search
        live = [search for search in self.searches if search.remaining and self._is_live(search)]
        return min(live, key=lambda search: self.asked[id(search)], default=None)

    def _is_live(self, search: Search) -> bool:
        if search.best is None:
            return self.asked[id(search)] < CHANCE
        return search.best[1] <= LIVE * self.best_us
