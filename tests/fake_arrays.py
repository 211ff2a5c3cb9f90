"""A GPU made of numpy: arrays whose pointers are host addresses, and a driver whose launch computes attention from Params.

It lets `attention` run as a whole without a GPU: what reaches the kernel (pointers, strides, sizes, window, scale, sinks) is
decoded from the packed struct, and the answer is computed from that alone.
"""

import ctypes
import struct
import warnings
from importlib import import_module
from types import SimpleNamespace

import fake_decode
import fake_varlen
import numpy as np
import pytest
from fake_cuda import FakeCuda

from autotune.device import arrays, attributes, streams, launch, tensormap, counters, workspaces
from autotune.calls import again, plan, plans
from autotune.core.gpu import by_name
from autotune.kernels import config_from_text, kernel_of
from autotune.kernels.base import LOG2E, params_format
from autotune.kernels.forward.base import SINK_DTYPES
from autotune.check.numerics import array_dtype, from_float32, to_float32
from autotune.core.problem import Problem

GPU = by_name("nvidia-h200")


class Tensor:
    """An array in the fake GPU's memory."""

    def __init__(self, array, device=0):
        self.array, self.device, self.requires_grad = array, device, False

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)

    def __getitem__(self, index):
        return Tensor(self.array[index], self.device)

    def transpose(self, *axes):
        return Tensor(self.array.transpose(*axes), self.device)


