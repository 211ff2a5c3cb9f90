"""What a call costs the host: a warm attention() next to torch's SDPA, with sizes that change on every call, a warm lookup, and
the import of the package.

    python benchmarks/host_cost.py [--out FILE]

Without a GPU only what needs none: a lookup for the H200 of the catalogue, and the import.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import yaml

import autotune
from autotune.timing.conditions import conditions
from autotune.core.gpu import Gpu, GpuError, by_name, detect
from autotune.core.problem import Problem

RESULTS = Path(__file__).parent / "results"
ROUNDS, WARM_UP, SIZES = 40, 5, 128


def call_costs_us() -> tuple[float, float]:
    """(attention, torch SDPA with its flash backend): medians over rounds in alternating order, the GPU idle at each start."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    sets = [tuple(torch.randn(1, 16 + n, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv") for n in range(SIZES)]
    turned = [tuple(tensor.transpose(1, 2) for tensor in arrays) for arrays in sets]
    entrants = ((lambda q, k, v: autotune.attention(q, k, v, causal=True), sets, []),
                (lambda q, k, v: sdpa(q, k, v, is_causal=True), turned, []))
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for n in range(ROUNDS):
            for function, inputs, costs in entrants[::1 if n % 2 else -1]:
                torch.cuda.synchronize()
                started = time.perf_counter()
                for q, k, v in inputs:
                    function(q, k, v)
                costs.append((time.perf_counter() - started) / SIZES * 1e6)
    return tuple(median(costs[WARM_UP:]) for _, _, costs in entrants)


def lookup_us(gpu: Gpu) -> float:
    problems = [Problem(heads_q=8, heads_kv=2, seqlen_q=100 + n, seqlen_k=100 + n, window_right=0) for n in range(500)]
    costs = []
    for _ in range(20):
        started = time.perf_counter()
        for problem in problems:
            autotune.lookup(problem, gpu)
        costs.append((time.perf_counter() - started) / len(problems) * 1e6)
    return median(costs[2:])


def import_s() -> float:
    code = "import time; t = time.perf_counter(); import autotune; print(time.perf_counter() - t)"
    return median(float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
                  for _ in range(5))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    summary: dict[str, float] = {}
    try:
        gpu = detect()
        summary["attention_us"], summary["torch_sdpa_us"] = (round(cost, 2) for cost in call_costs_us())
        out = options.out or RESULTS / "host-cost-h200.yaml"
    except GpuError as error:
        print(f"{error}: calls are left out")
        gpu, out = by_name("nvidia-h200"), options.out or RESULTS / "host-cost-no-gpu.yaml"
    summary |= {"lookup_us": round(lookup_us(gpu), 2), "import_s": round(import_s(), 4)}
    result = {"summary": summary, "command": "python benchmarks/host_cost.py"}
    if "attention_us" in summary:
        result |= {"gpu": gpu.name, "conditions": conditions()}
    out.write_text(yaml.safe_dump(result, sort_keys=False, width=200))
    print(summary)
    slow = summary.get("attention_us", 0) > summary.get("torch_sdpa_us", 0)
    return int(slow or summary["lookup_us"] >= 2 or summary["import_s"] >= 0.3)


if __name__ == "__main__":
    sys.exit(main())
