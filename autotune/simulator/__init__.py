"""Runs a generated kernel on the CPU: the same rendered body, with lib/base.cuh and lib/ptx/ replaced by their host twins.

    result = simulate(problem, config, inputs, out, lse, seed=0)    # fills out and lse; result.findings
    verdict = verify(problem, config, seeds=range(3))              # judged as on the GPU, findings included

A finding is a race, a deadlock, an access out of bounds and the like; docs/simulator.md says what cannot be seen.
"""

from .job import Finding, Simulation, SimulationFailed, simulate, verify

__all__ = ["Finding", "Simulation", "SimulationFailed", "simulate", "verify"]
