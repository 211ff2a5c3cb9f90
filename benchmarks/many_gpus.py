"""How near to linear many GPUs come: 24 problems on one and on two GPUs of this host, or 500 problems on 64 simulated workers.

    python benchmarks/many_gpus.py FOLDER [--out FILE]        needs two GPUs of one model; about 8 minutes
    python benchmarks/many_gpus.py --simulate [--workers 64] [--problems 500] [--out FILE]      needs PostgreSQL, no GPU

FOLDER keeps records and trials of both tunes. The simulation is told in simulated_gpus.py. Each adds its part to FILE
(benchmarks/results/many-gpus.yaml).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import yaml

from autotune.core.problem import Problem

HERE = Path(__file__).parent
PROBLEMS = tuple(Problem.parse(text).simplified() for n in (1, 2, 4, 8) for text in (
    f"forward-bf16-b1-h32x8-q{512 * n}-k{512 * n}-d128-causal", f"forward-bf16-b{n}-h16x16-q1024-k1024-d64",
    f"forward-bf16-b1-h16x8-q{256 * n}-k{256 * n}-d256-causal", f"forward-fp16-b{n}-h8x8-q512-k1024-d128",
    f"decode-bf16-b{4 * n}-h32x8-q1-k4096-d128-causal", f"decode-bf16-b{4 * n}-h32x8-q1-k2048-d128-causal-page16"))


def measured(folder: Path) -> dict:
    """Tunes `PROBLEMS` on GPU 0, then on GPUs 0 and 1, each with a database and trials of its own."""
    from autotune import tune

    seconds, records = {}, {}
    for gpus in ("0", "0,1"):
        place = folder / gpus.replace(",", "-")
        began = time.monotonic()
        found = tune(PROBLEMS, gpus=gpus, root=place / "db", storage=str(place / "trials"))
        seconds[gpus], records[gpus] = time.monotonic() - began, {record.problem: record for record in found}
    both = [(records["0"][p], records["0,1"][p]) for p in PROBLEMS if p in records["0"] and p in records["0,1"]]
    alike = sum(agree(one, other) for one, other in both)
    return {"problems": len(PROBLEMS), "one_gpu_s": round(seconds["0"], 1), "two_gpus_s": round(seconds["0,1"], 1),
            "speedup": round(seconds["0"] / seconds["0,1"], 3), "both_tuned": len(both), "same_winner_or_tie": alike,
            "others": [f"{one.problem}: {one.time_us:.2f} us {one.config}, {other.time_us:.2f} us {other.config}"
                       for one, other in both if not agree(one, other)]}


def agree(one, other) -> bool:
    """Whether the winner of each record is the other's, or tied with it there."""
    return one.config == other.config or (one.config in {config for config, _ in other.ties}
                                          or other.config in {config for config, _ in one.ties})


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "many-gpus.yaml")
    options = parser.parse_args(arguments)
    if options.simulate == (options.folder is not None):
        parser.error("give a folder for the tunes, or --simulate")
    command = {"command": " ".join(["python", "benchmarks/many_gpus.py", *(arguments or sys.argv[1:])])}
    if options.simulate:
        from simulated_gpus import simulate

        part = {"simulated": {**command, **simulate(options.workers, options.problems)}}
    else:
        part = {"measured": {**command, **measured(options.folder)}}
    known = yaml.safe_load(options.out.read_text()) if options.out.is_file() else {}
    result = {**known, **part}
    summary = {"simulated_share_of_linear": result.get("simulated", {}).get("share_of_linear"),
               "speedup_of_two": result.get("measured", {}).get("speedup")}
    result = {"summary": {name: value for name, value in summary.items() if value is not None},
              **{name: result[name] for name in ("simulated", "measured") if name in result}}
    options.out.write_text(yaml.safe_dump(result, sort_keys=False, width=130))
    print(yaml.safe_dump(part, sort_keys=False, width=130))


if __name__ == "__main__":
    main()
