"""Arrays of CuPy and torch, read by their attributes, and outputs allocated by the library the inputs came from.

DLPack costs 26 us a tensor, so it is only the way in for other libraries. Each adapter below reads an array of four
dimensions as one flat tuple,

    pointer, shape, stride 0, stride 1, stride 2, stride 3, dtype, device index        (strides in elements)

raises AttributeError or ValueError if it cannot, and does the few operations that a call may need besides the kernel.
Nothing here imports torch or CuPy before an array of theirs has been seen.
"""

from __future__ import annotations

from ..kernels.forward.base import SINK_DTYPES
from .capture import is_capturing, stream_key  # noqa: F401  asked beside an adapter
from .tracing import Traced, dispatches, loaded_torch

DTYPE_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DLPACK_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged


class AttentionError(ValueError):
    """A call that cannot be served, with a sentence that says which argument is wrong, or what to do."""


class TorchArrays(Traced):
    """torch.Tensor and its subclasses."""

    name = "torch"

    def __init__(self):
        import torch

        super().__init__(torch)
        self.torch = torch
        self.dtypes = {getattr(torch, name): short for name, short in DTYPE_NAMES.items()}
        self.sink_dtypes = {getattr(torch, name): code for name, code in SINK_DTYPES.items()}
        self.float32, self.int32 = torch.float32, torch.int32
        self.pointer = torch.Tensor.data_ptr
        self.cache_dtypes = {torch.float8_e4m3fn: "e4m3"} if hasattr(torch, "float8_e4m3fn") else {}
        # Of a device index; what torch's own generated code calls. A torch without CUDA lacks it, and has no CUDA tensors.
        self.stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.grad_enabled = torch.is_grad_enabled
        self.forward_mode = lambda: torch.autograd.forward_ad._current_level >= 0  # tangents show in no attribute of a tensor
        try:  # also what generated code calls: it goes round the dispatcher, and allocates on the current device
            self._empty_strided, self._current_device = torch._C._dynamo.guards._empty_strided_cuda, torch._C._cuda_getDevice
        except AttributeError:
            self._current_device = lambda: None

    def read(self, array):
        stride0, stride1, stride2, stride3 = array.stride()
        return array.data_ptr(), array.shape, stride0, stride1, stride2, stride3, array.dtype, array.get_device()

    def vector(self, array):
        """(pointer, shape, strides, dtype, device index) of an array of any rank."""
        return array.data_ptr(), tuple(array.shape), array.stride(), array.dtype, array.get_device()

    def form(self, array) -> tuple:
        """All that a call must know of an array besides its address."""
        return type(array), array.shape, array.stride(), array.dtype, array.get_device()

    def forms(self, q, k, v) -> tuple:
        """The same of three."""
        return (q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(),
                v.shape, v.stride(), v.dtype, v.get_device())

    def empty(self, like, shape):
        return like.new_empty(shape)

    def dense(self, like, device: int, shape: tuple, strides: tuple):
        """The same with C order's `strides`, on the `device` of `like`: 2 us less."""
        if device == self._current_device():
            return self._empty_strided(shape, strides, like.dtype)
        return like.new_empty(shape)

    def empty_float32(self, like, shape):
        return like.new_empty(shape, dtype=self.float32)

    def workspace(self, like, floats: int, capturing: bool):
        """float32 values that a launch uses and nobody after it; a graph that is being captured has torch's own pool for them.
        Nothing may keep them: torch refuses a graph whose pool holds more than its outputs."""
        return like.new_empty((floats,), dtype=self.float32)

    def steps_int32(self, like, count: int, step: int):
        """0, step, 2 * step, ... as (count,) int32."""
        return self.torch.arange(count, dtype=self.int32, device=like.device) * step

    def by_sequence(self, lse, batch: int):
        """An lse (1, heads, batch * queries) as (batch, heads, queries), a copy."""
        return lse.view(lse.shape[1], batch, -1).transpose(0, 1).contiguous()

    def on_host(self, array):
        """A copy as a numpy array, of integers. Waits for the device."""
        return array.cpu().numpy()

    def packed(self, array):
        """A copy in C order at an aligned address."""
        return array.detach().clone(memory_format=self.torch.contiguous_format)

    def as_float32(self, array):
        """A copy in C order, unless it is one."""
        return array.detach().to(self.float32).contiguous()

    def negated(self, array):
        return array.detach().neg()

    def assign(self, target, source) -> None:
        target.detach().copy_(source)

    def zero(self, array) -> None:
        array.detach().zero_()

    def fill_lse(self, lse, sinks) -> None:
        """LSE of rows that see no key: that of the sink alone, or -inf."""
        if sinks is None:
            lse.fill_(float("-inf"))
        else:
            lse.copy_(sinks.detach().view(1, -1, 1))


