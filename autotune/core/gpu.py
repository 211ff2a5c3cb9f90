"""Where to compute: `Gpu`, read from the device at hand or taken by name from the catalogue `gpus.yaml`.

Everything except timing works from a catalogue entry, so no module other than the launcher needs a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Mapping

CATALOGUE = Path(__file__).with_name("gpus.yaml")

# Every limit that a rule or an estimate may read. Units are in the names.
LIMIT_NAMES = (
    "smem_per_block_bytes",  # largest dynamic request after opt-in
    "smem_per_sm_bytes",
    "smem_reserved_bytes",  # taken by the system from each block's share
    "registers_per_sm",
    "threads_per_sm",
    "blocks_per_sm",
    "l2_bytes",
    "memory_bytes",
    "memory_clock_mhz",
    "bandwidth_gb_s",  # datasheet
    "sm_clock_mhz",  # boost
    "mma_flops_per_clock_sm",  # 16-bit mma.sync with fp32 accumulation, multiply-add = 2
    "tensor_flops_per_clock_sm",  # the same by the fastest instruction there is: wgmma on 9.0, tcgen05 on 10.0
    "fma_flops_per_clock_sm",  # fp32 on the CUDA cores
    "exp_per_clock_sm",  # special function unit
)


class GpuError(ValueError):
    """A GPU that is not there or not in the catalogue."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model. `name` is a label and a folder name; identity is `identity`, which is physical."""

    name: str
    title: str
    arch: int  # compute capability times ten: 90 for 9.0
    sms: int
    limits: Mapping[str, int]

    def __hash__(self):
        return hash(self.identity)

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """(arch, SMs, L2 bytes, memory clock in MHz): driver-given names are not stable, these are."""
        return self.arch, self.sms, self.limits["l2_bytes"], self.limits["memory_clock_mhz"]

    def __getitem__(self, limit: str) -> int:
        return self.limits[limit]

    @property
    def mma_tflops(self) -> float:
        return self.sms * self["mma_flops_per_clock_sm"] * self["sm_clock_mhz"] * 1e-6

    def roofline_us(self, flops: int, moved_bytes: int, tensor_cores: bool = True) -> float:
        """Microseconds that no kernel can beat at boost clock: `flops` at the arithmetic peak or `moved_bytes` at the
        datasheet's bandwidth, whichever takes longer."""
        per_clock = self["tensor_flops_per_clock_sm" if tensor_cores else "fma_flops_per_clock_sm"]
        return max(flops / (self.sms * per_clock * self["sm_clock_mhz"]), moved_bytes / (self["bandwidth_gb_s"] * 1e3))


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Gpu]:
    """Name -> `Gpu` for every model in gpus.yaml."""
    import yaml

    data = yaml.load(CATALOGUE.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    gpus = {}
    for name, entry in data["gpus"].items():
        limits = {**data["arch"][entry["arch"]], **{k: v for k, v in entry.items() if k not in ("title", "arch", "sms")}}
        missing = set(LIMIT_NAMES) ^ set(limits)
        if missing:
            raise GpuError(f"{CATALOGUE.name}: {name}: these limits are missing or unknown: {', '.join(sorted(missing))}")
        gpus[name] = Gpu(name, entry["title"], entry["arch"], entry["sms"], MappingProxyType(limits))
    return MappingProxyType(gpus)


def by_name(name: str) -> Gpu:
    """The catalogue's GPU called `name`. Raises `GpuError` listing the names there are."""
    try:
        return catalogue()[name]
    except KeyError:
        raise GpuError(f"no GPU is called {name!r}; known are {', '.join(catalogue())}. "
                       "A GPU that is present needs no name: leave --gpu out") from None


@lru_cache(maxsize=None)
def detect(device: int = 0) -> Gpu:
    """The GPU at CUDA index `device`. Raises `GpuError` with the reason if none can be used."""
    if not isinstance(device, int):
        raise GpuError(f"device is {device!r}; it must be the index of a CUDA device, an int")
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise GpuError(f"no GPU can be used because CuPy cannot be imported ({error}); "
                       "pip install 'cupy-cuda13x[ctk]' (driver 580 or newer) or 'cupy-cuda12x[ctk]'") from None
    try:
        properties = runtime.getDeviceProperties(device)
    except runtime.CUDARuntimeError as error:
        reason = error if runtime.driverGetVersion() else "there is no NVIDIA driver"
        raise GpuError(f"no GPU can be used: {reason}. `nvidia-smi` shows whether a driver is loaded; what "
                       "needs none takes a model of the catalogue (`autotune gpus`): --gpu NAME, in Python gpu=NAME") from None
    return from_properties(properties)


def from_properties(properties: Mapping) -> Gpu:
    """A `Gpu` from the dict that ``cupy.cuda.runtime.getDeviceProperties`` returns.

    Physical limits are the device's own; rates that the driver does not report come from the catalogue entry of
    the same identity, or else from the arch.
    """
    import yaml

    arch = 10 * properties["major"] + properties["minor"]
    title = properties["name"].decode() if isinstance(properties["name"], bytes) else properties["name"]
    bandwidth = 2 * properties["memoryClockRate"] * 1e3 * properties["memoryBusWidth"] / 8 / 1e9 \
        if properties.get("memoryClockRate") else 0
    measured = {
        "smem_per_block_bytes": properties["sharedMemPerBlockOptin"],
        "smem_per_sm_bytes": properties["sharedMemPerMultiprocessor"],
        "smem_reserved_bytes": properties.get("reservedSharedMemPerBlock", 0),
        "registers_per_sm": properties["regsPerMultiprocessor"],
        "threads_per_sm": properties["maxThreadsPerMultiProcessor"],
        "l2_bytes": properties["l2CacheSize"],
        "memory_bytes": properties["totalGlobalMem"],
    }
    same = [gpu for gpu in catalogue().values()
            if (gpu.arch, gpu.sms, gpu["l2_bytes"]) == (arch, properties["multiProcessorCount"], properties["l2CacheSize"])
            and abs(gpu["memory_bytes"] / properties["totalGlobalMem"] - 1) < 0.1]
    if same:
        limits = {**same[0].limits, **measured, "memory_bytes": same[0]["memory_bytes"]}
        return Gpu(same[0].name, title, arch, same[0].sms, MappingProxyType(limits))
    arch_limits = yaml.load(CATALOGUE.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["arch"]
    known = max((a for a in arch_limits if a <= arch), default=min(arch_limits))
    measured["memory_clock_mhz"] = properties.get("memoryClockRate", 0) // 1000
    measured["bandwidth_gb_s"] = round(bandwidth) or 500
    measured["sm_clock_mhz"] = properties.get("clockRate", 0) // 1000 or 1500
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or f"sm{arch}"
    return Gpu(slug, title, arch, properties["multiProcessorCount"],
               MappingProxyType({**arch_limits[known], **measured}))


def resolve(gpu: Gpu | str | None) -> Gpu:
    """`gpu` itself, the catalogue's GPU of that name, or the one at hand for None. Raises `GpuError`."""
    if gpu is None:
        return detect()
    if isinstance(gpu, str):
        return by_name(gpu)
    if not isinstance(gpu, Gpu):
        raise GpuError(f"gpu is {gpu!r}; it must be a Gpu, the name of one, such as {next(iter(catalogue()))}, or None for the "
                       "GPU at hand")
    return gpu
