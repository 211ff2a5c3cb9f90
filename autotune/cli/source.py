"""Prints the CUDA source of the kernel that serves a problem, or what it compiles to. Needs no GPU with --gpu.

The source is complete: NVRTC and nvcc take it as it is.
"""

from __future__ import annotations

import argparse

from ..core.gpu import resolve
from ..core.problem import Problem
from ..core.tables import table
from .common import UsageError, add_gpu, add_problem

SUMMARY = "the CUDA source that serves a problem, its PTX, SASS or resources"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_problem(parser)
    add_gpu(parser)
    parser.add_argument("--config", metavar="TEXT", help="this configuration instead of the one that lookup chooses")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--ptx", action="store_true", help="print PTX instead")
    form.add_argument("--sass", action="store_true", help="print machine code instead (needs nvdisasm)")
    form.add_argument("--resources", action="store_true", help="print registers, shared memory and spills instead")


def run(args: argparse.Namespace) -> int:
    problem = Problem.parse(args.problem)
    gpu = resolve(args.gpu)
    from ..cuda import compile, listing
    from .. import kernels
    from ..cuda.render import render

    config = chosen_config(problem, gpu, args.config)
    target = kernels.kernel_of(config).target(gpu)
    source = render(problem.simplified().static, config, target)
    if args.ptx:
        text = listing.ptx(source, target)
    elif args.sass:
        text = listing.sass(compile.cached(source, target).image)
    elif args.resources:
        text = _resources(compile.cached(source, target), problem, config)
    else:
        text = source
    print(text, end="" if text.endswith("\n") else "\n")
    return 0


def chosen_config(problem: Problem, gpu, text: str | None):
    """The config that `text` says, checked for `problem` on `gpu`, or the one that lookup chooses.

    Raises `ConfigError` for a config that no kernel declares, `UsageError` for one that is illegal here.
    """
    from .. import kernels

    if text is None:
        from ..database.lookup import lookup

        return lookup(problem, gpu).config
    config = kernels.config_from_text(text)
    kernel = kernels.kernel_of(config)
    simple = problem.simplified()
    if reason := kernel.reject(simple, gpu) or kernel.illegal(simple.static, config, gpu):
        raise UsageError(f"config {config} cannot serve {problem} on {gpu.name}: {reason}")
    return config


def _resources(binary, problem: Problem, config) -> str:
    from .. import kernels

    steps = {step.entry: step for step in kernels.kernel_of(config).plan(problem, config)}
    rows = [(entry, r.registers, r.spill_bytes, steps[entry].smem_bytes if entry in steps else "-",
             steps[entry].block if entry in steps else "-") for entry, r in binary.entries.items()]
    header = ("entry", "registers", "spilled bytes", "shared bytes", "threads")
    facts = [f"config   {config}", f"target   {binary.target}, NVRTC {binary.nvrtc}",
             f"cubin    {len(binary.image)} bytes, sha256 {binary.sha256}"]
    return "\n".join([*facts, *(f"advisory {advisory}" for advisory in binary.advisories), "", table(header, rows)])
