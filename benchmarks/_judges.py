"""Where a config is judged: on the GPU in a process of its own, or on the simulator."""

from __future__ import annotations

from dataclasses import replace

from autotune.check.judge import Unit, Verdict, checker_of, written
from autotune.check.strides import GapWritten
from autotune.core.config import Config
from autotune.cuda import compile
from autotune.kernels import kernel_of
from autotune.tuner.worker import Worker

TARGET = "autotune.check.judge:Judge"
TIMEOUT_S = 180.0  # of one config: the first of all also compiles CuPy's own kernels


class OnGpu:
    """`Judge` in a process of its own, which is replaced when it hangs or crashes."""

    def __init__(self, device: int = 0, target: str = TARGET):
        self._worker = Worker(target, {"device": device})

    def __call__(self, unit: Unit, config: Config, binary) -> Verdict:
        reply = self._worker.call("check", unit.case, config, binary, unit.kinds, unit.seed, timeout=TIMEOUT_S)
        if reply.status == "done":
            return reply.value
        self._worker.kill()
        return Verdict(False, float("inf"), f"{reply.status}: {reply.message}")

    def close(self) -> None:
        self._worker.close()


class Simulated:
    """The check on the CPU, on a small problem of the same kind. Needs no binary."""

    def __call__(self, unit: Unit, config: Config, binary) -> Verdict:
        from autotune.simulator import shrunk, simulate

        asked = unit.case.problem
        problem = shrunk(asked, config)
        problem = replace(problem, batch=max(problem.batch, min(asked.batch, 2)))
        kernel = kernel_of(config)

        def run(inputs, out, lse) -> None:
            simulation = simulate(problem, config, inputs, out, lse, unit.seed)
            if not simulation.ok:
                raise Found(str(simulation.findings[0]))

        try:
            verdict = checker_of(unit.case, problem, unit.kinds, unit.seed)(written(unit.case, run))
        except (Found, GapWritten, compile.CompileError) as error:
            return Verdict(False, float("inf"), f"{problem} ({kernel.name}): {error}")
        return Verdict(verdict.ok, verdict.worst_ratio, verdict.message)

    def close(self) -> None:
        """Nothing to close."""


class Found(Exception):
    """What the simulator found."""
