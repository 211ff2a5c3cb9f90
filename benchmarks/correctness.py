"""Are the forward kernels right on this GPU? A seeded pairwise cover of features over a list of lengths, every kernel that
serves each problem, its default config and seeded random ones, all kinds of inputs, against float64.

    python benchmarks/correctness.py [--configs N] [--seed S] [--out FILE]

Writes every case with its worst error / allowed error. Exit code 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from autotune import compile, kernels
from autotune.check import Checker
from autotune.config import Config
from autotune.gpu import Gpu, detect
from autotune.problem import Problem
from autotune.timing import conditions
from autotune.verify import runner

RESULTS = Path(__file__).parent / "results" / "correctness-h200.yaml"

# (seqlen_q, seqlen_k) at which kernels elsewhere broke: one row or key, tails of every tile, Sq above and below Sk.
LENGTHS = ((1, 1), (1, 3), (2, 1), (64, 128), (128, 192), (239, 1), (799, 3), (511, 1), (3, 513), (113, 203), (113, 128),
           (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (307, 256), (640, 128), (512, 256), (1023, 1024),
           (1024, 1023), (2048, 1024), (0, 16), (64, 0))
FACTORS: dict[str, tuple] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "head_dim": (64, 128, 256, 80, 40),
    "heads": ((2, 2), (4, 1), (5, 1), (8, 2), (6, 1)),
    "window": ((None, None), (None, 0), (127, 0), (33, 7), (None, 5), (0, 0)),
    "softcap": (0.0, 30.0),
    "alibi": (False, True),
    "sinks": (False, True),
    "batch": (1, 3),
    "lengths": LENGTHS,
}


def cover(seed: int) -> list[Problem]:
    """Problems that hold every pair of values of any two factors at least once, chosen greedily."""
    rng = random.Random(seed)
    names = list(FACTORS)
    missing = {frozenset(((a, x), (b, y))) for a, b in itertools.combinations(names, 2)
               for x in FACTORS[a] for y in FACTORS[b]}
    chosen = []
    while missing:
        seedling = dict(rng.choice(sorted(missing, key=repr)))
        drawn = [{**{n: rng.choice(FACTORS[n]) for n in names}, **seedling} for _ in range(40)]
        best = max(drawn, key=lambda values: len(_pairs(values) & missing))
        missing -= _pairs(best)
        chosen.append(_problem(best))
    return list(dict.fromkeys(chosen))


def _pairs(values: dict) -> set[frozenset]:
    return {frozenset(pair) for pair in itertools.combinations(values.items(), 2)}


def _problem(values: dict) -> Problem:
    (heads_q, heads_kv), (left, right), (seqlen_q, seqlen_k) = values["heads"], values["window"], values["lengths"]
    return Problem(dtype=values["dtype"], batch=values["batch"], heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q,
                   seqlen_k=seqlen_k, head_dim=values["head_dim"], window_left=left, window_right=right,
                   softcap=values["softcap"], alibi=values["alibi"], sinks=values["sinks"])


def cases(problems: list[Problem], gpu: Gpu, configs: int, seed: int) -> list[tuple[Problem, Config]]:
    """Each problem with the default of every kernel that serves it and `configs` more, which problems that are compiled
    alike share."""
    rng = random.Random(seed)
    drawn: dict[tuple, list[Config]] = {}
    found = []
    for problem in problems:
        for kernel in kernels.candidates(problem, gpu):
            key = kernel.name, problem.static
            if key not in drawn:
                space = kernel.space(problem, gpu)
                drawn[key] = rng.sample(space, min(configs, len(space)))
            found += [(problem, config) for config in (kernel.default(problem, gpu), *drawn[key])]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--configs", type=int, default=1, help="random configs of each kernel beside its default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    import cupy

    gpu = detect()
    found = [case for case in cases(cover(options.seed), gpu, options.configs, options.seed) if case[0].seqlen_q]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        built = list(threads.map(lambda case: _build(*case, gpu), found))
    rows: dict[str, dict] = {}
    checkers: dict[Problem, Checker] = {}
    refused = failed = 0
    worst = 0.0
    for (problem, config), binary in zip(found, built):
        if binary is None:  # ptxas has the last word on registers
            refused += 1
            continue
        checker = checkers.get(problem) or checkers.setdefault(problem, Checker(problem, xp=cupy, seed=options.seed))
        verdict = checker(runner(problem, config, binary, 0))
        failed += not verdict.ok
        worst = max(worst, verdict.worst_ratio)
        rows.setdefault(problem.text, {})[config.text] = round(verdict.worst_ratio, 3) if verdict.ok else verdict.message
        if not verdict.ok:
            print(f"{problem}\n  {config}\n  {verdict.message}", file=sys.stderr)
    summary = {"cases": sum(map(len, rows.values())), "failed": failed, "worst_ratio": round(worst, 3)}
    text = yaml.safe_dump({"summary": summary, "gpu": gpu.name, "conditions": conditions(), "problems": len(rows),
                           "not_compiled": refused, "command": f"python benchmarks/correctness.py --configs {options.configs} --seed {options.seed}",
                           "ratio_of_error_to_allowed_error": rows}, sort_keys=False, width=1000)
    options.out.write_text(text)
    print(summary)
    return 1 if failed or not rows else 0


def _build(problem: Problem, config: Config, gpu: Gpu):
    try:
        return compile.build(problem.static, config, gpu)
    except compile.CompileError:
        return None


if __name__ == "__main__":
    sys.exit(main())
