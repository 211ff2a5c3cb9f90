"""How a workload's budget is spread: by what each problem stands to gain.

A share of time that is gained of one problem is worth as much as the problem takes of the workload's time (time of a call x
calls). So problem i is searched until `HORIZON` more configs are expected to gain less than worth / weight of its time, where
weight is its time over the mean: then the last seconds spent on each problem gain the workload equally much, which is where a
fixed budget gains most. Configs that may be measured grow with the root of the weight, because gains of a search diminish, and
add up to what an even budget has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Mapping

from ..core.gpu import Gpu
from ..core.problem import Problem
from ..database.lookup import ranking
from ..kernels import default_config, kernel_of
from .explore import Budget

MOST = 4.0  # times the even budget, and the even worth, at most and at least
FEWEST = 1 / MOST


@dataclass(frozen=True)
class Share:
    """What one problem may use. `weight` is its time x calls over the workload's mean."""

    weight: float = 1.0
    trials: float = 1.0  # of the effort's

    def of(self, budget: Budget) -> Budget:
        """`budget`, which is that of one problem alone, for this one. An effort that does not search has none to spread."""
        if not budget.trials:
            return budget
        return replace(budget, trials=max(1, round(budget.trials * self.trials)), seconds=budget.seconds * self.trials,
                       worth=budget.worth / min(MOST, max(FEWEST, self.weight)))

    def __str__(self) -> str:
        return f"{self.weight:.2g} x the mean time, {self.trials:.2g} x the configs"


EVEN = Share()


def spread(time_us: Mapping[Problem, float], calls: Mapping[Problem, float]) -> dict[Problem, Share]:
    """The share of each problem, of which a call takes about `time_us`. Those without `calls` are called once."""
    times = {problem: time * calls.get(problem, 1.0) for problem, time in time_us.items()}
    mean = sum(times.values()) / len(times) if times else 0.0
    if not mean:
        return dict.fromkeys(times, EVEN)
    weights = {problem: time / mean for problem, time in times.items()}
    sizes = {problem: min(MOST, max(FEWEST, math.sqrt(weight))) for problem, weight in weights.items()}
    even = len(sizes) / sum(sizes.values())
    return {problem: Share(float(f"{weights[problem]:.3g}"), float(f"{sizes[problem] * even:.3g}")) for problem in times}


def text(shares: Mapping[Problem, Share], most: int = 5) -> str:
    """A sentence: which problems stand to gain most."""
    ranked = sorted(shares, key=lambda problem: -shares[problem].weight)
    total = sum(share.weight for share in shares.values()) or 1.0
    named = "; ".join(f"{problem} {shares[problem].weight / total:.0%}" for problem in ranked[:most])
    return f"the budget goes to where time is spent (time of a call x calls): {named}" + ("; ..." if len(ranked) > most else "")


def expected_us(problem: Problem, gpu: Gpu) -> float:
    """About how long a call of `problem` takes, by what a lookup expects of the best config that is known."""
    known = ranking(problem, gpu)
    default = default_config(problem, gpu)
    return known[0].time_us if known else kernel_of(default).account_us(problem, default, gpu)
