"""How many configs searches try until they are near the best there is, replayed on recorded sub-spaces without a GPU.

    python benchmarks/tuning_efficiency.py [FOLDER] [--seeds 20] [--kernel-tuner PYTHON] [--out FILE]

FOLDER holds what `subspaces.py` recorded (benchmarks/results/subspaces). PYTHON is an interpreter that has kernel_tuner (`pip
install kernel-tuner` into an environment of its own): its strategies run in its simulation mode on the same times
(kernel_tuner_replay.py). Every search counts each config once, one that spills or fails too. What never comes near counts as the
whole space.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import optuna
import yaml
from subspaces import read

from autotune.core.config import Config
from autotune.core.gpu import by_name
from autotune.core.measurement import OUTCOMES, Measurement
from autotune.core.problem import Problem
from autotune.kernels import KERNELS
from autotune.tuner.replay import replay
from autotune.tuner.seeds import PREDICTED, predicted, seeds
from autotune.tuner.session import EFFORTS
from autotune.tuner.storages import quiet_optuna

HERE = Path(__file__).parent
NEAR = 0.01  # of the best
WINDOW = 19  # configs under way at a time in a tune on a host with 16 cores; each is chosen without knowing how the others end
STRATEGIES = ("genetic_algorithm", "diff_evo", "pso", "simulated_annealing", "dual_annealing", "basinhopping", "greedy_ils",
              "mls", "hybrid_vndx", "adaptive_tabu_greywolf", "bayes_opt")
REPEATS = 40  # proposals in a row that bring nothing new before plain TPE is ended


class Space:
    """A recorded sub-space: `configs` in their order, `times_us` (None: it failed), and the best time."""

    def __init__(self, path: Path, gpu):
        name, _, text = path.name.removesuffix(".jsonl.gz").partition(".")
        self.name, self.gpu = path.name.removesuffix(".jsonl.gz"), gpu
        self.kernel, self.problem = KERNELS[name], Problem.parse(text)
        self.parameters = [p for p in self.kernel.parameters if not p.derived]
        table = read(path)
        self.outcomes = {self._config(values): result for values, result in table.items()}
        self.configs = list(self.outcomes)
        self.times_us = {config: None if isinstance(result, str) else result for config, result in self.outcomes.items()}
        self.best_us = min(time for time in self.times_us.values() if time is not None)
        self._estimates_us = {config: self.kernel.account_us(self.problem, config, gpu) for config in self.configs}
        self.seeds = seeds(self.kernel, self.problem, gpu, [], predicted(self.kernel, self.problem, gpu, self.configs, PREDICTED))
        self.near = sum(time is not None and time <= self.best_us * (1 + NEAR) for time in self.times_us.values())

    def _config(self, values: tuple) -> Config:
        return self.kernel.config(self.problem.static, dict(zip((p.name for p in self.parameters), values)))

    def measurement(self, config: Config) -> Measurement:
        result = self.outcomes[config]
        if not isinstance(result, str):
            return Measurement("ok", time_us=result)
        return Measurement(result if result in OUTCOMES else "launch_failed", message=result)

    def estimate_us(self, config: Config) -> float:
        return self._estimates_us[config]

    def until_near(self, times_us) -> int:
        limit = self.best_us * (1 + NEAR)
        return next((n for n, time in enumerate(times_us, 1) if time is not None and time <= limit), len(self.configs))


def ours(space: Space, seed: int, window: int = 1, worth: float = 0.0, trials: int | None = None):
    """The trace of a search as `autotune tune` makes it."""
    return replay(space.kernel, space.configs, space.measurement, space.best_us, space.seeds, estimate_us=space.estimate_us,
                  trials=trials or len(space.configs), window=window, worth=worth, seed=seed, until=NEAR if worth == 0 else None)


def by_chance(space: Space, seed: int) -> int:
    order = list(space.configs)
    random.Random(seed).shuffle(order)
    return space.until_near(space.times_us[config] for config in order)


def plain_tpe(space: Space, seed: int) -> int:
    """Optuna's sampler over the parameters' values. What it proposes outside the space or again costs nothing here."""
    with quiet_optuna():
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    choices = {p.name: [v for v in p.values if any(config[p.name] == v for config in space.configs)] for p in space.parameters}
    seen: dict[Config, float | None] = {}
    idle = 0
    while idle < REPEATS * len(space.configs) ** 0.5 and len(seen) < len(space.configs):
        trial = study.ask()
        config = space._config(tuple(trial.suggest_categorical(p.name, choices[p.name]) for p in space.parameters))
        time_us = space.times_us.get(config)
        study.tell(trial, time_us, state=optuna.trial.TrialState.COMPLETE if time_us else optuna.trial.TrialState.PRUNED)
        idle = idle + 1 if config in seen or config not in space.times_us else 0
        if config in space.times_us and config not in seen:
            seen[config] = time_us
            if time_us is not None and time_us <= space.best_us * (1 + NEAR):
                return len(seen)
    return len(space.configs)


def kernel_tuner(space: Space, python: str, strategies, count: int) -> dict[str, list[int]]:
    """Strategy -> configs tried until near the best, for each seed."""
    rows = [[[config[p.name] for p in space.parameters], space.times_us[config]] for config in space.configs]
    asked = {"names": [p.name for p in space.parameters], "rows": rows, "strategies": strategies, "seeds": count}
    done = subprocess.run([python, str(HERE / "kernel_tuner_replay.py")], input=json.dumps(asked), capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": ""})
    if done.returncode:
        raise SystemExit(f"kernel_tuner_replay.py failed under {python}: {done.stderr.strip().splitlines()[-1:]}")
    return {name: [space.until_near(times) for times in traces] for name, traces in json.loads(done.stdout).items()}


def tried(space: Space, count: int, python: str | None, strategies=STRATEGIES) -> dict[str, list[int]]:
    """Search -> configs tried until near the best, for each seed."""
    found = {"autotune": [ours(space, seed).until_within(NEAR) or len(space.configs) for seed in range(count)],
             f"autotune, {WINDOW} at a time": [ours(space, seed, WINDOW).until_within(NEAR) or len(space.configs)
                                               for seed in range(count)],
             "random": [by_chance(space, seed) for seed in range(count)],
             "tpe": [plain_tpe(space, seed) for seed in range(count)]}
    return found | (kernel_tuner(space, python, strategies, count) if python else {})


def stopped(space: Space, count: int) -> dict[str, float]:
    """Where a quick search stops by itself, and how much slower than the best its best is then, the worst of all seeds."""
    budget = EFFORTS["quick"].budget
    traces = [ours(space, seed, WINDOW, budget.worth, budget.trials) for seed in range(count)]
    return {"tried": round(median(len(trace.times_us) for trace in traces)), "loss": round(max(t.regret for t in traces), 4)}


def share(counts: list[int], quantile: float) -> int:
    return sorted(counts)[min(len(counts) - 1, int(quantile * len(counts)))]


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=HERE / "results" / "subspaces")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--kernel-tuner", metavar="PYTHON")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--gpu", default="nvidia-h200", help="where the spaces were recorded")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    paths = sorted(options.folder.glob("*.jsonl.gz"))
    if not paths:
        raise SystemExit(f"{options.folder} holds no recorded spaces; python benchmarks/subspaces.py {options.folder} 600 makes "
                         "them")
    rows, everything = {}, {}
    for path in paths:
        began, space = time.monotonic(), Space(path, by_name(options.gpu))
        found = tried(space, options.seeds, options.kernel_tuner, options.strategies)
        for name, counts in found.items():
            everything.setdefault(name, []).append((len(space.configs), counts))
        rows[space.name] = {"configs": len(space.configs), "near_best": space.near, "quick_stops": stopped(space, options.seeds),
                            **{name: {"median": int(median(counts)), "p95": share(counts, 0.95)}
                               for name, counts in found.items()}}
        print(f"{space.name}: {rows[space.name]} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    result = {"summary": summary(everything), "command": "python " + " ".join(sys.argv), "gpu": options.gpu, "spaces": rows}
    text = yaml.safe_dump(result, sort_keys=False, width=130)
    (options.out.write_text if options.out else sys.stdout.write)(text)


def summary(everything: dict[str, list[tuple[int, list[int]]]]) -> dict:
    """Over all spaces and seeds: `median_share` and `p95_share` of the space that is tried, `median` and `p95` configs, and how
    many times as many others try by the geometric mean of the spaces' medians; `vs_kernel_tuner` is of its best strategy."""
    from math import exp, log

    def mean(name: str) -> float:
        return exp(sum(log(max(1, median(counts))) for _, counts in everything[name]) / len(everything[name]))

    shares = [count / size for size, counts in everything["autotune"] for count in counts]
    counts = [count for _, some in everything["autotune"] for count in some]
    mine = mean("autotune")
    theirs = [mean(name) / mine for name in everything if not name.startswith("autotune") and name not in ("random", "tpe")]
    return {"median_share": round(share(shares, 0.5), 4), "p95_share": round(share(shares, 0.95), 4),
            "median": share(counts, 0.5), "p95": share(counts, 0.95), "vs_random": round(mean("random") / mine, 2),
            "vs_tpe": round(mean("tpe") / mine, 2), **({"vs_kernel_tuner": round(min(theirs), 2)} if theirs else {})}


if __name__ == "__main__":
    main()