class TensorArrays:
    """The adapter of `Tensor`, as autotune.device.arrays has them for torch and CuPy."""

    name = "fake"

    def __init__(self):
        self.dtypes = {array_dtype(name): name for name in ("bf16", "fp16", "fp32")}
        self.sink_dtypes = {array_dtype("bf16"): 2, **{np.dtype(n): c for n, c in SINK_DTYPES.items() if n != "bfloat16"}}
        self.int32, self.float32 = np.dtype(np.int32), np.dtype(np.float32)
        self.cache_dtypes = {np.dtype(np.uint8): "e4m3"}
        self.copies, self.streams, self.workspaces = 0, {0: 70, 1: 71}, []

    def read(self, tensor):
        array = tensor.array
        stride0, stride1, stride2, stride3 = (stride // array.itemsize for stride in array.strides)
        return array.ctypes.data, array.shape, stride0, stride1, stride2, stride3, array.dtype, tensor.device

    def vector(self, tensor):
        array = tensor.array
        return array.ctypes.data, array.shape, tuple(s // array.itemsize for s in array.strides), array.dtype, tensor.device

    def form(self, tensor):
        return type(tensor), tensor.shape, tensor.array.strides, tensor.dtype, tensor.device

    def forms(self, q, k, v):
        return self.form(q), self.form(k), self.form(v)

    def traced(self):
        return False

    def grad_enabled(self):
        return True

    def forward_mode(self):
        return False

    def stream(self, device):
        return self.streams[device]

    def empty(self, like, shape):
        return Tensor(aligned(shape, like.dtype), like.device)

    def dense(self, like, device, shape, strides):
        assert like.device == device
        made = self.empty(like, shape)
        assert self.vector(made)[2] == strides or 0 in shape
        return made

    def empty_float32(self, like, shape):
        return Tensor(aligned(shape, np.dtype(np.float32)), like.device)

    def workspace(self, like, floats, capturing):
        self.workspaces.append((floats, capturing))
        return Tensor(aligned((floats,), np.dtype(np.float32)), like.device)

    def steps_int32(self, like, count, step):
        return Tensor(np.arange(count, dtype=np.int32) * np.int32(step), like.device)

    def by_sequence(self, lse, batch):
        return Tensor(lse.array.reshape(lse.shape[1], batch, -1).swapaxes(0, 1).copy(), lse.device)

    def on_host(self, tensor):
        return tensor.array

    def pointer(self, tensor):
        return tensor.array.ctypes.data

    def packed(self, tensor):
        self.copies += 1
        copy = aligned(tensor.shape, tensor.dtype)
        copy[...] = tensor.array
        return Tensor(copy, tensor.device)

    def as_float32(self, tensor):
        self.copies += 1
        return Tensor(np.array(tensor.array, np.float32, order="C"), tensor.device)

    def negated(self, tensor):
        return Tensor(-tensor.array, tensor.device)

    def assign(self, target, source):
        target.array[...] = source.array

    def zero(self, tensor):
        tensor.array[...] = 0

    def fill_lse(self, lse, sinks):
        lse.array[...] = -np.inf if sinks is None else sinks.array.astype(np.float32)[None, :, None]


def aligned(shape, dtype):
    """A C-ordered array at an address that is a multiple of 256, full of NaN."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.full(size + 256, 0xFF, np.uint8)
    start = -data.ctypes.data % 256
    return data[start:start + size].view(dtype).reshape(shape)


class FakeGpu(FakeCuda):
    """Computes what it is asked to launch. `calls` has the decoded Params of each launch, by field name, and `kernel`."""

    def __init__(self):
        super().__init__()
        self.calls, self.streams, self.images = [], [], []

    def moduleLoadData(self, image):
        self.images.append(image)
        return super().moduleLoadData(image)

    def launchKernel(self, *arguments):
        super().launchKernel(*arguments)
        self.streams.append(arguments[8])
        text, config = self.images[arguments[0] // 100 - 1].decode().split(" ", 1)  # as moduleGetFunction numbers functions
        config = config_from_text(config)
        kernel = kernel_of(config)
        fields = kernel.params(Problem.parse(text).static, config)
        values = struct.unpack_from(params_format(fields), self.launches[-1][-1])
        params = dict(zip((field.name for field in fields), values))
        self.calls.append({"kernel": kernel.name, **params})
        if self.compute:
            attends = {"lengths": fake_decode.attend, "cache_seqlens": fake_decode.attend_pages, "cu_seqlens_k": _attend_packed}
            next((attend for name, attend in attends.items() if name in params), _attend)(params, *self.compute)

    def stream_id(self, handle, number_at):
        """Stands for cuStreamGetId."""
        number_at._obj.value = self.stream_ids.get(handle.value, handle.value)
        return 0

    compute = None  # (dtype name, head_dim, head_dim_v), which the real kernel has compiled in


def _view(address, shape, strides, dtype):
    """The array at `address`; strides in elements."""
    if address == 0 or 0 in shape:
        return None
    reach = [(size - 1) * stride for size, stride in zip(shape, strides)]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    memory = (ctypes.c_char * ((high - low + 1) * dtype.itemsize)).from_address(address + low * dtype.itemsize)
    return np.ndarray(shape, dtype, memory, -low * dtype.itemsize, [stride * dtype.itemsize for stride in strides])


_MAP = struct.Struct("=Q4Q3Q4Ii")  # pointer, sizes, strides in bytes, box, data type: what the fake driver puts in a map


def encode_map(target, data_type, rank, pointer, sizes, strides, box, steps, interleave, swizzle, promotion, fill):
    """Stands for cuTensorMapEncodeTiled: refuses what the driver does, and writes down the rest."""
    pointers = target, pointer, sizes, strides, box, steps
    assert all(type(value) is ctypes.c_void_p for value in pointers)  # ctypes would cut an int to 32 bits
    target, pointer, sizes, strides, box, steps = (value.value or 0 for value in pointers)
    data_type, rank, swizzle = data_type.value, rank.value, swizzle.value
    sizes, strides, box, steps = (tuple((kind * n).from_address(address)) for kind, n, address in (
        (ctypes.c_uint64, 4, sizes), (ctypes.c_uint64, 3, strides), (ctypes.c_uint32, 4, box), (ctypes.c_uint32, 4, steps)))
    if target % 64 or pointer % 16 or any(stride % 16 or not 0 < stride < 2**40 for stride in strides) or not all(sizes) \
            or not all(1 <= size <= 256 for size in box) or (rank, swizzle, box[0], steps) != (4, 3, 64, (1,) * 4):
        return 1
    ctypes.memmove(target, _MAP.pack(pointer, *sizes, *strides, *box, data_type), _MAP.size)
    return 0


def decode_map(map_bytes):
    """(pointer, (batch, rows, heads, columns), strides in bytes in that order, (rows, heads) of the box, data type)"""
    pointer, *rest = _MAP.unpack_from(map_bytes)
    (columns, rows, heads, batch), (row, head, outer), box, data_type = rest[:4], rest[4:7], rest[7:11], rest[11]
    return pointer, (batch, rows, heads, columns), (outer, row, head), (box[1], box[2]), data_type


def _attend(p, dtype_name, head_dim, head_dim_v):
    dtype = array_dtype(dtype_name)
    hkv = p["heads_q"] // p["group"]

    def tensor(name, rows, heads, dim):
        if f"{name}_map" in p:  # then TMA looks at nothing else
            pointer, shape, strides, _, _ = decode_map(p[f"{name}_map"])
            assert shape == (p["batch"], rows, heads, dim)
            return _view(pointer, shape, (*(stride // dtype.itemsize for stride in strides), 1), dtype)
        strides = *(p[f"{name}_{axis}_stride"] for axis in ("batch", "row", "head")), 1
        return _view(p[name], (p["batch"], rows, heads, dim), strides, dtype)

    q, k = tensor("q", p["seqlen_q"], p["heads_q"], head_dim), tensor("k", p["seqlen_k"], hkv, head_dim)
    v, out = tensor("v", p["seqlen_k"], hkv, head_dim_v), tensor("out", p["seqlen_q"], p["heads_q"], head_dim_v)
    sink_dtype = {code: name for name, code in SINK_DTYPES.items()}[p["sink_dtype"]]
    sinks = _view(p["sinks"], (p["heads_q"],), (1,), array_dtype("bf16") if sink_dtype == "bfloat16" else np.dtype(sink_dtype))
    lse = _view(p["lse"], (p["batch"], p["heads_q"], p["seqlen_q"]),
                (p["heads_q"] * p["seqlen_q"], p["seqlen_q"], 1), np.dtype(np.float32))
    q, k, v = (to_float32(np.ascontiguousarray(x), dtype_name).astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, p["group"], axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k)
    if "softcap_scale" in p:
        scores = np.tanh(scores * p["softcap_scale"])
    scores = scores * p["scale_log2"] / LOG2E
    i = np.arange(p["seqlen_q"])[:, None] + p["seqlen_k"] - p["seqlen_q"]
    j = np.arange(p["seqlen_k"])[None]
    if "alibi_slopes" in p:
        slopes = _view(p["alibi_slopes"], (p["batch"], p["heads_q"]), (p["alibi_batch_stride"], 1), np.dtype(np.float32))
        scores = scores - slopes.astype(np.float64)[:, :, None, None] * abs(i - j)
    scores = np.where((j >= i - p["window_left"]) & (j <= i + p["window_right"]) | (j < p.get("prefix", 0)), scores, -np.inf)
    if sinks is not None:
        extra = np.broadcast_to(sinks.astype(np.float64)[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, extra], -1)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    result = np.einsum("bhij,bjhd->bihd", (weights / np.where(total == 0, 1, total))[..., :p["seqlen_k"]], v)
    out[...] = from_float32(np, result.astype(np.float32), dtype_name)
    if lse is not None:
        with np.errstate(divide="ignore"):
            lse[...] = (np.log(total) + np.where(np.isinf(top), 0, top))[..., 0]


def _attend_packed(p, *compiled):
    fake_varlen.attend(p, *compiled, _attend, decode_map)


class OnDevice:
    """A context in which a device is the current one."""

    def __init__(self, runtime, device: int):
        self.runtime, self.device, self.before = runtime, device, []

    def __enter__(self):
        self.before.append(self.runtime.current)
        self.runtime.current = self.device

    def __exit__(self, *_):
        self.runtime.current = self.before.pop()


class FakeRuntime:
    """What `fork` asks of the CUDA runtime: one line of `log` for each event that is recorded or waited for. An event is recorded
    on streams of its own device only; default streams are those of the current one."""

    def __init__(self):
        self.log, self.made, self.current, self.device_of = [], 0, 0, {}

    def on_device(self, device: int):
        return OnDevice(self, device)

    def _make(self, *_) -> int:
        self.made += 1
        self.device_of[900 + self.made] = self.current
        return 900 + self.made

    streamCreateWithFlags = eventCreateWithFlags = _make

    def eventRecord(self, event: int, stream: int) -> None:
        owner = self.device_of[event]
        if self.device_of.get(stream, self.current if stream in (0, 1, 2) else owner) != owner:
            raise RuntimeError("cudaErrorInvalidResourceHandle: an event of one device, a stream of another")
        self.log.append(("record", event, stream))

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.log.append(("wait", event, stream))


@pytest.fixture(name="gpu")
def fake_gpu(monkeypatch):
    """A fake GPU under the real attention(): lookup, plans, packing and launch are the real ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", plans.UntunedWarning)
        yield install(monkeypatch)
    forget()


def forget():
    for cache in (plans._plans, plans._binaries, plans._told, counters._in_use, counters._reserve, streams._beside,
                  workspaces._of_stream, workspaces._made, plans.repeatable, again._seen):
        cache.clear()
    tensormap.encode.cache_clear()


def install(monkeypatch):
    fake, library = FakeGpu(), TensorArrays()
    monkeypatch.setattr(launch, "_cupy", lambda: (fake, fake))
    monkeypatch.setattr(launch, "_loaded", {})
    fake.runtime = FakeRuntime()
    monkeypatch.setattr(counters, "_exchange", lambda: lambda mode: 0)
    fake.stream_ids = {}  # of handles that are another stream's by now
    monkeypatch.setattr(counters, "_id_of", lambda: fake.stream_id)
    monkeypatch.setattr(streams, "_cuda", lambda: (fake.runtime.on_device, fake.runtime))
    monkeypatch.setattr(tensormap, "_encoder", lambda: encode_map)
    monkeypatch.setattr(attributes, "_driver_launch", lambda: fake.launchKernelEx)
    monkeypatch.setitem(arrays.LIBRARIES, Tensor, library)
    fake.capturing = False
    for module in (arrays, plans, plan):
        monkeypatch.setattr(module, "is_capturing", lambda stream: fake.capturing)
    for module in (plans, import_module("autotune.calls.dense"), import_module("autotune.calls.explain")):
        monkeypatch.setattr(module, "detect", lambda device=0: GPU)
    fake.built = []

    def build(match):
        fake.built.append(match)
        return SimpleNamespace(source_sha256="", sha256=f"{match.problem.static.text} {match.config}",
                               image=f"{match.problem} {match.config}".encode(), target="sm_90",
                               nvrtc="13.0")

    monkeypatch.setattr(plans, "build", build)
    forget()
    fake.library = library
    fake.setDevice(0)
    return fake


def random(shape, dtype="bf16", seed=0):
    array = aligned(shape, array_dtype(dtype))
    array[...] = from_float32(np, np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)
    return Tensor(array)


def qkv(batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=0, dtype="bf16"):
    return (random((batch, seqlen_q, heads_q, head_dim), dtype, 1), random((batch, seqlen_k, heads_kv, head_dim), dtype, 2),
            random((batch, seqlen_k, heads_kv, head_dim_v or head_dim), dtype, 3))
