"""compute-sanitizer over small problems: memcheck and racecheck find nothing in any kernel.

    python benchmarks/sanitizer.py [--out FILE]

Each problem is verified once plainly, so that what compiles is compiled, and once under each tool.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from autotune.conditions import conditions
from autotune.gpu import detect

RESULTS = Path(__file__).parent / "results" / "sanitizer-h200.yaml"
TOOLS = ("memcheck", "racecheck")
PROBLEMS = ("forward-bf16-b1-h4x2-q150-k200-d64-causal", "forward-fp16-b1-h4x1-q100-k170-d128-causal-left60-sinks",
            "decode-bf16-b2-h8x2-q1-k700-d64", "decode-fp16-b2-h10x2-q2-k450-d128-page16-sinks")
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on the PATH; the CUDA toolkit brings it", file=sys.stderr)
        return 2
    rows: dict[str, dict] = {}
    clean = True
    for problem in PROBLEMS:
        verify = [sys.executable, "-m", "autotune", "verify", problem]
        plain = subprocess.run(verify, capture_output=True, text=True)
        rows[problem] = {"verify": plain.stdout.strip().splitlines(), "exit": plain.returncode}
        clean &= plain.returncode == 0
        for name in TOOLS:
            ran = subprocess.run([tool, "--tool", name, "--kernel-regex", f"kns={problem.split('-')[0]}_", *verify],
                                 capture_output=True, text=True)
            found = SUMMARY.findall(ran.stdout + ran.stderr)
            errors = sum(map(int, found)) if found else -1  # -1: the tool said nothing
            rows[problem][name] = errors
            clean &= errors == 0 and ran.returncode == 0
            if errors or ran.returncode:
                print(ran.stdout[-3000:], ran.stderr[-1000:], file=sys.stderr)
    options.out.write_text(yaml.safe_dump({"summary": {"clean": clean, "problems": len(rows)}, "gpu": detect().name,
                                           "conditions": conditions(), "command": "python benchmarks/sanitizer.py",
                                           "problems": rows},
                                          sort_keys=False, width=200))
    print({"clean": clean})
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