class TorchSubclassArrays(TorchArrays):
    """Tensors that stand for others (of fake memory, of several devices): only torch's dispatcher can take them apart."""

    always = True


class CupyArrays:
    """cupy.ndarray; methods are as `TorchArrays` has them. Data moves as unsigned integers of the same size: CuPy's own bfloat16
    needs a recent NumPy."""

    name = "cupy"

    def __init__(self):
        import cupy
        from cupy_backends.cuda.api import runtime

        self.cupy = cupy
        self.dtypes, self.sink_dtypes = {}, {}
        for name in SINK_DTYPES:
            dtype = _numpy_dtype(name)
            if dtype is not None:
                self.sink_dtypes[dtype] = SINK_DTYPES[name]
                if name in DTYPE_NAMES:
                    self.dtypes[dtype] = DTYPE_NAMES[name]
        self.float32, self.int32 = cupy.dtype("float32"), cupy.dtype("int32")
        self.cache_dtypes = {cupy.dtype("uint8"): "e4m3"}  # the bytes of float8_e4m3fn, which CuPy lacks
        self._ndarray, self._current_device, self._stream = cupy.ndarray, runtime.getDevice, cupy.cuda.get_current_stream
        self._captured: list[object] = []  # workspaces that captured graphs point into

    def traced(self) -> bool:
        return False

    grad_enabled = traced

    def read(self, array):
        stride0, stride1, stride2, stride3 = array.strides
        data, size = array.data, array.itemsize
        return (data.ptr, array.shape, stride0 // size, stride1 // size, stride2 // size, stride3 // size, array.dtype,
                data.device_id)

    def vector(self, array):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        return array.data.ptr, array.shape, strides, array.dtype, array.data.device_id

    def form(self, array) -> tuple:
        return type(array), array.shape, array.strides, array.dtype, array.data.device_id

    def forms(self, q, k, v) -> tuple:
        return self.form(q), self.form(k), self.form(v)

    def stream(self, device: int) -> int:
        return self._stream(device).ptr

    def empty(self, like, shape):
        return self._allocate(like.data.device_id, shape, like.dtype)

    def dense(self, like, device: int, shape: tuple, strides: tuple):
        return self._allocate(device, shape, like.dtype)

    def empty_float32(self, like, shape):
        return self._allocate(like.data.device_id, shape, self.float32)

    def workspace(self, like, floats: int, capturing: bool):
        """float32 values that a launch uses and nobody after it. A captured launch keeps them for good: it may be replayed at any
        time, and CuPy's pool would give them to others."""
        array = self._allocate(like.data.device_id, (floats,), self.float32)
        if capturing:
            self._captured.append(array)
        return array

    def steps_int32(self, like, count: int, step: int):
        with self.cupy.cuda.Device(like.data.device_id):
            return self.cupy.arange(count, dtype=self.int32) * self.int32.type(step)

    def by_sequence(self, lse, batch: int):
        with self.cupy.cuda.Device(lse.data.device_id):
            return lse.reshape(lse.shape[1], batch, -1).transpose(1, 0, 2).copy()

    def on_host(self, array):
        return array.get()

    def pointer(self, array) -> int:
        return array.data.ptr

    def packed(self, array):
        with self.cupy.cuda.Device(array.data.device_id):
            return self._bits(array).copy(order="C").view(array.dtype)

    def as_float32(self, array):
        with self.cupy.cuda.Device(array.data.device_id):
            if array.dtype.name == "bfloat16":  # the upper half of a float32
                return (self._bits(array).astype("uint32", order="C") << 16).view("float32")
            return array.astype("float32", order="C", copy=False)

    def negated(self, array):
        bits = self._bits(array)
        with self.cupy.cuda.Device(array.data.device_id):
            return (bits ^ bits.dtype.type(1 << 8 * array.itemsize - 1)).view(array.dtype)

    def assign(self, target, source) -> None:
        with self.cupy.cuda.Device(target.data.device_id):
            self._bits(target)[...] = self._bits(source)

    def zero(self, array) -> None:
        with self.cupy.cuda.Device(array.data.device_id):
            self._bits(array).fill(0)

    def fill_lse(self, lse, sinks) -> None:
        with self.cupy.cuda.Device(lse.data.device_id):
            if sinks is None:
                lse.fill(float("-inf"))
            else:
                lse[...] = self.as_float32(sinks)[None, :, None]

    def _allocate(self, device: int, shape, dtype):
        if device == self._current_device():
            return self._ndarray(shape, dtype)
        with self.cupy.cuda.Device(device):
            return self._ndarray(shape, dtype)

    def _bits(self, array):
        return array.view(f"uint{8 * array.itemsize}")


