"""The check that suits a problem: what tests, `verify`, the simulator and the tuner's worker share."""

from __future__ import annotations

from typing import Callable, Iterable

import numpy as np

from ..core.problem import Problem
from .gradverdict import GradientChecker
from .verdict import Checker, Verdict


def checker_of(problem: Problem, kinds: Iterable[str] | None = None, seed: int = 0, xp=np,
               sample: int | None = None) -> Checker | GradientChecker:
    """A checker for many candidates of `problem`. Where `sample` is not None, only so many blocks are compared, or of a backward
    some sequences and heads."""
    return (GradientChecker if problem.op == "backward" else Checker)(problem, kinds, seed, xp, sample)


def check_launch(run: Callable, problem: Problem, kinds: Iterable[str] | None = None, seed: int = 0, xp=np,
                 sample: int | None = None) -> Verdict:
    """Launches `run(inputs, out, lse)` on each kind of inputs and judges it; of a backward `run(given, gradients, None)`. For one
    kernel; `checker_of` gives what serves many."""
    return checker_of(problem, kinds, seed, xp, sample)(run)
