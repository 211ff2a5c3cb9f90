"""Whether two independent tunes of the same problems on the GPU at hand find the same.

    python benchmarks/stability.py FOLDER SECONDS [--out FILE]

Each tune has a database and trials of its own in FOLDER, so neither knows of the other. What is there is not tuned again: the
same command goes on from where time was up, and writes FILE (benchmarks/results/stability.yaml) when both tunes are whole. Then
both winners of a problem are timed again, by turns and until it is clear which is faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import yaml
from many_gpus import agree

from autotune.core.gpu import detect
from autotune.core.problem import Problem
from autotune.database import view
from autotune.tuner import EVALUATOR, tune
from autotune.tuner.builder import Builder
from autotune.tuner.gpulock import gpu_lock
from autotune.tuner.worker import Worker

HERE = Path(__file__).parent
FINAL_S = 2.0  # for both winners of a problem
PROBLEMS = tuple(Problem.parse(text).simplified() for text in (
    "forward-bf16-b1-h32x8-q1024-k1024-d128-causal", "forward-bf16-b1-h32x8-q4096-k4096-d128-causal",
    "forward-bf16-b4-h16x16-q2048-k2048-d64", "forward-bf16-b2-h32x32-q1024-k1024-d64-causal",
    "forward-bf16-b1-h16x8-q2048-k2048-d256-causal", "forward-fp16-b1-h32x8-q2048-k2048-d128",
    "forward-bf16-b1-h32x8-q512-k8192-d128-causal", "forward-bf16-b8-h8x8-q512-k512-d128",
    "forward-bf16-b1-h64x8-q4096-k4096-d64-causal-left127", "forward-bf16-b2-h16x16-q1024-k1024-d96",
    "decode-bf16-b1-h32x8-q1-k8192-d128-causal", "decode-bf16-b1-h32x8-q1-k1024-d128-causal",
    "decode-bf16-b16-h32x8-q1-k2048-d128-causal", "decode-bf16-b64-h32x8-q1-k1024-d128-causal",
    "decode-bf16-b16-h32x8-q1-k2048-d128-causal-page16", "decode-bf16-b8-h64x8-q1-k4096-d64-causal",
    "decode-bf16-b4-h32x32-q1-k2048-d128-causal", "decode-bf16-b1-h32x8-q1-k32768-d128-causal",
    "decode-bf16-b32-h16x2-q1-k4096-d128-causal-page64", "decode-bf16-b2-h32x8-q4-k4096-d128-causal"))


def records_of(place: Path, gpu) -> dict[Problem, object]:
    return {record.problem: record for op in ("forward", "decode")
            for record in view.open_view(gpu, op, (place / "db",)).records if record.problem in PROBLEMS}


def tuned(place: Path, gpu, deadline: float) -> dict[Problem, object]:
    """The records in `place`, after tuning what is missing, a problem at a time until `deadline`."""
    for problem in PROBLEMS:
        if problem not in records_of(place, gpu) and time.monotonic() < deadline:
            tune(problem, root=place / "db", trials_root=place / "trials")
    return records_of(place, gpu)


def compared(one: dict, other: dict, gpu) -> list[dict]:
    """Both winners of each problem, timed again."""
    make, rows = Builder(gpu), []
    with gpu_lock(0, print), Worker(EVALUATOR, {"device": 0}) as worker:
        for problem in PROBLEMS:
            configs = list(dict.fromkeys([one[problem].config, other[problem].config]))
            row = {"problem": problem.text, "tied": agree(one[problem], other[problem]),
                   "us": [one[problem].time_us, other[problem].time_us], "apart": 0.0}
            if len(configs) > 1:
                entries = [(config, make.build(problem.static, config).binary) for config in configs]
                worker.call("open", problem, timeout=240)
                reply = worker.call("final", problem, entries, FINAL_S, timeout=120)
                if reply.status != "done" or not all(measured.ok for measured in reply.value):
                    raise SystemExit(f"{problem}: {reply.message or [measured.message for measured in reply.value]}")
                times = [measured.time_us for measured in reply.value]
                row |= {"again_us": times, "apart": round(max(times) / min(times) - 1, 4),
                        "configs": [config.text for config in configs]}
            rows.append(row)
    return rows


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "stability.yaml")
    options = parser.parse_args(arguments)
    deadline, gpu = time.monotonic() + options.seconds, detect(0)
    one, other = (tuned(options.folder / name, gpu, deadline) for name in ("one", "other"))
    if missing := 2 * len(PROBLEMS) - len(one) - len(other):
        print(f"{missing} of {2 * len(PROBLEMS)} tunes are left; the same command goes on from here")
        return
    rows = compared(one, other, gpu)
    summary = {"problems": len(rows), "in_tie_set": sum(row["tied"] for row in rows),
               "worst_apart": max(row["apart"] for row in rows)}
    result = {"summary": summary, "gpu": gpu.name, "command": " ".join(["python", "benchmarks/stability.py", *sys.argv[1:]]),
              "rows": rows}
    options.out.write_text(yaml.safe_dump(result, sort_keys=False, width=130))
    print(yaml.safe_dump(result, sort_keys=False, width=130))


if __name__ == "__main__":
    main()
