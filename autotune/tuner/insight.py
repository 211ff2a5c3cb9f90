"""What trials teach: which parameter costs what, how the search went, what limits the winner. Pure queries on the store."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Sequence

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import create_trial

from ..core.config import Config, Value
from ..core.gpu import Gpu
from ..core.problem import Problem, ProblemError
from ..kernels import KERNELS
from ..kernels.base import Kernel
from .storages import StoreError, is_database, quiet_optuna, shown
from .store import Trial, database_problems, database_trials, read_trials, trials_root

ENOUGH = 16  # trials that worked; with fewer, importance is guesswork


@dataclass(frozen=True)
class Alternative:
    """The best config that has another value of one parameter than the winner. `changed`: what else differs in it."""

    parameter: str
    winners: Value
    value: Value
    time_us: float
    cost: float  # time over the winner's, less 1
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """All trials of one problem on one GPU, of every kernel, each kernel's oldest first."""

    problem: Problem
    trials: dict[Kernel, list[Trial]]

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(trial.measurement.outcome for trials in self.trials.values() for trial in trials)

    @property
    def best(self) -> Trial | None:
        """The fastest trial; a race's time, not a final's."""
        return min((t for trials in self.trials.values() for t in trials if t.measurement.ok),
                   key=lambda t: (t.measurement.time_us, t.config.text), default=None)


def told(problem: Problem, gpu: Gpu, where: str | None = None) -> Told:
    """The trials of `problem` in the storage `where`: a folder of journals (None: the user's) or a database. It is only read.
    Raises `StoreError` if there are none."""
    if is_database(where):
        trials = {kernel: database_trials(where, problem, gpu, kernel) for kernel in KERNELS.values()}
        if not any(trials.values()):
            raise StoreError(f"{shown(where)} has no trial of {problem} on {gpu.title}; `autotune tune --storage` writes such")
    else:
        path = _folder(where) / gpu.name / f"{problem.text}.journal"
        trials = {kernel: read_trials(path, kernel) for kernel in KERNELS.values()}
    return Told(problem, {kernel: found for kernel, found in trials.items() if found})


def known_problems(gpu: Gpu, where: str | None = None) -> Iterator[Problem]:
    """Problems of which the storage `where` has trials for `gpu`, each once."""
    texts = database_problems(where, gpu) if is_database(where) else \
        [path.stem for path in sorted((_folder(where) / gpu.name).glob("*.journal"))]
    for text in texts:
        try:
            yield Problem.parse(text)
        except ProblemError:
            continue  # a plan


def _folder(where: str | None) -> Path:
    return Path(where).expanduser() if where else trials_root()


def alternatives(kernel: Kernel, trials: Sequence[Trial], winner: Config, winner_us: float) -> list[Alternative]:
    """For each parameter, the fastest config tried that has another value of it; what costs most first."""
    ok = sorted((t for t in trials if t.measurement.ok), key=lambda t: (t.measurement.time_us, t.config.text))
    names = [p.name for p in kernel.parameters if not p.derived]
    found = []
    for name in names:
        other = next((t for t in ok if t.config[name] != winner[name]), None)
        if other:
            changed = tuple(n for n in names if n != name and other.config[n] != winner[n])
            found.append(Alternative(name, winner[name], other.config[name], other.measurement.time_us,
                                     other.measurement.time_us / winner_us - 1, changed))
    return sorted(found, key=lambda a: (-a.cost, a.parameter))


def history(trials: Sequence[Trial]) -> list[tuple[int, float]]:
    """(number of the trial, best time in us so far) at each gain."""
    steps: list[tuple[int, float]] = []
    for n, trial in enumerate(trials, 1):
        time_us = trial.measurement.time_us
        if time_us is not None and (not steps or time_us < steps[-1][1]):
            steps.append((n, time_us))
    return steps


def importance(kernel: Kernel, trials: Sequence[Trial]) -> dict[str, float]:
    """Parameter -> its share of what makes a config one of the best (Optuna's PED-ANOVA); empty with too few trials."""
    ok = [t for t in trials if t.measurement.ok]
    parameters = [p for p in kernel.parameters if not p.derived and len({t.config[p.name] for t in ok}) > 1]
    if len(ok) < ENOUGH or not parameters:
        return {}
    distributions = {p.name: CategoricalDistribution(p.values) for p in parameters}
    with quiet_optuna():
        study = optuna.create_study()
        study.add_trials([create_trial(params={p.name: t.config[p.name] for p in parameters}, distributions=distributions,
                                       value=t.measurement.time_us) for t in ok])
        return optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())


def busy(problem: Problem, gpu: Gpu, time_us: float) -> dict[str, float]:
    """Unit -> the share of `time_us` that it must be busy at boost clock, the busiest first: what limits the winner."""
    arithmetic = "tensor cores" if problem.dtype != "fp32" else "FMA units"
    per_score = 2 * (problem.head_dim + problem.head_dim_v)  # of the forward's two products
    exponentials = problem.flops / per_score / (gpu.sms * gpu["exp_per_clock_sm"] * gpu["sm_clock_mhz"])
    shares = {arithmetic: gpu.roofline_us(problem.flops, 0, problem.dtype != "fp32") / time_us,
              "memory": gpu.roofline_us(0, problem.compulsory_bytes) / time_us}
    if not problem.op.startswith("backward"):  # whose FLOPs are of five products
        shares["exponentials"] = exponentials / time_us
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
