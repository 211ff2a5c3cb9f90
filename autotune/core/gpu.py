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

from .imports import CupyMissing, cupy_part
from .reading import ReadError, load_yaml, quoted, read_text

CATALOGUE = Path(__file__).with_name("gpus.yaml")
MAX_BYTES = 1 << 20
SAME_CLOCK = 0.005  # an L40 has 1.2 % less than an L40S; drivers report whole MHz

# cudaDeviceAttr: kHz and bits.
_ATTRIBUTES = {"clockRate": 13, "memoryClockRate": 36, "memoryBusWidth": 37}

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

    def __reduce__(self):  # a mapping proxy neither pickles nor copies
        return _rebuilt, (self.name, self.title, self.arch, self.sms, dict(self.limits))

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


def _rebuilt(name: str, title: str, arch: int, sms: int, limits: dict[str, int]) -> Gpu:
    return Gpu(name, title, arch, sms, MappingProxyType(limits))


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Gpu]:
    """Name -> `Gpu` for every model in gpus.yaml. Raises `GpuError` if that file cannot be used."""
    data = _catalogue_file()
    gpus = {}
    for name, entry in data["gpus"].items():
        limits = {**data["arch"][entry["arch"]], **{k: v for k, v in entry.items() if k not in ("title", "arch", "sms")}}
        missing = set(LIMIT_NAMES) ^ set(limits)
        if missing:
            raise GpuError(f"{CATALOGUE.name}: {name}: these limits are missing or unknown: {', '.join(sorted(missing))}")
        gpus[name] = Gpu(name, entry["title"], entry["arch"], entry["sms"], MappingProxyType(limits))
    return MappingProxyType(gpus)


@lru_cache(maxsize=1)
def _catalogue_file() -> Mapping:
    try:
        return load_yaml(read_text(CATALOGUE, MAX_BYTES))
    except (FileNotFoundError, ReadError) as error:
        raise GpuError(f"{CATALOGUE}: {error}; install autotune again") from None


def by_name(name: str) -> Gpu:
    """The catalogue's GPU called `name`. Raises `GpuError` listing the names there are."""
    try:
        return catalogue()[name]
    except (KeyError, TypeError):
        raise GpuError(f"no GPU is called {quoted(name)}; known are {', '.join(catalogue())}. "
                       "A GPU that is present needs no name: leave --gpu out") from None


@lru_cache(maxsize=None)
def detect(device: int = 0) -> Gpu:
    """The GPU at CUDA index `device`. Raises `GpuError` with the reason if none can be used."""
    if not isinstance(device, int) or not 0 <= device < 2**31:
        raise GpuError(f"device is {quoted(device)}; it must be the index of a CUDA device, an int")
    try:
        runtime = cupy_part("cuda.runtime")
    except CupyMissing as error:
        raise GpuError(f"no GPU can be used: {error}") from None
    try:
        properties = _with_clocks(runtime.getDeviceProperties(device), runtime, device)
    except runtime.CUDARuntimeError as error:
        reason = error if runtime.driverGetVersion() else "there is no NVIDIA driver"
        raise GpuError(f"no GPU can be used: {reason}. `nvidia-smi` shows whether a driver is loaded; what "
                       "needs none takes a model of the catalogue (`autotune gpus`): --gpu NAME, in Python gpu=NAME") from None
    return from_properties(properties)


def _with_clocks(properties: Mapping, runtime, device: int) -> dict:
    """`properties` with what CUDA 13 no longer says there, but still as attributes of the device."""
    properties = dict(properties)
    for name, attribute in _ATTRIBUTES.items():
        if not properties.get(name):
            try:
                properties[name] = runtime.deviceGetAttribute(attribute, device)
            except runtime.CUDARuntimeError:
                continue
    return properties


