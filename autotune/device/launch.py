"""Load a `Binary` on a device and launch its entries, on CuPy's driver handle and whatever stream the caller names.

    loaded = load(binary, device=0)
    for step in kernel.plan(problem, config):
        loaded.bound(step).launch(step.grid, stream, packer, fields)

A module is loaded once for each device and never unloaded by itself: a captured CUDA graph may hold its functions.
Measured cost of CuPy's own RawKernel call with 8 arguments is 6.0 us; one packed struct avoids most of it.
"""

from __future__ import annotations

import ctypes
import struct
import threading

from . import attributes
from ..kernels.base import Step

PARAMS_LIMIT_BYTES = 4096  # of a kernel's parameters, on every arch and driver
DEFAULT_SMEM_BYTES = 48 * 1024  # what a kernel may use without asking
DEFAULT_CLUSTER = 8  # blocks that a cluster may have without asking
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # a CUfunction_attribute, which CuPy does not name

_lock = threading.RLock()
_loaded: dict[tuple[str, int], Loaded] = {}
free: list[Params] = []  # that no launch packs or reads; list.pop and list.append are atomic


class LaunchError(RuntimeError):
    """The driver refused to load or to launch. `status` is its CUresult, or 0 if the driver was not asked."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Params:
    """One buffer for a packed Params struct, and the array of one pointer to it that cuLaunchKernel
    reads. Whoever takes one from `free`, or makes one, puts it there when its launches have been enqueued."""

    __slots__ = ("buffer", "address", "_keep")

    def __init__(self, size: int = PARAMS_LIMIT_BYTES):
        self.buffer = bytearray(size)
        view = (ctypes.c_char * size).from_buffer(self.buffer)  # also pins the bytearray's address
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(view))
        self.address = ctypes.addressof(pointers)
        self._keep = view, pointers


class Bound:
    """An entry of a loaded binary with its attributes set: what is left to choose is grid, stream and parameters."""

    __slots__ = ("entry", "block", "smem_bytes", "handle", "context", "_launch", "_current", "_set_current")

    def __init__(self, entry: str, block: int, smem_bytes: int, handle: int, context: int, driver, launch):
        self.entry, self.block, self.smem_bytes, self.handle, self.context = entry, block, smem_bytes, handle, context
        self._launch, self._current, self._set_current = launch, driver.ctxGetCurrent, driver.ctxSetCurrent

    def launch(self, grid: int, stream: int, packer: struct.Struct, fields) -> None:
        """Launches `grid` blocks on `stream` (a cudaStream_t as int; 0 is the legacy default stream) with `fields` packed as
        `packer` says. Asynchronous. Raises `LaunchError`."""
        try:
            params = free.pop()
        except IndexError:
            params = Params()
        packer.pack_into(params.buffer, 0, *fields)
        self.enqueue(grid, stream, params.address)
        free.append(params)

    def enqueue(self, grid: int, stream: int, address: int) -> None:
        """The same with `Params` that are packed, by their `address`: the driver copies them before it returns.

        The kernel's context is made current for the call, so the caller's current device does not matter.
        """
        try:
            previous = self._current()
            if previous == self.context:
                self._launch(self.handle, grid, 1, 1, self.block, 1, 1, self.smem_bytes, stream, address, 0)
                return
            self._set_current(self.context)
            try:
                self._launch(self.handle, grid, 1, 1, self.block, 1, 1, self.smem_bytes, stream, address, 0)
            finally:
                self._set_current(previous)
        except RuntimeError as error:  # CUDADriverError, or CuPy's RuntimeError if libcuda cannot be loaded
            raise LaunchError(f"launch of {self.entry} with {grid} blocks of {self.block} threads and {self.smem_bytes} bytes "
                              f"of shared memory failed: {error}", getattr(error, "status", 0)) from error


class Loaded:
    """A binary on one device. Create it with `load`."""

    def __init__(self, binary, device: int):
        self.binary = binary
        self.device = device
        self._driver = _cupy()[0]
        self._modules: list[int] = []
        self._handles: dict[tuple[str, int], int] = {}
        self._largest: dict[int, int] = {}  # function handle -> dynamic shared memory it may ask for
        self._large_clusters: set[int] = set()  # function handles that may be launched in more than DEFAULT_CLUSTER blocks
        self._bound: dict[tuple, Bound] = {}
        self.context = self._in_context(self._driver.ctxGetCurrent)

    def bound(self, step: Step) -> Bound:
        """`step`'s entry, allowed its shared memory and carve-out on this device. Raises `LaunchError`."""
        key = _bound_key(step)
        bound = self._bound.get(key)
        if bound is None:
            with _lock:
                bound = self._bound.get(key) or self._in_context(lambda: self._bind(*key))
                self._bound[key] = bound
        return bound

    def unload(self) -> None:
        """Frees the device's copy. For tuning, where thousands of binaries pass by: nothing of it may run any more."""
        with _lock:
            _loaded.pop((self.binary.sha256, self.device), None)
            self._bound.clear()
            self._handles.clear()
            self._largest.clear()
            self._large_clusters.clear()
            modules, self._modules = self._modules, []
            if modules:
                self._in_context(lambda: [self._driver.moduleUnload(module) for module in modules])

    def _bind(self, entry: str, block: int, smem_bytes: int, carveout: int, early: bool, cluster: int) -> Bound:
        driver = self._driver
        handle = self._handles.get((entry, carveout))
        if handle is None:
            # A carve-out belongs to a function, not to a launch. Another one gets its own copy of the module, so that
            # no launch has to change state that a launch on another thread relies on.
            module = driver.moduleLoadData(self.binary.image)
            self._modules.append(module)
            handle = driver.moduleGetFunction(module, entry)
            driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, handle)  # loads it now: lazy loading fails in a capture
            if carveout >= 0:
                driver.funcSetAttribute(handle, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout)
            self._handles[entry, carveout] = handle
        if smem_bytes > self._largest.get(handle, DEFAULT_SMEM_BYTES):
            driver.funcSetAttribute(handle, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
            self._largest[handle] = smem_bytes
        if cluster > DEFAULT_CLUSTER and handle not in self._large_clusters:
            driver.funcSetAttribute(handle, NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
            self._large_clusters.add(handle)
        launch = attributes.launcher(driver, early, cluster) if early or cluster > 1 else driver.launchKernel
        return Bound(entry, block, smem_bytes, handle, self.context, driver, launch)

    def _in_context(self, action):
        """`action()` with this device current and errors translated."""
        try:
            return on_device(self.device, lambda _: action())
        except RuntimeError as error:
            raise LaunchError(f"binary {self.binary.sha256[:12]} for {self.binary.target} cannot be used on CUDA device "
                              f"{self.device}: {error}", getattr(error, "status", 0)) from error


def load(binary, device: int = 0) -> Loaded:
    """`binary` on CUDA device `device`, loaded once. Raises `LaunchError` if CuPy or a GPU is missing."""
    key = binary.sha256, device
    loaded = _loaded.get(key)
    if loaded is None:
        with _lock:
            loaded = _loaded.get(key)
            if loaded is None:
                loaded = _loaded[key] = Loaded(binary, device)
    return loaded


def ready(binary, device: int, steps: list[Step]) -> bool:
    """Whether `binary` has been loaded on `device` with every entry of `steps` bound, so that a launch loads nothing."""
    loaded = _loaded.get((binary.sha256, device))
    return loaded is not None and all(_bound_key(step) in loaded._bound for step in steps)


def on_device(device: int, action):
    """`action(runtime)`, CuPy's binding of the CUDA runtime, with `device` current, and the caller's device restored."""
    runtime = _cupy()[1]
    previous = runtime.getDevice()
    runtime.setDevice(device)
    try:
        runtime.free(0)  # creates the primary context where setDevice does not yet
        return action(runtime)
    finally:
        runtime.setDevice(previous)


def current_device() -> int:
    """The calling thread's current CUDA device. Raises `LaunchError` if there is none."""
    try:
        return _cupy()[1].getDevice()
    except RuntimeError as error:
        raise LaunchError(f"there is no current CUDA device: {error}", getattr(error, "status", 0)) from error


def _bound_key(step: Step) -> tuple[str, int, int, int, bool, int]:
    return step.entry, step.block, step.smem_bytes, step.carveout, step.dependent, step.cluster


def _cupy():
    """CuPy's bindings of the CUDA driver and runtime, imported when first needed."""
    try:
        from cupy_backends.cuda.api import driver, runtime
    except ImportError as error:
        raise LaunchError(f"kernels cannot be launched because CuPy cannot be imported ({error}); "
                          "pip install 'cupy-cuda13x[ctk]' (driver 580 or newer) or 'cupy-cuda12x[ctk]'") from None
    return driver, runtime
