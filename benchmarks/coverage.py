"""How much is lost where nothing was tuned? Problems that servers call, drawn by seed, each timed with the config that a call
runs, beside every config of the covers of its static part, what a quick tune finds (of some) and other libraries (of some).

    python benchmarks/coverage.py [--problems N] [--seed S] [--tune N] [--peers N] [--seconds S] [--rows FILE] [--out FILE]

Needs a GPU. What time does not suffice for is left out, and counted in the result; with --rows the same command goes on from
there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Sequence

import _result
from served import drawn

from autotune.check.verify import runner
from autotune.core.config import Config
from autotune.core.gpu import Gpu
from autotune.core.problem import Problem
from autotune.cuda import compile
from autotune.database.known import Known
from autotune.database.lookup import Match, lookup
from autotune.kernels import KERNELS
from autotune.timing.bench import Bench, Candidate
from autotune.tuner import builder
from autotune.tuner.survey import TARGET
from autotune.tuner.worker import Worker

SEED = 20261201  # nothing was tuned on what it draws
ROUNDS = 5
CAPTURES = 5  # of a decode step: from one to the next blocks come to stand differently, up to a fifth
FINALISTS = 3  # that are timed again beside what a call runs: the least of many noisy times is nobody's time
CALL_S = 60.0


def main() -> int:
    parser = _result.parser(__doc__, "coverage-h200.yaml")
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--tune", type=int, default=40, help="of how many a quick tune is a rival, too (40)")
    parser.add_argument("--peers", type=int, default=100, help="how many are timed beside other libraries (100)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to stop (3600)")
    parser.add_argument("--rows", type=Path, help="where rows are kept, and taken from if they are there")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    gpu = _result.gpu_at_hand()
    problems = drawn(options.problems, options.seed)
    rng = random.Random(options.seed)
    tuned = rng.sample(problems, min(options.tune, len(problems)))
    compared = rng.sample(problems, min(options.peers, len(problems)))
    rows: dict[str, dict] = json.loads(options.rows.read_text()) if options.rows and options.rows.exists() else {}
    _time_configs([problem for problem in problems if problem.text not in rows], gpu, rows, deadline)
    _save(options, rows, gpu, problems)
    for step, wanted in ((_time_peers, compared), (_tune, tuned)):
        step([problem for problem in wanted if problem.text in rows], gpu, rows, deadline)
        _save(options, rows, gpu, problems)
    return 0 if len(rows) == len(problems) else 1


def _time_configs(problems: Sequence[Problem], gpu: Gpu, rows: dict[str, dict], deadline: float) -> None:
    """Adds a row for each problem: times of what a call runs and of its rivals."""
    with builder.pool() as pool, Worker(TARGET, {"device": 0}) as worker:
        matches = {problem: lookup(problem, gpu) for problem in problems}
        rivals = {problem: _rivals(problem, gpu) for problem in problems}
        building = {problem: {config: pool.submit(compile.build, problem.static, config, gpu)
                              for config in dict.fromkeys([matches[problem].config, *rivals[problem]])} for problem in problems}
        try:
            for problem in problems:
                if time.monotonic() > deadline:
                    break
                binaries = {config: future.result() for config, future in building[problem].items()}
                row = _row(problem, matches[problem], binaries, worker)
                if row:
                    rows[problem.text] = row
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _rivals(problem: Problem, gpu: Gpu) -> list[Config]:
    """Every config of the covers of its static part, fitted to it."""
    known = Known(gpu, problem.static.in_bf16)
    return list(dict.fromkeys(KERNELS[config.kernel].fitted(problem, config, gpu) for config, _ in known.configs
                              if KERNELS[config.kernel].illegal(problem.static, config, gpu) is None))


def _row(problem: Problem, match: Match, binaries: dict[Config, object], worker: Worker) -> dict | None:
    first = _times(problem, binaries, worker)
    if match.config not in first:
        return None
    finalists = sorted((config for config in first if config != match.config), key=first.get)[:FINALISTS]
    times = _times(problem, {config: binaries[config] for config in [match.config, *finalists]}, worker)
    if match.config not in times:
        return None
    best = min(times, key=times.get)
    return {"tier": match.tier, "loss": round(times[match.config] / times[best], 4), "served_us": round(times[match.config], 3),
            "best_us": round(times[best], 3), "rivals": len(first) - 1, "expected": round(match.slowdown, 3),
            "bound": round(match.bound, 3), "served": match.config.text, "best": best.text}


def _times(problem: Problem, binaries: dict[Config, object], worker: Worker) -> dict[Config, float]:
    """Median times in us of those that can be launched, taken by turns."""
    entries = list(binaries.items())
    reply = worker.call("times", problem, entries, ROUNDS, CAPTURES if problem.op == "decode" else 1, timeout=CALL_S)
    if reply.status != "done":
        worker.kill()
        print(f"{problem}: {reply.status}: {reply.message}", file=sys.stderr)
        return {}
    return {config: time_us for (config, _), time_us in zip(entries, reply.value) if time_us}


def _tune(problems: Sequence[Problem], gpu: Gpu, rows: dict[str, dict], deadline: float) -> None:
    """Makes what a quick tune finds a rival."""
    from autotune import tuner
    from autotune.kernels import config_from_text

    for problem in problems:
        row = rows[problem.text]
        if "tuned" in row or time.monotonic() > deadline:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = tuner.tune([problem], gpu=gpu, root=Path(folder) / "db", trials_root=Path(folder) / "trials")
        if not found:
            continue
        configs = dict.fromkeys([config_from_text(row["served"]), found[0].config])
        bench = Bench(problem, gpu)
        runs = [runner(problem, config, compile.build(problem.static, config, gpu), 0) for config in configs]
        timed = bench.interleave([Candidate(str(n), lambda i, run=run: run(bench.sets[i].inputs, bench.sets[i].out, None))
                                  for n, run in enumerate(runs)], 9, 3)
        ratio = timed[0].time_us / timed[-1].time_us
        row.update(tuned=round(ratio, 4), found=found[0].config.text, loss=round(max(row["loss"], ratio), 4))


def _time_peers(problems: Sequence[Problem], gpu: Gpu, rows: dict[str, dict], deadline: float) -> None:
    """Adds times of the best peer, by the code and checks of `autotune bench`."""
    from autotune.compare import peers, run

    installed = peers.installed()
    for problem in problems:
        able = [peer for peer in installed if peer.reject(problem) is None]
        if not able or "vs_peer" in rows[problem.text] or time.monotonic() > deadline:
            continue
        try:
            measured, _ = run.measure_row(problem, able, gpu)
        except Exception as error:  # a library that fails in its own way is no row
            print(f"{problem}: {str(error)[:200]}", file=sys.stderr)
            continue
        if measured is not None and measured.ratio is not None:
            rows[problem.text].update(vs_peer=round(measured.ratio, 4), peer=measured.best_peer)
        run.release()


def summary(rows: dict[str, dict]) -> dict:
    """The numbers of the issue. `vs_peer_*` are geometric means of the best peer's time over ours."""
    losses = sorted(row["loss"] for row in rows.values())
    peers = {op: [row["vs_peer"] for text, row in rows.items() if text.startswith(op) and "vs_peer" in row]
             for op in ("forward", "decode")}
    everyone = peers["forward"] + peers["decode"]
    return {"problems": len(losses), "loss": _mean(losses), "loss_p95": _quantile(losses, 0.95),
            "loss_worst": losses[-1] if losses else None,
            "bound_held": round(sum(row["loss"] <= row["bound"] for row in rows.values()) / max(len(rows), 1), 3),
            "vs_peer_forward": _mean(peers["forward"]), "vs_peer_decode": _mean(peers["decode"]),
            "least_vs_peer": min(everyone, default=None), "rows_with_peers": len(everyone),
            "rows_tuned": sum("tuned" in row for row in rows.values())}


def _mean(values: Sequence[float]) -> float | None:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 4) if values else None


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


NOTABLE = 1.15  # rows that lose less, and have no peer and no tune, are not written: they would be half of the file


def _save(options: argparse.Namespace, rows: dict[str, dict], gpu: Gpu, problems: Sequence[Problem]) -> None:
    if options.rows:
        options.rows.write_text(json.dumps(rows))
    notable = {problem: row for problem, row in rows.items() if row["loss"] > NOTABLE or "vs_peer" in row or "tuned" in row}
    facts = {"seed": options.seed, "left_out": len(problems) - len(rows), "problems": notable}
    _result.write(options.out, gpu, summary(rows), facts)


if __name__ == "__main__":
    sys.exit(main())
