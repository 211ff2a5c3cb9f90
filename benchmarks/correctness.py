"""Are the forward or, with --backward, the backward kernels right? A seeded cover of pairs of features, all head dims, strides
and lengths that broke kernels elsewhere, every kernel that serves each problem, its default config and random legal ones, all
kinds of inputs, against float64.

    python benchmarks/correctness.py [--configs N] [--seconds S] [--seed S] [--out FILE]
    python benchmarks/correctness.py --simulate [--seconds S] ...       on the CPU: as many, in random order, as time allows
    python benchmarks/correctness.py --backward [--simulate] ...        gradients
    python benchmarks/correctness.py --random SECONDS ...               random small problems and configs, decode steps too

On the GPU the cover is always finished; random configs are drawn as long as its share of --seconds is ahead of the clock.
Exit code 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Callable, Iterable, Iterator

import yaml
from _result import RESULTS, command, date, gpu_at_hand
from _judges import OnGpu, Simulated

from autotune.check.cases import Case, cover, drawn_configs, random_cases, serving, unserved
from autotune.check.judge import Binaries, Unit, Verdict, run
from autotune.check.verdict import tuning_kinds
from autotune.core.config import Config
from autotune.core.gpu import Gpu, by_name
from autotune.kernels.base import Kernel

SIMULATED_GPU = "nvidia-h200"  # whose kernels the simulator runs
SECONDS = 150.0
CONFIGS = 2
JUDGES = 4  # processes on the GPU: their launches are short, and the host is what they wait for
LISTED = 30  # cases in the result file
SAY_EVERY_S = 5.0
FEW_KINDS = ("mixed", "masked_nan")  # `mixed` has needles, random, large and equal logits by turns of 64 rows
HUGE_BYTES = 2e9  # arrays of this size are checked with one kind of inputs


def main() -> int:
    options = _options()
    gpu = by_name(SIMULATED_GPU) if options.simulate else gpu_at_hand(". With --simulate the kernels run on the CPU")
    report = Report()
    if options.random:
        listed, units, limit = {}, random_units(gpu, options.seed, options.random, report.clock), options.random
    else:
        op = "backward" if options.backward else "forward"
        cases, refused = cover(gpu, options.seed, op)
        report.expected = len(cases)
        listed = {"not_served": unserved(refused, gpu, op), "not_served_by": refused}
        units, limit = cover_units(cases, gpu, options, report), options.seconds if options.simulate else float("inf")
    cores = len(os.sched_getaffinity(0))
    judges = options.processes or cores if options.simulate else min(JUDGES, max(1, cores // 4))
    binaries = None if options.simulate else Binaries(gpu, max(1, cores - judges))
    run(units, binaries, [Simulated() if options.simulate else OnGpu() for _ in range(judges)], report.add, report.end,
        over=lambda: report.clock() > limit)
    out = options.out or RESULTS / _file_name(options)
    out.write_text(report.text(gpu, options, listed))
    report.say()
    print(f"{report.summary()} in {out}")
    return 1 if report.failures or not report.cases else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--configs", type=int, default=CONFIGS,
                        help=f"random configs of each kernel beside its default ({CONFIGS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all of it ({SECONDS:g})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--backward", action="store_true", help="gradients, by the kernels of the backward")
    parser.add_argument("--processes", type=int, help="with --simulate: so many at once (as many as there are cores)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--simulate", action="store_true", help="on the CPU, on small problems of the same kind")
    how.add_argument("--random", type=float, metavar="SECONDS", help="random small problems for so long, instead of the cover")
    options = parser.parse_args()
    if options.backward and options.random:
        parser.error("--random draws forward problems and decode steps; --backward goes with the cover, or with --simulate")
    return options


def _file_name(options: argparse.Namespace) -> str:
    if options.simulate:
        return f"{'backward' if options.backward else 'correctness'}-simulated.yaml"
    return f"{'backward-' if options.backward else ''}correctness{'-random' if options.random else ''}-h200.yaml"


# What is checked


def cover_units(cases: list[Case], gpu: Gpu, options: argparse.Namespace, report: Report) -> Iterator[Unit]:
    """One for each case: defaults of the kernels that serve it, and random configs while there is time; simulations end then."""
    for number, case in enumerate(cases):
        elapsed = report.clock()
        if options.simulate and elapsed > options.seconds:
            return
        ahead = elapsed / options.seconds <= number / len(cases) if number else True
        report.without_random += not ahead and options.configs > 0
        kinds = FEW_KINDS if options.simulate else kinds_of(case)
        yield unit(case, serving(case, gpu), gpu, options.configs if ahead else 0, options.seed, kinds)


def random_units(gpu: Gpu, seed: int, seconds: float, clock: Callable[[], float]) -> Iterator[Unit]:
    """Of random cases until time is over: the default of each kernel and two random configs, with two kinds of inputs."""
    rng = random.Random(seed)
    for alike in random_cases(gpu, rng):
        for case in alike:
            if clock() > seconds:
                return
            yield unit(case, serving(case, gpu), gpu, 2, seed, FEW_KINDS)


def kinds_of(case: Case) -> tuple[str, ...]:
    """All, fewer where arrays or references are large."""
    return ("random",) if case.problem.compulsory_bytes > HUGE_BYTES else tuple(tuning_kinds(case.problem))


def unit(case: Case, kernels: Iterable[Kernel], gpu: Gpu, configs: int, seed: int, kinds: tuple[str, ...]) -> Unit:
    """The defaults of `kernels`, and `configs` of each that all problems with this static part share."""
    defaults = [kernel.default(case.problem, gpu) for kernel in kernels]
    drawn = [config for kernel in kernels for config in drawn_configs(kernel, case, gpu, configs, seed)]
    return Unit(case, tuple(dict.fromkeys(defaults + drawn)), len(defaults), kinds, seed)


# What came of it


class Report:
    """Counts and keeps verdicts, and says now and then how far it is. Called from many threads."""

    def __init__(self):
        self.began = time.monotonic()
        self.expected = 0  # problems, if they are known
        self.cases: list[tuple[float, str, str]] = []  # (ratio, case, digest of config) of those that are right
        self.configs: dict[str, str] = {}
        self.failures: list[str] = []
        self.refused: Counter[str] = Counter()  # of random configs that the compiler made nothing of
        self.spilling: dict[str, str] = {}  # defaults that spill
        self.without_random = self.ended = self.count = 0
        self.worst = 0.0
        self.by_kernel: dict[str, list] = defaultdict(lambda: [0, 0.0])
        self._told = self.began
        self._lock = threading.Lock()

    def clock(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def add(self, unit: Unit, config: Config, verdict: Verdict | None, flaw: str = "") -> None:
        with self._lock:
            default = config in unit.configs[:unit.defaults]
            if flaw and default:
                self.spilling[f"{unit.case}: {config}"] = flaw
            if verdict is None and not default:
                self.refused[config.kernel] += 1
                return
            verdict = verdict or Verdict(False, float("inf"), flaw)
            self.count += 1
            self.configs[config.digest] = config.text
            self.by_kernel[config.kernel][0] += 1
            if verdict.ok:
                self.worst = max(self.worst, verdict.worst_ratio)
                self.by_kernel[config.kernel][1] = max(self.by_kernel[config.kernel][1], verdict.worst_ratio)
                self.cases.append((round(verdict.worst_ratio, 3), str(unit.case), config.digest))
            else:
                self.failures.append(f"{unit.case}: {config}: {verdict.message}")
                print(f"WRONG  {self.failures[-1]}", file=sys.stderr, flush=True)

    def end(self, unit: Unit) -> None:
        with self._lock:
            self.ended += 1
            if time.monotonic() - self._told > SAY_EVERY_S:
                self._told = time.monotonic()
                self.say()

    def say(self) -> None:
        of = f" of {self.expected}" if self.expected else ""
        print(f"{self.clock():5.0f} s  {self.ended}{of} problems, {self.count} cases, {len(self.failures)} wrong, "
              f"worst {self.worst:.2f} of the allowed error", flush=True)

    def summary(self) -> dict:
        return {"cases": self.count, "failed": len(self.failures), "worst_ratio": round(self.worst, 3)}

    def text(self, gpu: Gpu, options: argparse.Namespace, listed: dict) -> str:
        """The result file. Cases are many, and made again by their seed: those nearest to what is allowed are listed."""
        facts: dict[str, object] = {"summary": self.summary(), "gpu": gpu.name}
        if not options.simulate:
            from autotune.timing.conditions import conditions

            facts["conditions"] = conditions()
        facts |= {"date": date(), "command": command(),
                  "seconds": round(self.clock()), "problems": self.ended, "configs": len(self.configs),
                  "kernels": {name: {"cases": count, "worst_ratio": round(worst, 3)}
                              for name, (count, worst) in sorted(self.by_kernel.items())},
                  "random_configs_that_spill_or_do_not_compile": dict(sorted(self.refused.items())),
                  "defaults_that_spill": dict(sorted(self.spilling.items())), **listed}
        if self.without_random:
            facts["problems_with_default_configs_only"] = self.without_random
        if self.ended < self.expected:
            facts["problems_left_out"] = self.expected - self.ended
        facts["failures"] = self.failures
        text = yaml.safe_dump(facts, sort_keys=False, default_flow_style=None, width=1000)
        nearest = sorted(self.cases, reverse=True)[:LISTED]
        rows: dict[str, dict[str, float]] = defaultdict(dict)
        for ratio, case, digest in nearest:
            rows[case][digest] = ratio
        configs = {digest: self.configs[digest] for *_, digest in nearest if digest in self.configs}
        return text + yaml.safe_dump({"nearest_to_the_allowed_error": dict(rows)}, sort_keys=False, default_flow_style=None,
                                     width=10000) + yaml.safe_dump({"config": configs}, sort_keys=False,
                                                                   default_flow_style=False, width=1000)


if __name__ == "__main__":
    sys.exit(main())
