"""compute-sanitizer over small problems: memcheck and racecheck find nothing in any kernel.

    python benchmarks/sanitizer.py [--out FILE]

Each problem is verified once plainly, so that what compiles is compiled, and once under each tool.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import _result


TOOLS = ("memcheck", "racecheck")
PROBLEMS = ("forward-bf16-b1-h4x2-q150-k200-d64-causal", "forward-fp16-b1-h4x1-q100-k170-d128-causal-left60-sinks",
            "forward-bf16-b2-h4x2-q100-k300-d64-causal-page16",
            "decode-bf16-b2-h8x2-q1-k700-d64", "decode-fp16-b2-h10x2-q2-k450-d128-page16-sinks",
            "decode-bf16-b2-h8x2-q1-k500-d64-page16-kve4m3", "decode-bf16-b1-h4x2-q1-k300-d256-kve4m3",
            "backward-bf16-b1-h4x2-q150-k200-d64-causal-sinks", "backward-bf16-b1-h2x1-q1030-k1030-d128-causal",
            "backward-fp16-b1-h2x2-q200-k170-d256-left60", "backward-bf16-b3-h4x2-q90-k90-d80-causal-varlen-softcap20")
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")


def main() -> int:
    options = _result.parser(__doc__, "sanitizer-h200.yaml").parse_args()
    gpu = _result.gpu_at_hand()
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on the PATH; the CUDA toolkit brings it", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = dict(zip(PROBLEMS, pool.map(lambda problem: checked(tool, problem), PROBLEMS)))
    clean = all(row["exit"] == 0 and all(row[name] == 0 for name in TOOLS) for row in rows.values())
    _result.write(options.out, gpu, {"clean": clean, "problems": len(rows)}, {"problems": rows}, default_flow_style=False,
                  width=200)
    return 0 if clean else 1


def checked(tool: str, problem: str) -> dict:
    """What `verify` says of a problem, its exit code, and how many errors each tool finds; -1 where one does not get that far."""
    verify = [sys.executable, "-m", "autotune", "verify", problem]
    plain = subprocess.run(verify, capture_output=True, text=True)
    row: dict = {"verify": plain.stdout.strip().splitlines(), "exit": plain.returncode}
    for name in TOOLS:
        ran = subprocess.run([tool, "--tool", name, "--kernel-regex", f"kns={problem.split('-')[0]}_", *verify],
                             capture_output=True, text=True)
        found = SUMMARY.findall(ran.stdout + ran.stderr)
        row[name] = sum(map(int, found)) if found and ran.returncode == 0 else -1
        if row[name]:
            print(ran.stdout[-3000:], ran.stderr[-1000:], file=sys.stderr)
    return row


if __name__ == "__main__":
    sys.exit(main())
