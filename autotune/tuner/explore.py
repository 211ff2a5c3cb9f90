"""The loop of a tune: ask for configs, compile ahead in threads, measure one at a time, tell.

What compiles and what measures are passed in, so the same loop runs on a GPU, on recorded trials and on a formula.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import Callable, NamedTuple, Sequence

from ..core.config import Config
from ..core.measurement import Measurement
from .search import HORIZON, Search

CHANCE = 48  # configs that a kernel without any working one gets before it is given up
COMPILE_ONLY = 0.25  # of a trial: what a config counts that is not measured, because it spills for example


@dataclass(frozen=True)
class Budget:
    """When to stop: after `trials` measured configs, after `seconds`, or when more is not expected to pay.

    A config that cannot be measured, because it does not compile or spills, counts `COMPILE_ONLY`. `worth` is the least
    gain for which `HORIZON` more configs are tried, as a share of the best time. What they are expected to gain, at most, is the
    sum of the largest expected improvements by the posterior of what was measured; Jones, Schonlau & Welch (1998) end a search
    where the largest of these is under 1 %.
    """

    trials: int
    seconds: float
    worth: float


class Stop(NamedTuple):
    """Why a search ended, as a few words, and what `HORIZON` more configs were expected to gain at most (infinite: not known)."""

    reason: str
    outlook: float


Build = Callable[[Config], "object | Measurement"]  # a binary, or why there is none; called in threads
Evaluate = Callable[[Config, object, "float | None"], Measurement]  # config, binary, best time so far in us
Observe = Callable[[Config, Measurement], None]


def explore(searches: Sequence[Search], build: Build, evaluate: Evaluate, budget: Budget, executor: Executor, window: int,
            observe: Observe = lambda config, measurement: None) -> Stop:
    """Runs `searches` until the budget is used up or more is not expected to pay, and returns why it stopped.

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
                return Stop(loop.reason or loop.exhausted(), loop.outlook)
            wait(running, loop.seconds_left(), return_when=FIRST_COMPLETED)
            if loop.out_of_time():
                return Stop("time is up", loop.outlook)
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
        self.outlook = math.inf  # of more search, when that was last asked
        self.asked = dict.fromkeys(map(id, self.searches), 0)
        self.best_us = min((s.best[1] for s in self.searches if s.best), default=None)
        self.reason = ""

    def ask(self) -> tuple[Search, Config] | None:
        search = self._choose()
        config = search.ask(self.best_us) if search else None
        if config is None:
            return None
        self.asked[id(search)] += 1
        return search, config

    def tell(self, search: Search, config: Config, measurement: Measurement, cost: float) -> None:
        search.tell(config, measurement.time_us)
        self.told += cost
        if measurement.ok:
            self.best_us = min(measurement.time_us, self.best_us or measurement.time_us)

    def over(self, running: int) -> bool:
        self.reason = ""
        if self.told + running >= self.budget.trials:
            self.reason = f"{self.budget.trials} configs were measured"
        elif self.best_us is not None and not any(s.has_seeds or self._has_chance(s) for s in self.searches):
            self.outlook = sum(search.outlook(self.best_us) for search in self.searches)
            informed = all(search.informed for search in self.searches if search.outlook(self.best_us) > 0)
            if self.outlook < self.budget.worth and informed:
                self.reason = (f"{HORIZON} more configs are expected to gain at most {self.outlook:.2%}, "
                               f"less than {self.budget.worth:.2%}")
        return bool(self.reason)

    def exhausted(self) -> str:
        untried = any(search.remaining for search in self.searches)
        return "none of the configs tried works" if untried and self.best_us is None else "every promising config was tried"

    def seconds_left(self) -> float:
        limit = self.budget.seconds * (1 if self.best_us is not None else 4)
        return max(0.0, self.began + limit - time.monotonic())

    def out_of_time(self) -> bool:
        return self.seconds_left() == 0

    def _choose(self) -> Search | None:
        """Seeds of every kernel first; then one of which nothing works yet, in its turn; then the one with the best outlook."""
        left = [search for search in self.searches if search.remaining]
        if seeded := next((search for search in left if search.has_seeds), None):
            return seeded
        least = min((self.asked[id(search)] for search in left), default=0)
        if unknown := next((s for s in left if self._has_chance(s) and self.asked[id(s)] == least), None):
            return unknown
        known = [search for search in left if search.best]
        return max(known, key=lambda search: search.outlook(self.best_us), default=None) if self.best_us else None

    def _has_chance(self, search: Search) -> bool:
        """Whether nothing of it works yet, and it may still be tried."""
        return search.best is None and bool(search.remaining) and self.asked[id(search)] < CHANCE
