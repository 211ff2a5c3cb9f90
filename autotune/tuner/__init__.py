"""Finding the fastest correct config: search, compile ahead, measure in a killable process, record.

    records = autotune.tune("forward-bf16-b1-h32x8-q8192-k8192-d128-causal")

Everything heavy is imported by `tune` itself: the worker process imports this package too.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Mapping

if TYPE_CHECKING:
    from ..core.gpu import Gpu
    from ..core.problem import Problem
    from ..database.record import Record

EVALUATOR = "autotune.tuner.evaluate:Evaluator"


class TuneError(ValueError):
    """What was asked for cannot be tuned, with the reason."""


def tune(problems: Problem | str | Iterable[Problem | str], *, gpu: Gpu | str | None = None, effort: str = "quick",
         root: Path | None = None, trials_root: Path | None = None, device: int = 0, stream=None, storage: str | None = None,
         gpus: str | None = None, calls: Mapping[Problem, float] | None = None) -> list[Record]:
    """Finds and records the fastest correct config of each problem on `gpu` and returns the records, in the order given.

    `gpu`: a `Gpu`, a catalogue name, or None for the one at CUDA index `device`. If it is the one there, configs are
    measured on it. If not, they are compiled and ranked by an estimate, and the records say "predicted".
    `effort`: "quick" (under a minute a problem) or "full". Records go to the database folder `root` (the user's if None) as
    each problem is done, trials to `trials_root` (``trials`` in the user's database folder). Progress goes to `stream`
    (stderr). `gpus`: ``all`` or CUDA indices such as ``0,1``: one worker process each. `storage`: a folder or a URL that workers
    on other hosts share (`autotune worker`); then this process needs no GPU, and without `gpus` it only leads.
    `calls`: how often a workload calls each problem (those that are not named: once). Of several problems those on which it
    spends most time are searched longest, within what the effort allows for all of them together.
    A problem that fails is reported there and has no record. Bounds of a mask that hide nothing are dropped first.

    Ctrl-C keeps what was measured, and the same call goes on from there. Raises `ProblemError`, `GpuError`, `TuneError`,
    `ConfigError` (no kernel can serve a problem), `CompilerMissing`, `WorkerError`, `StoreError`, `CacheError`, `DatabaseError`.
    """
    from . import run

    counts = {problem.simplified(): count for problem, count in (calls or {}).items()}
    if storage or gpus:
        return run.tune_shared(run.parsed(problems), gpu, effort, root, stream, storage, gpus, counts)
    return run.tune(run.parsed(problems), gpu, effort, root, trials_root, device, stream, counts)
