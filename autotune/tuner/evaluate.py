"""What runs in the worker: `Evaluator`, which checks and times compiled configs of one problem at a time on the GPU.

Inputs and references are made once for a problem. A config is checked on mixed inputs before it is timed; only one that is
fast enough to matter is then checked on every kind, so a slow config costs few launches. Errors of CUDA are outcomes;
other exceptions are faults of this program and pass through.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from statistics import stdev
from typing import Callable, Sequence

from ..device import launch
from ..check.checkers import checker_of
from ..check.verdict import TUNING_SAMPLE, Checker, Verdict, tuning_kinds
from ..cuda.compile import Binary
from ..core.config import Config
from ..core.gpu import detect
from ..core.measurement import NOISE_FLOOR, Measurement, median_error
from ..core.problem import Problem
from ..timing.bench import Bench, Candidate
from ..check.verify import runner

QUICK_KIND = "mixed"  # blocks of needles, random, large and equal inputs in one launch
RACE_SECONDS = 0.03  # of timing; a config that is clearly slower than the best stops earlier
PROMISING = 1.05  # configs within this factor of the best are checked on every kind of inputs
FINAL_CAPTURES = (3, 32)  # at least, at most: a median of them is not one lucky graph's
FINAL_ROUNDS = 3  # of each capture


class Evaluator:
    """Owns CUDA device `device` in the worker process. `open` a problem before the other calls."""

    def __init__(self, device: int):
        import cupy

        self._cupy, self._device = cupy, device
        cupy.cuda.Device(device).use()
        cupy.cuda.runtime.free(0)  # creates the context now, while the first configs compile
        self._gpu = detect(device)
        self._problem: Problem | None = None
        self._bench: Bench | None = None
        self._checker: Checker | None = None

    def open(self, problem: Problem) -> None:
        """Makes inputs, references and timing buffers. Raises CuPy's OutOfMemoryError if they do not fit."""
        self._problem = self._bench = self._checker = None
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._checker = checker_of(problem, tuning_kinds(problem), xp=self._cupy, sample=TUNING_SAMPLE)
        for kind in dict.fromkeys((QUICK_KIND, *self._checker.kinds)):
            self._checker.case(kind)
        self._bench = Bench(problem, self._gpu)
        self._cupy.cuda.Device().synchronize()
        self._problem = problem

    def evaluate(self, problem: Problem, config: Config, binary: Binary, best_us: float | None) -> Measurement:
        """Checks one config and times it against `best_us`, the best so far."""
        self._must_be_open(problem)

        def work() -> Measurement:
            run = runner(problem, config, binary, self._device)
            verdict = self._checker.check_kind(run, QUICK_KIND)
            if not verdict.ok:
                return _wrong(verdict)
            measurement = self._bench.time(self._candidate(config, run), RACE_SECONDS, best_us, verdict.worst_ratio)
            if best_us is not None and measurement.time_us > PROMISING * best_us:
                return measurement
            verdict = self._checker(run)
            return replace(measurement, error_ratio=verdict.worst_ratio) if verdict.ok else _wrong(verdict)

        return self._guarded([binary], work)

    def final(self, problem: Problem, entries: Sequence[tuple[Config, Binary]], seconds: float) -> list[Measurement]:
        """Checks each of `entries` on every kind of inputs and times those that pass by turns, until it is clear which are as
        fast as the fastest, for about `seconds` at most."""
        self._must_be_open(problem)

        def work() -> list[Measurement]:
            runs = [runner(problem, config, binary, self._device) for config, binary in entries]
            verdicts = [self._checker(run) for run in runs]
            able = [i for i, verdict in enumerate(verdicts) if verdict.ok]
            timed = self._until_decided([self._candidate(entries[i][0], runs[i]) for i in able], seconds) if able else []
            results = [_wrong(verdict) for verdict in verdicts]
            for i, measurement in zip(able, timed):
                results[i] = replace(measurement, error_ratio=verdicts[i].worst_ratio)
            return results

        outcome = self._guarded([binary for _, binary in entries], work)
        return outcome if isinstance(outcome, list) else [outcome] * len(entries)

    def _until_decided(self, candidates: Sequence[Candidate], seconds: float) -> list[Measurement]:
        """Times `candidates` in captures of a few rounds each. How many is decided by how exact the times are, not by who leads,
        so that stopping favours nobody (a sequential interval of fixed width: Chow & Robbins 1965)."""
        began = time.monotonic()
        captures: list[list[Measurement]] = [[] for _ in candidates]
        for n in range(FINAL_CAPTURES[1]):
            if n >= FINAL_CAPTURES[0] and (time.monotonic() - began > seconds or decided(captures)):
                break
            for taken, measured in zip(captures, self._bench.interleave(candidates, FINAL_ROUNDS)):
                taken.append(measured)
        return [pooled(taken) for taken in captures]

    def healthy(self) -> bool:
        """Whether the CUDA context still works after a launch that failed."""
        try:
            self._cupy.cuda.Device().synchronize()
            return int(self._cupy.arange(3).sum()) == 3
        except self._cupy.cuda.runtime.CUDARuntimeError:
            return False

    def _must_be_open(self, problem: Problem) -> None:
        if problem != self._problem:
            raise RuntimeError(f"{problem} was not opened; {self._problem} is")

    def _candidate(self, config: Config, run: Callable) -> Candidate:
        sets = self._bench.sets
        return Candidate(config.text, lambda i: run(sets[i].inputs, sets[i].out, None))

    def _guarded(self, binaries: Sequence[Binary], work: Callable):
        """`work()`, or a launch_failed measurement if CUDA refuses; the modules are gone from the device afterwards."""
        cupy = self._cupy
        try:
            result = work()
            cupy.cuda.Device().synchronize()
            for binary in binaries:
                launch.load(binary, self._device).unload()
            return result
        except (launch.LaunchError, cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            return Measurement(outcome="launch_failed", message=str(error))


def pooled(captures: Sequence[Measurement]) -> Measurement:
    """One measurement of all samples, under the conditions of the last."""
    last = captures[-1]
    return Measurement.of_samples([sample for one in captures for sample in one.samples_us], policy=last.policy,
                                  sm_clock_mhz=last.sm_clock_mhz, conditions=last.conditions)


def decided(captures: Sequence[Sequence[Measurement]]) -> bool:
    """Whether more samples would hardly change who is within noise of the fastest: each of the others is known as exactly as
    `NOISE_FLOOR`, or is slower by more than that beyond what is not known."""
    whole = [pooled(taken) for taken in captures]
    first = min(range(len(whole)), key=lambda i: whole[i].time_us)
    for i, one in enumerate(whole):
        doubt = 2 * math.hypot(_error(captures[i], one), _error(captures[first], whole[first]))
        behind = one.time_us / whole[first].time_us - 1
        if i != first and doubt > NOISE_FLOOR and behind <= doubt + NOISE_FLOOR:
            return False
    return True


def _error(captures: Sequence[Measurement], whole: Measurement) -> float:
    """Relative standard error of the median, from the samples and, where one capture is unlike another, from the captures."""
    times = [one.time_us for one in captures]
    between = stdev(times) / whole.time_us / math.sqrt(len(times)) if len(times) > 1 else 0.0
    return max(median_error(whole.samples_us), between)


def _wrong(verdict: Verdict) -> Measurement:
    return Measurement(outcome="wrong", message=verdict.message or "wrong")
