"""Kernel Tuner's strategies in its simulation mode. Runs in an environment that has kernel_tuner, not in autotune's.

Reads {names, rows: [[values], time or null], strategies, seeds} from stdin; prints {strategy: [times in the order tried, by
seed]}.
"""

import contextlib
import io
import json
import os
import random
import sys
import tempfile
import warnings

import numpy


class Ordered(dict):
    """Stands in for the runner's set of configs seen: remembers their order."""

    def add(self, key):
        self[key] = None


def main():
    asked = json.load(sys.stdin)
    names, table = asked["names"], {tuple(values): time for values, time in asked["rows"]}
    parameters = {name: sorted({values[n] for values in table}) for n, name in enumerate(names)}
    from kernel_tuner import tune_kernel
    from kernel_tuner.runners import simulation

    seen = []
    made = simulation.SimulationRunner.__init__

    def remembering(self, *arguments, **keywords):
        made(self, *arguments, **keywords)
        self.visited_results = Ordered()
        seen.append(self.visited_results)

    simulation.SimulationRunner.__init__ = remembering
    def recorded(config):  # a lambda would be taken apart as text
        return tuple(config[name] for name in names) in table

    cache = {}
    for values, time in table.items():
        entry = dict(zip(names, values))
        entry.update({"time": time} if time is not None else {"time": "CompilationFailedConfig",
                                                              "__error__": "CompilationFailedConfig"})
        cache[",".join(map(str, values))] = entry
    by_key = {",".join(map(str, values)): time for values, time in table.items()}
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "cache.json")
        with open(path, "w") as file:
            json.dump({"device_name": "recorded", "kernel_name": "kernel", "problem_size": 1, "tune_params_keys": names,
                       "tune_params": parameters, "objective": "time", "cache": cache}, file)
        for strategy in asked["strategies"]:
            results[strategy] = []
            for seed in range(asked["seeds"]):
                random.seed(seed)
                numpy.random.seed(seed)
                seen.clear()
                with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    try:
                        tune_kernel("kernel", "void kernel() {}", 1, [], parameters, lang="C", cache=path, simulation_mode=True,
                                    restrictions=[recorded], strategy=strategy,
                                    strategy_options={"max_fevals": min(len(table), 400)}, quiet=True)
                    except Exception as error:  # a strategy's own fault, as in sparse spaces: what it tried counts
                        print(f"{strategy}, seed {seed}: {type(error).__name__}: {error}", file=sys.stderr)
                results[strategy].append([by_key[key] for key in seen[0]])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
