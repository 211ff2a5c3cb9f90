"""Is attention over caches right? A seeded cover of pairs of features, the default config and random legal ones, all kinds of
inputs, against float64; then calls of attention_with_kvcache: numbers of splits, repeats, and batches of decodes and chunks.

    python benchmarks/decode_correctness.py [--configs N] [--seconds S] [--calls N] [--seed S] [--out FILE]
    python benchmarks/decode_correctness.py --simulate [--seconds S] ...    on the CPU: small problems, as many as time allows

Lengths, page tables and numbers of queries are random, with none and all among them; pages and slots that are not in use hold
NaN, table entries that are not in use are huge. A launch must leave its tickets at 0. Exit code 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from pathlib import Path
from typing import Iterator

from _result import RESULTS, gpu_at_hand
from correctness import Report, cover_units
from _judges import OnGpu, Simulated

from autotune.check.cases import Case
from autotune.check.judge import Binaries, run
from autotune.core.gpu import Gpu, by_name
from autotune.core.masks import CAUSAL, FULL, Bounds
from autotune.kernels import KERNELS, candidates
from autotune.core.problem import Problem, ProblemError

SIMULATED_GPU = "nvidia-h200"  # whose kernels the simulator runs
SECONDS, CONFIGS, CALLS, JUDGES = 120.0, 4, 40, 4
TRIED = 300  # draws until a pair counts as one that cannot be
COMPARED = 20  # of those that can: the one with most new pairs is kept
MOST_SCORES = 1.5e6  # (row, key) pairs of a problem: their reference takes 64 times as many

FACTORS: dict[str, tuple] = {
    "dtype": ("bf16", "fp16"),
    "heads": ((1, 1), (4, 2), (6, 2), (8, 2), (5, 1), (12, 2), (7, 1), (16, 2), (32, 2), (64, 1)),  # 1 to 64 share keys
    "queries": (1, 2, 3, 5, 8, 16),
    "head_dims": ((64, 64), (128, 128), (80, 80), (96, 96), (192, 192), (256, 256), (72, 40), (192, 128), (16, 248)),
    "mask": (FULL, CAUSAL, Bounds(127, 0), Bounds(0, 0), Bounds(40, 2), Bounds(None, 1), Bounds(1000, None),
             Bounds(None, 0, 100)),
    "softcap": (0.0, 30.0),
    "alibi": (False, True),
    "sinks": (False, True),
    "page_size": (0, 1, 3, 16, 19, 64, 256, 1024),
    "kv_dtype": ("", "e4m3"),
    "packed": (False, True),
    "batch": (1, 3, 33, 70),
    "keys": (1, 17, 128, 339, 1024, 3577, 20000),
}


def main() -> int:
    options = _options()
    gpu = by_name(SIMULATED_GPU) if options.simulate else gpu_at_hand(". With --simulate the kernels run on the CPU")
    report = Report()
    cases, impossible = cover(gpu, options.seed)
    report.expected = len(cases)
    cores = len(os.sched_getaffinity(0))
    judges = cores if options.simulate else min(JUDGES, max(1, cores // 4))
    binaries = None if options.simulate else Binaries(gpu, max(1, cores - judges))
    run(cover_units(cases, gpu, options, report), binaries, [Simulated() if options.simulate else OnGpu() for _ in range(judges)],
        report.add, report.end, over=lambda: options.simulate and report.clock() > options.seconds)
    listed: dict[str, object] = {"pairs_that_cannot_be": len(impossible)}
    if not options.simulate:
        from decode_calls import check_calls

        called = calls(options.seed, options.calls), mixed(options.seed, options.calls)
        listed["calls"] = check_calls(report, *called, options.seed)
    out = options.out or RESULTS / f"decode-correctness-{'simulated' if options.simulate else 'h200'}.yaml"
    out.write_text(report.text(gpu, options, listed))
    report.say()
    print(f"{report.summary()} in {out}")
    return 1 if report.failures or not report.cases else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--configs", type=int, default=CONFIGS, help=f"random configs beside the default ({CONFIGS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for the cover ({SECONDS:g})")
    parser.add_argument("--calls", type=int, default=CALLS, help=f"problems that are called, of each kind ({CALLS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--simulate", action="store_true", help="on the CPU, on small problems of the same kind")
    parser.set_defaults(random=None)
    return parser.parse_args()


def cover(gpu: Gpu, seed: int) -> tuple[list[Case], list]:
    """(cases that hold every pair of values of two factors that a problem can have, in a random order; the other pairs)"""
    rng = random.Random(seed)
    order = [((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]]
    rng.shuffle(order)
    missing, chosen, impossible = set(order), {}, []
    for pair in order:
        if pair not in missing:
            continue
        draws = ({**{name: rng.choice(options) for name, options in FACTORS.items()}, **dict(pair)} for _ in range(TRIED))
        drawn = list(itertools.islice(((v, p) for v in draws if (p := problem_of(v)) and candidates(p, gpu)), COMPARED))
        if not drawn:
            impossible.append(pair)
            continue
        values, problem = max(drawn, key=lambda each: len(_pairs(each[0]) & missing))
        missing -= _pairs(values)
        chosen[problem] = None
    cases = [Case(problem, "packed") for problem in chosen]
    rng.shuffle(cases)
    return cases, impossible


def _pairs(values: dict) -> set[tuple]:
    return set(itertools.combinations(values.items(), 2))


def problem_of(values: dict) -> Problem | None:
    """The problem of an assignment of values to `FACTORS`, simplified; None if there is none, or if it is too large."""
    (heads_q, heads_kv), (head_dim, head_dim_v) = values["heads"], values["head_dims"]
    if values["batch"] * heads_q * values["keys"] > MOST_SCORES:
        return None
    try:
        return Problem(op="decode", dtype=values["dtype"], batch=values["batch"], heads_q=heads_q, heads_kv=heads_kv,
                       seqlen_q=values["queries"], seqlen_k=values["keys"], head_dim=head_dim, head_dim_v=head_dim_v,
                       **values["mask"]._asdict(), softcap=values["softcap"], alibi=values["alibi"],
                       sinks=values["sinks"], kv="paged" if values["page_size"] else "dense", page_size=values["page_size"],
                       packed_queries=values["packed"], kv_dtype=values["kv_dtype"]).simplified()
    except ProblemError:
        return None


def _drawn(rng: random.Random, count: int, **fixed) -> Iterator[Problem]:
    """`count` random problems that a decode kernel serves, with one of the values of each of `fixed`."""
    gpu = by_name(SIMULATED_GPU)
    while count:
        problem = problem_of({name: rng.choice(fixed.get(name, options)) for name, options in FACTORS.items()})
        if problem and KERNELS["decode_mma"].reject(problem, gpu) is None:
            count -= 1
            yield problem


def calls(seed: int, count: int) -> list[Problem]:
    """Problems whose sequences are long enough to be cut."""
    return list(_drawn(random.Random(f"{seed} calls"), count, keys=(339, 3577, 20000), batch=(1, 3)))


def mixed(seed: int, count: int) -> list[Problem]:
    """Batches of packed queries in which some sequences have more than decode kernels take."""
    rng = random.Random(f"{seed} mixed")
    found = _drawn(rng, count, keys=(339, 1024, 3577), batch=(3, 33), packed=(True,), kv_dtype=("",), queries=(16,),
                   mask=(FULL, CAUSAL, Bounds(127, 0), Bounds(0, 0), Bounds(40, 2), Bounds(None, 0, 100)))
    return [Problem.parse(p.text.replace("-q16-", f"-q{rng.choice((17, 40, 150, 300))}-")) for p in found]


if __name__ == "__main__":
    sys.exit(main())
