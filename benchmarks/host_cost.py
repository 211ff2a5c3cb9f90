"""What calls cost the host: warm attention() next to torch's SDPA, attention_varlen, and attention_with_kvcache over dense and
paged caches, with sizes that change on every call; lookups, warm and in a process that has read nothing, and the import of the
package.

    python benchmarks/host_cost.py [--out FILE]

Without a GPU only what needs none: lookups for the H200 of the catalogue, and the import.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import served
import yaml

import autotune
from autotune.timing.conditions import conditions
from autotune.core.gpu import Gpu, GpuError, by_name, detect
from autotune.core.problem import Problem

RESULTS = Path(__file__).parent / "results"
ROUNDS, WARM_UP, SIZES = 40, 5, 128


# Microseconds that a call may take on the host of an H200; attention() must not take longer than SDPA either.
LIMITS_US = {"attention_us": 13.5, "decode_us": 16.0, "paged_decode_us": 16.0, "lookup_us": 0.7}
IMPORT_LIMIT_S = 0.3
COLD_LIMIT_MS = 20.0  # of a lookup of a problem without a record, the first of its static part
PROCESSES = 6  # in each of which every static part is looked up; another one first in each

COLD = """
import sys, time
from autotune import lookup
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
gpu = by_name("nvidia-h200")
for text in sys.argv[1:]:
    problem = Problem.parse(text)
    started = time.perf_counter()
    lookup(problem, gpu)
    print((time.perf_counter() - started) * 1e3)
"""


def entrants() -> dict[str, tuple]:
    """Name in the summary -> (function, `SIZES` tuples of arguments)."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def tensor(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def integers(*numbers):
        return torch.tensor(numbers, device="cuda", dtype=torch.int32)

    lengths = range(16, 16 + SIZES)
    dense = [tuple(tensor(1, n, 4, 64) for _ in "qkv") for n in lengths]
    turned = [tuple(array.transpose(1, 2) for array in arrays) for arrays in dense]
    packed = [(*(tensor(2 * n, 4, 64) for _ in "qkv"), integers(0, n, 2 * n), n) for n in lengths]
    caches = [(tensor(2, 1, 8, 128), tensor(2, 8 * n, 2, 128), tensor(2, 8 * n, 2, 128), integers(7 * n, 8 * n)) for n in lengths]
    table = torch.arange(2 * 512, device="cuda", dtype=torch.int32).reshape(2, 512)
    pages = tensor(2 * 512, 16, 2, 128), tensor(2 * 512, 16, 2, 128)
    paged = [(tensor(2, 1, 8, 128), *pages, integers(7 * n, 8 * n)) for n in lengths]
    return {
        "attention_us": (lambda q, k, v: autotune.attention(q, k, v, causal=True), dense),
        "torch_sdpa_us": (lambda q, k, v: sdpa(q, k, v, is_causal=True), turned),
        "varlen_us": (lambda q, k, v, starts, n: autotune.attention_varlen(q, k, v, starts, starts, n, n, causal=True), packed),
        "decode_us": (lambda q, k, v, lengths: autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths), caches),
        "paged_decode_us": (lambda q, k, v, lengths: autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths,
                                                                                     page_table=table), paged)}


def call_costs_us() -> dict[str, float]:
    """Medians over rounds in alternating order, the GPU idle at each start; SDPA with its flash backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    costs: dict[str, list[float]] = {}
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        every = list(entrants().items())
        for n in range(ROUNDS):
            for name, (function, inputs) in every[::1 if n % 2 else -1]:
                torch.cuda.synchronize()
                started = time.perf_counter()
                for arguments in inputs:
                    function(*arguments)
                costs.setdefault(name, []).append((time.perf_counter() - started) / SIZES * 1e6)
    return {name: round(median(each[WARM_UP:]), 2) for name, each in costs.items()}


def lookup_us(gpu: Gpu) -> float:
    problems = [Problem(heads_q=8, heads_kv=2, seqlen_q=100 + n, seqlen_k=100 + n, window_right=0) for n in range(500)]
    costs = []
    for _ in range(20):
        started = time.perf_counter()
        for problem in problems:
            autotune.lookup(problem, gpu)
        costs.append((time.perf_counter() - started) / len(problems) * 1e6)
    return median(costs[2:])


def cold_lookups_ms() -> dict[str, float]:
    """Of the first lookup in a process, and of the first of each further static part: medians, and of these the longest."""
    problems = {problem.static.in_bf16: problem.text for problem in reversed(served.drawn(400, 7))}
    texts = list(problems.values())
    costs: dict[str, list[float]] = {text: [] for text in texts}
    first = []
    for n in range(PROCESSES):
        turn = n * len(texts) // PROCESSES
        order = texts[turn:] + texts[:turn]
        done = subprocess.run([sys.executable, "-c", COLD, *order], capture_output=True, text=True, check=True)
        took = [float(line) for line in done.stdout.split()]
        first.append(took[0])
        for text, cost in zip(order[1:], took[1:]):
            costs[text].append(cost)
    each = [min(taken) for taken in costs.values()]  # the least: what comes on top is other processes'
    return {"first_lookup_ms": round(median(first), 1), "cold_lookup_ms": round(median(each), 1),
            "longest_cold_lookup_ms": round(max(each), 1)}


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
        summary |= call_costs_us()
        out = options.out or RESULTS / "host-cost-h200.yaml"
    except GpuError as error:
        print(f"{error}: calls are left out")
        gpu, out = by_name("nvidia-h200"), options.out or RESULTS / "host-cost-no-gpu.yaml"
    summary |= {"lookup_us": round(lookup_us(gpu), 2), **cold_lookups_ms(), "import_s": round(import_s(), 4)}
    result = {"summary": summary, "command": "python benchmarks/host_cost.py"}
    if "attention_us" in summary:
        result |= {"gpu": gpu.name, "conditions": conditions()}
    out.write_text(yaml.safe_dump(result, sort_keys=False, width=200))
    print(summary)
    limits = {**LIMITS_US, "attention_us": min(LIMITS_US["attention_us"], summary.get("torch_sdpa_us", 0.0))}
    limits |= {name: COLD_LIMIT_MS for name in summary if name.endswith("lookup_ms")}
    slow = [name for name, limit in limits.items() if summary.get(name, 0.0) > limit]
    if slow:
        print(f"above their limits: {', '.join(f'{name} ({limits[name]})' for name in slow)}")
    return int(bool(slow) or summary["import_s"] >= IMPORT_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
