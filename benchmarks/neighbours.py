"""How much is lost where no record is of the very problem? Decode steps of the models that a neighbour's record or a default
serves, drawn by seed, each beside what a search of its own finds.

    python benchmarks/neighbours.py [--steps N] [--seed S] [--largest-gb GB] [--out FILE]

A quick search for each, into a database that is thrown away; then both configs are timed by turns in one process. Needs a GPU;
takes up to a minute a step. Losses are the time of what serves it / the time of what the search found, 1 if that is the same.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Iterable

import _result

from autotune.cuda import compile
from autotune.models import catalogue
from autotune import tuner
from autotune.check.verdict import Checker
from autotune.core.config import Config
from autotune.core.gpu import Gpu
from autotune.database.lookup import Match, lookup
from autotune.timing.bench import Bench, Candidate
from autotune.check.verify import runner

STEPS, LARGEST_GB = 8, 10.0
ROUNDS, CAPTURES = 15, 3


def main() -> int:
    parser = _result.parser(__doc__, "neighbours-h200.yaml")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"decode steps to draw ({STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--largest-gb", type=float, default=LARGEST_GB, help=f"of a cache ({LARGEST_GB:g})")
    options = parser.parse_args()
    gpu = _result.gpu_at_hand()
    served = drawn(gpu, options.steps, options.seed, options.largest_gb)
    if not served:
        print("every decode step of the models has a record of its own", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        found = {record.problem: record.config for record in tuner.tune([match.problem for match in served], gpu=gpu,
                                                                        root=Path(folder) / "db",
                                                                        trials_root=Path(folder) / "trials")}
    rows = {match.problem.text: row(match, found[match.problem], gpu) for match in served if match.problem in found}
    failed = [match.problem.text for match in served if match.problem not in found]
    _result.write(options.out, gpu, summary(rows.values()), {"failed": failed, "steps": rows})
    return 0 if not failed else 1


def drawn(gpu: Gpu, count: int, seed: int, largest_gb: float) -> list[Match]:
    """What serves `count` decode steps of the models, none of which has a record; as many as there are kinds of caches first."""
    steps = {problem.simplified() for model in catalogue.catalogue().values() for problem in model.decode_problems}
    small = sorted((step for step in steps if step.cache_bytes <= largest_gb * 1e9), key=str)
    matches = [match for step in small if (match := lookup(step, gpu)).tier != "exact"]
    random.Random(seed).shuffle(matches)
    kinds: dict[tuple, int] = {}
    ranked = []
    for match in matches:  # the first of each kind, then the second of each
        kind = match.problem.static.kv, match.problem.static.kv_dtype, match.problem.head_dim, match.tier
        kinds[kind] = kinds.get(kind, 0) + 1
        ranked.append((kinds[kind], len(ranked), match))
    return [match for *_, match in sorted(ranked, key=lambda entry: entry[:2])][:count]


def row(match: Match, found: Config, gpu: Gpu) -> dict:
    """Times of the config that serves a problem and of the one that was found for it, both checked."""
    import cupy

    facts = {"tier": match.tier, "record": match.record.problem.text if match.record else None,
             "expected": round(match.slowdown, 3), "served": match.config.text, "found": found.text}
    if match.config == found:
        return {"loss": 1.0, **facts}
    configs, problem = (match.config, found), match.problem
    bench, runs = Bench(problem, gpu), []
    for config in configs:
        run = runner(problem, config, compile.build(problem.static, config, gpu), 0)
        verdict = Checker(problem, ("random",), xp=cupy)(run)
        if not verdict.ok:
            raise SystemExit(f"{problem}: {config} is wrong: {verdict.message}")
        runs.append(run)
    served, own = bench.interleave([
        Candidate(name, lambda i, run=run: run(bench.sets[i].inputs, bench.sets[i].out, None))
        for name, run in zip(("served", "found"), runs)], ROUNDS, CAPTURES)
    return {"loss": round(served.time_us / own.time_us, 4), "served_us": round(served.time_us, 2),
            "found_us": round(own.time_us, 2), "spread": max(served.spread, own.spread), "policy": own.policy, **facts}


def summary(rows: Iterable[dict]) -> dict:
    """Losses and what lookups said to expect, geometric means."""
    rows = list(rows)
    losses, expected = ([row[name] for row in rows] for name in ("loss", "expected"))

    def mean(values: list[float]) -> float:
        return round(math.exp(sum(map(math.log, values)) / len(values)), 3)

    return {"steps": len(losses), "loss": mean(losses), "worst": max(losses), "expected": mean(expected)}


if __name__ == "__main__":
    sys.exit(main())
