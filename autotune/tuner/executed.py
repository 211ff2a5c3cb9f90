"""Predicted configs are run on the CPU before they are recorded: their time is a guess, their result is not."""

from __future__ import annotations

import time
from typing import Sequence

from ..cuda.compile import CompileError, CompilerMissing
from ..core.config import Config
from ..core.measurement import Measurement
from ..core.problem import Problem, Static
from .builder import Built
from .progress import Progress

EXECUTED = 2  # right configs wanted at the head of a ranking
KINDS = ("random", "needles", "masked_nan")
SEED = 2  # asynchronous copies land at random moments
SECONDS_ALL = 90.0  # for all problems of a call; on 2 cores a config takes 2 to 6 s, most of it compiling


class Executor:
    """Runs the best configs of rankings on small problems of the same kind. A config that was run for a static part is not run
    again for another problem of it."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._verdicts: dict[tuple[Static, Config], str] = {}  # "" if right, else what is wrong
        self._left = SECONDS_ALL
        self._missing = False

    def __call__(self, problem: Problem, ranked: Sequence[tuple[float, Built]]) -> list[tuple[float, Built]]:
        """`ranked`, best first, without those that were found wrong. Says so once if there is no C++ compiler."""
        kept, right = [], 0
        for entry in ranked:
            if right < EXECUTED and not self._missing and self._left > 0:
                if wrong := self._wrong(problem, entry[1].config):
                    self._progress.trial(entry[1].config, Measurement(outcome="wrong", message=wrong))
                    self._progress.say(f"  wrong on the simulator, and left out: {entry[1].config}: {wrong}")
                    continue
                right += 1
            kept.append(entry)
        return kept

    def _wrong(self, problem: Problem, config: Config) -> str:
        key = problem.static, config
        if key not in self._verdicts:
            began = time.monotonic()
            self._verdicts[key] = self._run(problem, config)
            self._left -= time.monotonic() - began
        return self._verdicts[key]

    def _run(self, problem: Problem, config: Config) -> str:
        from .. import simulator

        try:
            return simulator.verify(simulator.shrunk(problem, config), config, (SEED,), KINDS).message
        except CompileError as error:  # the compiler works, and refuses this source
            return str(error)
        except (CompilerMissing, simulator.HostFault) as error:  # of the machine, so no verdict on the kernel
            self._missing = True
            self._progress.say(f"  Predicted configs are not executed: {error}")
            return ""
