"""Is a kernel right, as far as the simulator can see? The check that GPUs get, with findings on top."""

from __future__ import annotations

from typing import Iterable

from ..check.checkers import check_launch
from ..check.verdict import Verdict
from ..core.config import Config
from ..check.inputs import KINDS, Inputs
from ..core.problem import Problem
from .job import TIMEOUT_S, Simulation, simulate


class SimulationFailed(Exception):
    """A simulation with findings. `simulation` has them."""

    def __init__(self, simulation: Simulation):
        super().__init__(f"{simulation.findings[0]} (in {simulation.source})")
        self.simulation = simulation


def verify(problem: Problem, config: Config, seeds: Iterable[int] = (0,), kinds: Iterable[str] = KINDS,
           timeout_s: float = TIMEOUT_S, source: str | None = None) -> Verdict:
    """Simulates `config` on each kind of inputs with each seed, and judges what it wrote; a finding is a wrong result.

    Stops at the first wrong one. Raises `CompileError`, `CompilerMissing`, `HostFault`: nothing is said of the kernel then.
    """
    worst = 0.0
    for seed in seeds:
        def run(inputs: Inputs, out, lse, seed: int = seed) -> None:
            simulation = simulate(problem, config, inputs, out, lse, seed, timeout_s, source)
            if not simulation.ok:
                raise SimulationFailed(simulation)

        try:
            verdict = check_launch(run, problem, kinds, seed)
        except SimulationFailed as failure:
            return Verdict(False, float("inf"), str(failure))
        if not verdict.ok:
            return verdict
        worst = max(worst, verdict.worst_ratio)
    return Verdict(True, worst)
