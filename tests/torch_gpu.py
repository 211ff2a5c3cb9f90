"""A GPU made of torch's CPU tensors: calls, lookups, plans, packing and launches are the real ones, the kernels are fake_arrays'.

    def test(torch_gpu):                # torch's CPU tensors are taken for those of CUDA device 0
        autotune.attention(q, k, v)     # q on the CPU
        torch_gpu.calls                 # what was launched, decoded from Params
"""

import struct
import warnings
from functools import cache
from types import SimpleNamespace

import fake_arrays
import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda

from autotune.core.problem import Problem
from autotune.calls import plans, writing
from autotune.check.numerics import array_dtype, from_float32, to_float32
from autotune.device import arrays
from autotune.integrations import ops
from autotune.kernels.base import params_format
from autotune.kernels.writing import FIELDS


class HostTensors(arrays.TorchArrays):
    """torch's adapter, for tensors in host memory that stand for those of device 0."""

    kind = "cpu"

    def __init__(self):
        super().__init__()
        self.stream = lambda device: 70
        self.copies = 0

    def read(self, array):
        return *super().read(array)[:7], 0

    def vector(self, array):
        return *super().vector(array)[:4], 0

    def packed(self, array):
        self.copies += 1
        return super().packed(array)

    def workspace(self, like, floats, capturing):
        return super().workspace(like, floats, capturing).fill_(float("nan"))


class HostGpu(fake_arrays.FakeGpu):
    """Computes every launch for the dtype and sizes that its kernel was compiled for."""

    def launchKernel(self, *arguments):
        image = self.images[arguments[0] // 100 - 1].decode()
        if image.startswith("write "):
            FakeCuda.launchKernel(self, *arguments)
            fields = struct.unpack_from(params_format(FIELDS), self.launches[-1][-1])
            self.calls.append({"kernel": "cache_write", **dict(zip((field.name for field in FIELDS), fields))})
            return write_slots(self.calls[-1], *image.split()[1:])
        problem = Problem.parse(self.images[arguments[0] // 100 - 1].decode().split(" ", 1)[0])
        kinds = (problem.kv_dtype,) if problem.op == "decode" else ()
        self.compute = (problem.dtype, problem.head_dim, problem.head_dim_v, *kinds)
        super().launchKernel(*arguments)


def write_slots(p: dict, dtype: str, cache_dtype: str, *dims: str) -> None:
    """What the kernel that writes into caches does, from its Params alone."""
    slots = fake_arrays._view(p["slots"], (p["tokens"],), (1,), np.dtype(np.int64 if p["wide_slots"] else np.int32))
    for name, dim in zip("kv", map(int, dims)):
        new = fake_arrays._view(p[name], (p["tokens"], p["heads"], dim), (p[f"{name}_token_stride"], p[f"{name}_head_stride"], 1),
                                array_dtype(dtype))
        pages = fake_arrays._view(p[f"{name}_cache"], (p["slot_count"] // p["page_size"], p["page_size"], p["heads"], dim),
                                  (p[f"{name}_page_stride"], p[f"{name}_row_stride"], p[f"{name}_cache_head_stride"], 1),
                                  array_dtype(cache_dtype))
        of_heads = fake_arrays._view(p[f"{name}_scales"], (p["heads"],), (p[f"{name}_scale_stride"],), np.dtype(np.float32))
        scale = p[f"{name}_scale"] if of_heads is None else of_heads[:, None]
        for token, slot in enumerate(slots):
            if 0 <= slot < p["slot_count"]:
                row = to_float32(np.ascontiguousarray(new[token]), dtype) / scale
                pages[slot // p["page_size"], slot %
     p["page_size"]] = from_float32(np, np.clip(row, -448, 448) if cache_dtype == "e4m3" else row, cache_dtype)


@cache
def host_operators():
    """torch.ops.autotune.* for tensors in host memory, from now on."""
    library = torch.library.Library("autotune", "IMPL")
    for name, run in (("attention", ops.run_attention), ("attention_varlen", ops.run_varlen),
                      ("attention_with_kvcache", ops.run_kvcache)):
        ops.implement(library, name, run, "CPU")
    library.impl("write_kvcache", ops.without_autocast(ops.run_write), "CPU")
    return library


@pytest.fixture(name="torch_gpu")
def fake_torch_gpu(monkeypatch):
    """A fake GPU for torch's CPU tensors; see the module."""
    host_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", plans.UntunedWarning)
        monkeypatch.setattr(fake_arrays, "FakeGpu", HostGpu)
        gpu = fake_arrays.install(monkeypatch)
        gpu.tensors = HostTensors()
        monkeypatch.setattr(writing, "_ready", {})
        monkeypatch.setattr(writing, "detect", lambda device: fake_arrays.GPU)
        monkeypatch.setattr(writing, "binary_of", written)
        monkeypatch.setattr(arrays, "_instances", {arrays.TorchArrays: gpu.tensors})
        forget_tensors()
        arrays.know_torch()
        yield gpu
    forget_tensors()
    fake_arrays.forget()


def written(write, target):
    text = f"write {write.dtype} {write.cache_dtype} {write.head_dim} {write.head_dim_v}"
    return SimpleNamespace(sha256=text, image=text.encode(), target=target)


def forget_tensors():
    for kind in [kind for kind in arrays.LIBRARIES if issubclass(kind, torch.Tensor)]:
        del arrays.LIBRARIES[kind]
