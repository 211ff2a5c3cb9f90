"""What a time depends on besides the kernel: driver, CUDA and NVRTC versions, the SM clock, other processes on the GPU."""

from __future__ import annotations

import time as clock
from functools import lru_cache


def sm_clock_mhz() -> int | None:
    """The current device's SM clock now, or None if the driver's management library cannot be asked."""
    handle = _nvml_handle()
    if handle is None:
        return None
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    except pynvml.NVMLError:
        return None


def conditions() -> dict[str, object]:
    """What else a time depends on: driver, CUDA and NVRTC versions, other processes on the GPU. Without what cannot be asked."""
    from ..cuda.compile import nvrtc_version

    found: dict[str, object] = {**_versions(), "nvrtc": nvrtc_version()}
    if (others := _other_processes()) is not None:
        found["other_processes"] = others
    return found


_processes: tuple[float, int | None] = (-1.0, None)


def _other_processes() -> int | None:
    """Other processes that compute on the device, asked at most once a second: it takes a few milliseconds."""
    global _processes
    if _processes[0] < 0 or clock.monotonic() - _processes[0] > 1:
        _processes = clock.monotonic(), _count_processes()
    return _processes[1]


def _count_processes() -> int | None:
    handle = _nvml_handle()
    if handle is None:
        return None
    import pynvml

    try:
        # In a container the driver knows this process by another number, so it counts as one of them, whichever it is.
        return max(0, len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) - 1)
    except pynvml.NVMLError:
        return None


@lru_cache(maxsize=1)
def _versions() -> dict[str, object]:
    from cupy.cuda import runtime

    found: dict[str, object] = {"cuda": _dotted(runtime.driverGetVersion())}
    if _nvml_handle() is not None:
        import pynvml

        try:
            driver = pynvml.nvmlSystemGetDriverVersion()
            found["driver"] = driver.decode() if isinstance(driver, bytes) else driver
        except pynvml.NVMLError:
            pass
    return found


def _nvml_handle():
    from cupy.cuda import runtime

    return _nvml_handle_of(runtime.getDevice())


@lru_cache(maxsize=None)
def _nvml_handle_of(device: int):
    """NVML numbers devices its own way; the PCI bus id is what both know. None if there is no NVML."""
    from cupy.cuda import runtime

    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByPciBusId(runtime.deviceGetPCIBusId(device).encode())
    except Exception:  # not installed, no library, no permission: clocks are then not recorded
        return None


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
