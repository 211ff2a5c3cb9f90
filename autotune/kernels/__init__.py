"""The kernels, in the order in which they are preferred."""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping

from ..core.config import Config, ConfigError, parse_values
from ..core.gpu import Gpu
from ..core.problem import Problem
from ..core.reading import quoted
from .backward.mma import BackwardMma
from .backward.fused import BackwardFused
from .backward.wgmma import BackwardWgmma
from .base import Kernel
from .decode.mma import DecodeMma
from .forward.mma import ForwardMma
from .forward.simt import ForwardSimt
from .forward.wgmma import ForwardWgmma

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (ForwardWgmma(), ForwardMma(), ForwardSimt(), DecodeMma(),
                                                           BackwardFused(), BackwardWgmma(), BackwardMma())}


def kernel_of(config: Config) -> Kernel:
    return KERNELS[config.kernel]


def candidates(problem: Problem, gpu: Gpu) -> list[Kernel]:
    """The kernels that can serve `problem` on `gpu`, preferred first."""
    return [kernel for kernel in KERNELS.values() if kernel.reject(problem, gpu) is None]


def as_called(problem: Problem, gpu: Gpu) -> Problem:
    """What a call computes for `problem`: itself, or, of decode steps that no decode kernel can serve (a head dim of 512), the
    forward problem over pages by which `attention_with_kvcache` serves them. That one is verified, timed and recorded then."""
    if problem.op != "decode" or candidates(problem, gpu):
        return problem
    pages = problem.page_size or max(problem.seqlen_k, 1)
    forward = replace(problem, op="forward", kv="paged", page_size=pages, packed_queries=False)
    return forward if candidates(forward, gpu) else problem


def refusals(problem: Problem, gpu: Gpu) -> dict[str, str]:
    """Kernel name -> why it cannot serve `problem` on `gpu`."""
    return {kernel.name: reason for kernel in KERNELS.values() if (reason := kernel.reject(problem, gpu))}


def default_config(problem: Problem, gpu: Gpu) -> Config:
    """The config for when nothing is known. Raises `ConfigError` with every kernel's reason if none can serve."""
    able = candidates(problem, gpu)
    for kernel in [kernel for kernel in able if kernel.preferred(problem, gpu)] or able:
        return kernel.default(problem, gpu)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals(problem, gpu).items())
    raise ConfigError(f"no kernel can serve {problem} on {gpu.name}: {reasons}")


def config_from_dict(raw: Mapping[str, object], where: str) -> Config:
    """A config from its YAML form. Raises `ConfigError` unless every value is a legal one of a declared parameter."""
    if not isinstance(raw, Mapping) or not all(isinstance(name, str) for name in raw):
        raise ConfigError(f"{where}: a config is a mapping of parameter names to values")
    values = dict(raw)
    name = values.pop("kernel", None)
    if not isinstance(name, str) or name not in KERNELS:
        raise ConfigError(f"{where}: kernel is {quoted(name)}; known are {', '.join(KERNELS)}")
    return KERNELS[name].typed_config(values, where)


def config_from_text(text: str) -> Config:
    """A config from its one-line form. Raises `ConfigError` as `config_from_dict` does."""
    kernel, values = parse_values(text)
    return config_from_dict({"kernel": kernel, **values}, f"config {quoted(text, 300)}")