class OtherArrays:
    """Arrays that only speak DLPack: they come in as CuPy arrays that share their memory."""

    name = "dlpack"

    def to_cupy(self, array, name: str):
        """`array` as a cupy.ndarray, ordered after its producer's work on CuPy's current stream. Raises `AttentionError`."""
        if isinstance(array, type) or not hasattr(array, "__dlpack__"):
            raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of CuPy, torch or another library "
                                 "with __dlpack__, on a CUDA GPU")
        try:
            kind = array.__dlpack_device__()[0]
        except Exception as error:  # of whatever library it is
            raise AttentionError(f"{name} is a {_type_name(array)} without memory to read ({error!r}); call outside of a "
                                 "tracer") from None
        if kind not in DLPACK_CUDA_DEVICES:
            raise AttentionError(f"{name} is a {_type_name(array)} in host memory; it must be on a CUDA GPU")
        try:
            import cupy

            return cupy.from_dlpack(array)
        except Exception as error:
            raise AttentionError(f"{name} is a {_type_name(array)} that cannot be shared ({error!r})") from None

    def if_given(self, array, name: str):
        return None if array is None else self.to_cupy(array, name)

    def from_cupy(self, array, like):
        """A CuPy result as an array of the library of `like`, if that library says how; else as it is."""
        namespace = getattr(like, "__array_namespace__", None)
        make = getattr(namespace(), "from_dlpack", None) if namespace else None
        return make(array) if make else array


OTHER = OtherArrays()
LIBRARIES: dict[type, object] = {}  # type of an array -> its adapter
_ROOTS = {("torch", "Tensor"): TorchArrays, ("cupy", "ndarray"): CupyArrays}
_instances: dict[type, object] = {}


def library_of(array):
    """The adapter of `array`'s library."""
    library = LIBRARIES.get(type(array))
    if library is None:
        roots = ((base.__module__.partition(".")[0], base.__name__) for base in type(array).__mro__)
        adapter = next((_ROOTS[root] for root in roots if root in _ROOTS), None)
        if adapter is TorchArrays and dispatches(type(array)):
            adapter = TorchSubclassArrays
        library = OTHER if adapter is None else _instances.get(adapter) or _instances.setdefault(adapter, adapter())
        LIBRARIES[type(array)] = library
    return library


def know_torch() -> None:
    """Makes the adapter of torch's own tensors if torch is imported, so that a compiler does not see it come into being."""
    for array in loaded_torch():
        library_of(array)


def _type_name(array) -> str:
    return f"{type(array).__module__.partition('.')[0]}.{type(array).__name__}"


def _numpy_dtype(name: str):
    import numpy

    if name != "bfloat16":
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError:  # then no bfloat16 array of CuPy can exist either
        return None
    return numpy.dtype(ml_dtypes.bfloat16)


know_torch()
