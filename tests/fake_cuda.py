"""CuPy's CUDA bindings, faked: loads anything, and at a launch copies the parameters as the driver does."""

import ctypes
import threading


class FakeError(RuntimeError):
    status = 701


class FakeCuda:
    """Stands for CuPy's driver and runtime: counts calls, copies parameters at launch as the real one does."""

    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

    def __init__(self):
        self.device, self.thread, self.launches, self.attributes, self.unloaded = 0, threading.local(), [], [], []
        self.modules, self.fail, self.params = [], None, b""

    def getDevice(self):
        return self.device

    def setDevice(self, device):
        self.device, self.thread.context = device, 1000 + device

    def free(self, pointer):
        assert pointer == 0

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
