"""How much does tuning gain? Each measured record of the checkout's database against the default config, as the tuner timed them
side by side, and how long its search took.

    python benchmarks/tuned.py [--out FILE]

Reads tuning_db/; needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import yaml

from autotune.database.view import all_records, shipped_root

RESULTS = Path(__file__).parent / "results" / "tuned-h200.yaml"
GPU = "nvidia-h200"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = {}
    for _, record in all_records([shipped_root()]):
        if record.gpu.name != GPU or record.evidence != "measured" or not record.default_time_us:
            continue
        rows[record.problem.text] = {
            "speedup": round(record.default_time_us / record.time_us, 3), "time_us": record.time_us,
            "default_time_us": record.default_time_us, "kernel": record.config.kernel, "trials": record.trials,
            "seconds": record.conditions.get("search", {}).get("seconds")}
    if not rows:
        print(f"no measured record of {GPU} in {shipped_root()}; `autotune tune --model llama-3-8b --db checkout` makes some",
              file=sys.stderr)
        return 1
    speedups = [row["speedup"] for row in rows.values()]
    seconds = [row["seconds"] for row in rows.values() if row["seconds"]]
    summary = {"geomean": round(math.exp(sum(map(math.log, speedups)) / len(speedups)), 3), "worst": min(speedups),
               "problems": len(rows), "longest_search_s": max(seconds, default=None)}
    options.out.write_text(yaml.safe_dump({"summary": summary, "gpu": GPU, "command": "python benchmarks/tuned.py",
                                           "problems": rows},
                                          sort_keys=False, width=200))
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
