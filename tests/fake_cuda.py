"""CuPy's CUDA bindings, faked: loads anything, and at a launch copies the parameters as the driver does."""

import ctypes
import struct
import threading


class FakeError(RuntimeError):
    status = 701


class LaunchAttribute(ctypes.Structure):
    """cuda.h's CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class LaunchConfig(ctypes.Structure):
    """cuda.h's CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint)]


class FakeCuda:
    """Stands for CuPy's driver and runtime: counts calls, copies parameters at launch as the real one does."""

    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

    def __init__(self):
        self.device, self.thread, self.launches, self.attributes, self.unloaded = 0, threading.local(), [], [], []
        self.modules, self.fail, self.params, self.dependent, self.clusters = [], None, b"", 0, []
        self.memory, self.unfinished = [], set()  # (device, what malloc gave), streams with work that was not waited for

    def getDevice(self):
        return self.device

    def setDevice(self, device):
        self.device, self.thread.context = device, 1000 + device

    def free(self, pointer):
        assert pointer == 0

    def malloc(self, size):
        self.memory.append((self.device, ctypes.create_string_buffer(b"\xff" * size, size)))
        return ctypes.addressof(self.memory[-1][1])

    def memsetAsync(self, pointer, value, size, stream):
        ctypes.memset(pointer, value, size)
        self.unfinished.add(stream)

    def streamCreateWithFlags(self, flags):
        return 500 + flags

    def streamSynchronize(self, stream):
        self.unfinished.discard(stream)

    def streamDestroy(self, stream):
        assert stream not in self.unfinished

    def ctxGetCurrent(self):
        return getattr(self.thread, "context", 0)

    def ctxSetCurrent(self, context):
        self.thread.context = context

    def moduleLoadData(self, image):
        assert type(image) is bytes
        if self.fail == "load":
            raise FakeError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image")
        self.modules.append(self.ctxGetCurrent())
        return len(self.modules)

    def moduleUnload(self, module):
        self.unloaded.append(module)

    def moduleGetFunction(self, module, name):
        return 100 * module

    def funcGetAttribute(self, attribute, function):
        return 32

    def funcSetAttribute(self, function, attribute, value):
        self.attributes.append((function, attribute, value))

    def launchKernel(self, *arguments):
        assert len(arguments) == 11 and all(type(argument) is int for argument in arguments)
        if self.fail == "launch":
            raise FakeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources")
        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        self.launches.append((self.ctxGetCurrent(), *arguments[:9], ctypes.string_at(pointer, 1024)))

    def launchKernelEx(self, config, function, params, extra):
        """Stands for the driver's, which is called through ctypes."""
        config = LaunchConfig.from_buffer_copy(config._obj)
        attributes = {a.id: (a.value, *struct.unpack_from("2i", bytes(a)[12:])) for a in config.attributes[:config.count]}
        assert len(attributes) == config.count > 0 and extra is None
        cluster, *rest = attributes.pop(4, (1, 1, 1))
        early = bool(attributes)
        assert rest == [1, 1] and config.grid[0] % cluster == 0 and attributes in ({}, {6: (1, 0, 0)})
        try:
            self.launchKernel(function.value, *config.grid, *config.block, config.smem_bytes, config.stream or 0, params.value, 0)
        except FakeError as error:
            return error.status
        self.dependent += early
        self.clusters.append(cluster)
        return 0

    def check_status(self, status):
        if status:
            raise FakeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many resources")
