"""Searching without a GPU: over a formula, or over recorded trials. The test bed for changes of the search.

    python -m autotune.tuner.replay ~/.local/share/autotune/tuning_db/trials/nvidia-h200/PROBLEM.journal

shows, for several seeds of the sampler, after how many configs the search comes within 5, 2 and 1 % of the best recorded.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Sequence

from ..core.config import Config
from ..kernels.base import Kernel
from ..core.measurement import Measurement
from .explore import Budget, explore
from .search import Search
from .store import StoreError, Trial, read_trials

LEVELS = (0.05, 0.02, 0.01)


@dataclass(frozen=True)
class Trace:
    """The times that a search saw, in order; None for a config that failed. `best_us` is the best there is."""

    times_us: tuple[float | None, ...]
    best_us: float

    def until_within(self, share: float) -> int | None:
        """How many configs it took to come within `share` of the best, or None if it never did."""
        limit = self.best_us * (1 + share)
        return next((n for n, time in enumerate(self.times_us, 1) if time is not None and time <= limit), None)

    @property
    def regret(self) -> float:
        """Best seen / best there is - 1."""
        return min(time for time in self.times_us if time is not None) / self.best_us - 1


def replay(kernel: Kernel, space: Sequence[Config], objective: Callable[[Config], Measurement], best_us: float,
           seeds: Iterable[Config] = (), *, estimate_us: Callable[[Config], float] = lambda config: 1.0, trials: int = 100,
           window: int = 1, worth: float = 0.0, until: float | None = None, seed: int = 0) -> Trace:
    """Searches `space` with `objective` in place of compiler and GPU. `window` configs are under way at a time; `worth` as in
    `Budget`; it ends within the share `until` of `best_us`."""
    times: list[float | None] = []
    search = Search(kernel, space, seeds, estimate_us, seed=seed)

    def observe(config: Config, measurement: Measurement) -> None:
        times.append(measurement.time_us)
        if until is not None and measurement.ok and measurement.time_us <= best_us * (1 + until):
            raise _NearEnough

    try:
        explore([search], lambda config: None, lambda config, built, best: objective(config), Budget(trials, 3600.0, worth),
                _AtOnce(), window, observe)
    except _NearEnough:
        pass
    return Trace(tuple(times), best_us)


def replay_trials(kernel: Kernel, recorded: Sequence[Trial], *, trials: int = 100, window: int = 1, seed: int = 0) -> Trace:
    """Searches the configs of recorded trials, starting as the recorded search did. Raises `ValueError` if none worked."""
    table = {trial.config: trial.measurement for trial in recorded}
    times = [m.time_us for m in table.values() if m.outcome == "ok"]
    if not times:
        raise ValueError(f"no recorded trial of {kernel.name} worked, so there is nothing to find")
    return replay(kernel, list(table), table.__getitem__, min(times), [recorded[0].config],
                  trials=trials, window=window, seed=seed)


class _NearEnough(Exception):
    pass


class _AtOnce(Executor):
    """Runs what is submitted before it returns, so that a replay is repeatable."""

    def submit(self, function, /, *arguments, **keywords) -> Future:
        future: Future = Future()
        future.set_result(function(*arguments, **keywords))
        return future


def main(arguments: Sequence[str] | None = None) -> int:
    from ..kernels import KERNELS

    parser = argparse.ArgumentParser(prog="python -m autotune.tuner.replay", description="Replays a search on recorded trials.")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--kernel", choices=list(KERNELS), default=next(iter(KERNELS)))
    parser.add_argument("--window", type=int, default=16, help="configs under way at a time (default 16)")
    parser.add_argument("--repeats", type=int, default=5, help="seeds of the sampler to try (default 5)")
    options = parser.parse_args(arguments)
    kernel = KERNELS[options.kernel]
    try:
        recorded = read_trials(options.journal, kernel)
        for seed in range(options.repeats):
            trace = replay_trials(kernel, recorded, trials=len(recorded), window=options.window, seed=seed)
            reached = ", ".join(f"{share:.0%} after {trace.until_within(share)}" for share in LEVELS)
            print(f"seed {seed}: of {len(recorded)} configs, within {reached}; best {trace.best_us:.1f} us")
    except (StoreError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
