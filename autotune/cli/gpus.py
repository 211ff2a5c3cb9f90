"""Lists the GPU at hand and the catalogue's GPUs, any of which `--gpu NAME` takes."""

from __future__ import annotations

import argparse

from ..core.gpu import Gpu, GpuError, catalogue, detect
from ..core.tables import table

SUMMARY = "the GPU at hand and the catalogue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    gpus = dict(catalogue())
    try:
        here = detect()
        gpus[here.name] = here
        note = f"* at hand: {here.title}"
    except GpuError as error:
        here, note = None, "none at hand: " + str(error).removeprefix("no GPU can be used: ")
    header = ("name", "arch", "SMs", "L2 MB", "memory GB", "GB/s", "MHz", "mma TFLOP/s", "shared KB/block")
    print(table(header, [_row(gpu, mark="*" if gpu is here else "") for gpu in gpus.values()]))
    print(note)
    return 0


def _row(gpu: Gpu, mark: str) -> tuple:
    return (gpu.name + mark, f"sm_{gpu.arch}", gpu.sms, gpu["l2_bytes"] >> 20, round(gpu["memory_bytes"] / 1e9),
            gpu["bandwidth_gb_s"], gpu["sm_clock_mhz"], round(gpu.mma_tflops), gpu["smem_per_block_bytes"] >> 10)
