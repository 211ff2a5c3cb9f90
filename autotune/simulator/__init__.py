"""Runs a generated kernel on the CPU: the same rendered body, with lib/base.cuh and lib/ptx/ replaced by their host twins.

    verdict = verify(problem, config, seeds=range(3))                   # judged as on the GPU, findings included
    simulation = simulate(problem, config, inputs, out, lse, seed=0)    # one launch: fills out and lse
    verdict = verify(shrunk(problem, config), config)                   # a small problem in place of a large one

A finding is a race, a deadlock, an access out of bounds and the like; docs/simulator.md says what cannot be seen.
"""

from .compiler import HostFault
from .job import Finding, Simulation, host_source, simulate
from .shrink import shrunk
from .verify import SimulationFailed, verify

__all__ = ["Finding", "HostFault", "Simulation", "SimulationFailed", "host_source", "shrunk", "simulate", "verify"]
