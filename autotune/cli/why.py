"""Says why a configuration won: what each parameter's best other value costs, what limits the winner, how the search went.

Asks the trials that `autotune tune` keeps, the losers among them, and needs no GPU with --gpu.
"""

from __future__ import annotations

import argparse

from ..core.gpu import resolve
from ..core.problem import Problem
from ..core.tables import microseconds, table
from .common import add_gpu, add_problem

SUMMARY = "why a configuration won: what the others cost, and what limits it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    add_gpu(parser)
    add_trials(parser)


def add_trials(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", metavar="STORAGE",
                        help="where the trials are (default: your own folder): a folder, or postgresql://USER@HOST/DATABASE, as "
                        "in "
                             "`tune --storage STORAGE`")


def run(args: argparse.Namespace) -> int:
    problem = Problem.parse(args.problem).simplified()
    gpu = resolve(args.gpu)
    from ..tuner import insight

    told = insight.told(problem, gpu, args.trials)
    best = told.best
    counts = ", ".join(f"{outcome} {count}" for outcome, count in told.outcomes.most_common())
    print(f"problem   {problem}\ngpu       {gpu.title}\ntrials    {counts or 'none'}")
    if best is None:
        print("winner    none works yet; `autotune tune` goes on from here")
        return 1
    kernel = next(kernel for kernel in told.trials if kernel.name == best.config.kernel)
    trials, time_us = told.trials[kernel], best.measurement.time_us
    print(f"winner    {microseconds(time_us)} us in the search: {best.config}")
    shares = insight.busy(problem, gpu, time_us)
    print("limits    at boost clock " + ", ".join(f"{unit} {share:.0%}" for unit, share in shares.items()) + " of the time busy")
    for other, others in told.trials.items():
        fastest = min((t.measurement.time_us for t in others if t.measurement.ok), default=None)
        if other is not kernel and fastest:
            print(f"{other.name}: {microseconds(fastest)} us at best, {fastest / time_us - 1:+.1%}")
    weights = insight.importance(kernel, trials)
    rows = [(a.parameter, str(a.winners), str(a.value), f"{a.cost:+.1%}", f"{weights[a.parameter]:.0%}" if a.parameter in weights
             else "-", ", ".join(a.changed) or "-") for a in insight.alternatives(kernel, trials, best.config, time_us)]
    print("\n" + table(("parameter", "winner's", "best other", "costs", "importance", "changed with it"), rows))
    steps = insight.history(trials)
    print("\n" + table(("config", "best us"), [(str(n), microseconds(time)) for n, time in steps]))
    return 0