def from_properties(properties: Mapping) -> Gpu:
    """A `Gpu` from the dict that ``cupy.cuda.runtime.getDeviceProperties`` returns.

    Physical limits are the device's own; rates that the driver does not report come from the catalogue entry of
    the same identity, or else from the arch.
    """
    arch = 10 * properties["major"] + properties["minor"]
    title = properties["name"].decode(errors="replace") if isinstance(properties["name"], bytes) else properties["name"]
    measured = {
        "smem_per_block_bytes": properties["sharedMemPerBlockOptin"],
        "smem_per_sm_bytes": properties["sharedMemPerMultiprocessor"],
        "smem_reserved_bytes": properties.get("reservedSharedMemPerBlock", 0),
        "registers_per_sm": properties["regsPerMultiprocessor"],
        "threads_per_sm": properties["maxThreadsPerMultiProcessor"],
        "l2_bytes": properties["l2CacheSize"],
        "memory_bytes": properties["totalGlobalMem"],
    }
    sms = properties["multiProcessorCount"]
    chip = [gpu for gpu in catalogue().values() if (gpu.arch, gpu.sms, gpu["l2_bytes"]) == (arch, sms, measured["l2_bytes"])]
    for gpu in chip:
        if _is_board(gpu, properties):
            limits = {**gpu.limits, **measured, "memory_bytes": gpu["memory_bytes"]}
            return Gpu(gpu.name, title, arch, sms, MappingProxyType(limits))
    known = dict(chip[0].limits) if chip else _limits_of_arch(arch)
    known |= {**measured, **_clocks(properties, known if chip else {})}
    identity = arch, sms, measured["l2_bytes"], known["memory_clock_mhz"]
    return Gpu(_label(title, identity), title, arch, sms, MappingProxyType(known))


def _is_board(gpu: Gpu, properties: Mapping) -> bool:
    """Whether a device of this chip is also the catalogue's board: boards of one chip differ in memory and clocks, and
    with them in bandwidth and arithmetic (RTX 6000 Ada, L40 and L40S; A100 for PCIe and SXM).
    A clock that is not reported decides nothing."""
    clocks = {"memory_clock_mhz": properties.get("memoryClockRate"), "sm_clock_mhz": properties.get("clockRate")}
    return abs(gpu["memory_bytes"] / properties["totalGlobalMem"] - 1) < 0.1 and \
        all(abs(khz / 1000 / gpu[name] - 1) < SAME_CLOCK for name, khz in clocks.items() if khz)


def _clocks(properties: Mapping, chip: Mapping[str, int]) -> dict[str, int]:
    """Clocks and bandwidth of a board that is not in the catalogue; `chip` has those of another board of its chip, or nothing."""
    memory_mhz, sm_mhz = properties.get("memoryClockRate", 0) // 1000, properties.get("clockRate", 0) // 1000
    if memory_mhz and properties.get("memoryBusWidth"):
        bandwidth = 2 * memory_mhz * 1e6 * properties["memoryBusWidth"] / 8 / 1e9
    elif chip:
        bandwidth = chip["bandwidth_gb_s"] * (memory_mhz or chip["memory_clock_mhz"]) / chip["memory_clock_mhz"]
    else:
        bandwidth = 0
    return {"memory_clock_mhz": memory_mhz or chip.get("memory_clock_mhz", 0), "bandwidth_gb_s": round(bandwidth) or 500,
            "sm_clock_mhz": sm_mhz or chip.get("sm_clock_mhz", 1500)}


def _limits_of_arch(arch: int) -> dict[str, int]:
    """What gpus.yaml says of `arch`, or of the newest one before it."""
    archs = _catalogue_file()["arch"]
    return dict(archs[max((known for known in archs if known <= arch), default=min(archs))])


def _label(title: str, identity: tuple[int, int, int, int]) -> str:
    """A folder's name for what is not in the catalogue; never the name of another GPU that is."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:48].strip("-") or f"sm{identity[0]}"
    if slug in catalogue() and catalogue()[slug].identity != identity:
        _, sms, l2_bytes, memory_clock_mhz = identity
        slug += f"-{sms}sm-{l2_bytes >> 20}mib-{memory_clock_mhz}mhz"
    return slug


def resolve(gpu: Gpu | str | None) -> Gpu:
    """`gpu` itself, the catalogue's GPU of that name, or the one at hand for None. Raises `GpuError`."""
    if gpu is None:
        return detect()
    if isinstance(gpu, str):
        return by_name(gpu)
    if not isinstance(gpu, Gpu):
        raise GpuError(f"gpu is {quoted(gpu)}; it must be a Gpu, the name of one, such as {next(iter(catalogue()))}, or None "
                       f"for the "
                       "GPU at hand")
    return gpu
