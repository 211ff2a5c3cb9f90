"""Launches with attributes (sm_90 and later): a kernel that may be put in place before the kernels before it in the stream have
ended, and waits for them itself (programmatic dependent launch), and one whose blocks run in clusters.

CuPy's binding of the driver has only cuLaunchKernel, which takes no attributes; cuLaunchKernelEx is called through ctypes, with
arguments that are made ahead, because making them costs more than the call. Captured into a CUDA graph, the launch is joined to
a kernel before it by a programmatic edge, so that a replay overlaps them too.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

CONFIG = struct.Struct("@7IPPI0P")  # CUlaunchConfig: grid, block, shared memory in bytes; stream; attributes, how many
ATTRIBUTE = struct.Struct("@i4xi60x")  # CUlaunchAttribute: id, value
CLUSTER_ATTRIBUTE = struct.Struct("@i4x3I52x")  # one of which the value is x, y, z
CLUSTER_DIMENSION = 4  # a CUlaunchAttributeID; CUDA 11.8 and later
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a CUlaunchAttributeID; CUDA 11.8 and later

_calls: list[_Call] = []  # free ones; list.pop and list.append are atomic


class _Call:
    """The arguments of one driver call: a CUlaunchConfig, which the driver reads before it returns, and what points to it."""

    __slots__ = ("config", "config_at", "function", "params")

    def __init__(self):
        self.config = (ctypes.c_char * CONFIG.size)()
        self.config_at = ctypes.byref(self.config)
        self.function, self.params = ctypes.c_void_p(), ctypes.c_void_p()


def launcher(driver, early: bool, cluster: int = 1):
    """A function that takes what `driver.launchKernel` of CuPy takes, and raises what that raises. `early`: as a dependent
    launch; `cluster`: in clusters of so many blocks. Raises `RuntimeError` if the CUDA driver has no cuLaunchKernelEx."""
    driver_launch = _driver_launch()
    values = b""
    if early:
        values += ATTRIBUTE.pack(PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    if cluster > 1:
        values += CLUSTER_ATTRIBUTE.pack(CLUSTER_DIMENSION, cluster, 1, 1)
    attributes, count = ctypes.create_string_buffer(values, len(values)), len(values) // ATTRIBUTE.size
    attributes_at = ctypes.addressof(attributes)

    def launch_kernel(function: int, grid_x: int, grid_y: int, grid_z: int, block_x: int, block_y: int, block_z: int,
                      smem_bytes: int, stream: int, params: int, extra: int) -> None:
        try:
            call = _calls.pop()
        except IndexError:
            call = _Call()
        try:
            CONFIG.pack_into(call.config, 0, grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes, stream,
                             attributes_at, count)
            call.function.value, call.params.value = function, params
            if status := driver_launch(call.config_at, call.function, call.params, None):
                driver.check_status(status)
        finally:
            _calls.append(call)

    launch_kernel.attributes = attributes  # which must live as long
    return launch_kernel


@lru_cache(maxsize=1)
def _driver_launch():
    try:
        return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver has no cuLaunchKernelEx ({error}); one of CUDA 11.8 or newer has") from None
