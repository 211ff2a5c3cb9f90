"""What runs in the worker while a cover is measured: many configs of one static part on many problems, a few samples each."""

from __future__ import annotations

from typing import Sequence

from ..check.verdict import TUNING_SAMPLE, Checker, tuning_kinds
from ..check.verify import runner
from ..core.config import Config
from ..core.problem import Problem
from ..cuda.compile import Binary
from ..device import launch
from ..timing.bench import Bench
from .evaluate import Evaluator

WARM_UP_US = 500.0  # configs follow each other without a pause, so clocks are up
TARGET = "autotune.tuner.survey:Surveyor"


class Surveyor(Evaluator):
    """An `Evaluator` that also times without checking: what `check` let pass before, on another problem of its static part."""

    def check(self, problem: Problem, config: Config, binary: Binary) -> str:
        """Why `config` is wrong on `problem`, or ""."""
        if self._problem != problem or self._checker is None:
            self._close()
            self._checker = Checker(problem, tuning_kinds(problem), xp=self._cupy, sample=TUNING_SAMPLE)
            self._problem = problem
        outcome = self._guarded([], lambda: self._checker(runner(problem, config, binary, self._device)))
        if hasattr(outcome, "worst_ratio"):
            return "" if outcome.ok else outcome.message or "wrong"
        return outcome.message or outcome.outcome

    def times(self, problem: Problem, entries: Sequence[tuple[Config, Binary]], rounds: int,
              captures: int = 1) -> list[float | None]:
        """Median times in us of `entries` on `problem`, taken by turns; None of one that cannot be launched."""
        self._close()
        bench = self._bench = Bench(problem, self._gpu)
        bench.warm_up_us = WARM_UP_US
        able, candidates = [], []
        for n, (config, binary) in enumerate(entries):
            try:
                candidate = self._candidate(config, runner(problem, config, binary, self._device))
                candidate.launch(0)
                able.append(n)
                candidates.append(candidate)
            except (launch.LaunchError, self._cupy.cuda.driver.CUDADriverError):
                continue
        self._cupy.cuda.Device().synchronize()
        results: list[float | None] = [None] * len(entries)
        for n, measurement in zip(able, bench.interleave(candidates, rounds, captures) if able else ()):
            results[n] = measurement.time_us
        return results

    def unload(self, binaries: Sequence[Binary]) -> None:
        """Forgets these binaries, when a static part is done."""
        self._close()
        for binary in binaries:
            launch.load(binary, self._device).unload()

    def _close(self) -> None:
        self._problem = self._bench = self._checker = None
        self._cupy.get_default_memory_pool().free_all_blocks()
