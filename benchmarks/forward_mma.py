"""forward_mma beside FlashAttention-2, the two kernels for mma.sync: torch's sdpa-flash on the same GPU, inputs and timing code.

    python benchmarks/forward_mma.py [--out FILE]

On Hopper `attention` prefers forward_wgmma; here it runs forward_mma with the configs below, which a tune of that kernel alone
found on an H200. Needs an NVIDIA H200 and torch; takes a minute.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from autotune.compare import comparison as bench, report as benchreport
from autotune.core.gpu import GpuError, detect
from autotune.kernels import config_from_text
from autotune.core.problem import Problem

CONFIGS = {  # problem -> what was fastest
    "forward-bf16-b1-h16x16-q8192-k8192-d64-causal":
        "forward_mma block_m=128 block_heads=1 block_n=128 num_warps=4 num_stages=3 q_in_registers=false overlap=false "
        "rescale_slack=-1 min_blocks_per_sm=2 smem_bytes=114688 longest_first=true head_group=16 smem_carveout=-1",
    "forward-bf16-b1-h16x16-q8192-k8192-d128-causal":
        "forward_mma block_m=128 block_heads=1 block_n=112 num_warps=8 num_stages=3 q_in_registers=true overlap=false "
        "rescale_slack=8 min_blocks_per_sm=1 smem_bytes=172032 longest_first=true head_group=2 smem_carveout=-1",
    "forward-bf16-b1-h16x16-q8192-k8192-d256-causal":
        "forward_mma block_m=64 block_heads=1 block_n=80 num_warps=4 num_stages=1 q_in_registers=false overlap=false "
        "rescale_slack=0 min_blocks_per_sm=1 smem_bytes=114688 longest_first=true head_group=2 smem_carveout=100",
    "forward-bf16-b1-h32x8-q8192-k8192-d128-causal":
        "forward_mma block_m=64 block_heads=1 block_n=112 num_warps=4 num_stages=2 q_in_registers=true overlap=false "
        "rescale_slack=8 min_blocks_per_sm=1 smem_bytes=114688 longest_first=true head_group=64 smem_carveout=-1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="also write the result to this YAML file")
    options = parser.parse_args()
    try:
        gpu = detect()
        report = bench.run(list(configs()), bench.peers_of("sdpa-flash"), gpu, lambda text: print(text, flush=True),
                           configs=configs())
    except (GpuError, bench.BenchError) as error:
        print(error, file=sys.stderr)
        return 2
    print(benchreport.show(report, gpu))
    if options.out:
        command = f"python benchmarks/{Path(__file__).name} --out {options.out}"
        benchreport.write(replace(report, command=command), options.out)
    return 1 if report.failed else 0


def configs() -> dict:
    """Problem -> the config to time it with."""
    return {Problem.parse(problem): config_from_text(text) for problem, text in CONFIGS.items()}


if __name__ == "__main__":
    sys.exit(main())
