"""A GPU made of torch's CPU tensors: calls, lookups, plans, packing and launches are the real ones, the kernels are fake_arrays'.

    def test(torch_gpu):                # torch's CPU tensors are taken for those of CUDA device 0
        autotune.attention(q, k, v)     # q on the CPU
        torch_gpu.calls                 # what was launched, decoded from Params
"""

import warnings
from functools import cache

import fake_arrays
import pytest
import torch

from autotune.core.problem import Problem
from autotune.calls import plans
from autotune.device import arrays
from autotune.integrations import ops


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

    def synchronize(self, device):
        pass


class HostGpu(fake_arrays.FakeGpu):
    """Computes every launch for the dtype and sizes that its kernel was compiled for."""

    def launchKernel(self, *arguments):
        problem = Problem.parse(self.images[arguments[0] // 100 - 1].decode().split(" ", 1)[0])
        kinds = (problem.kv_dtype,) if problem.op == "decode" else ()
        self.compute = (problem.dtype, problem.head_dim, problem.head_dim_v, *kinds)
        super().launchKernel(*arguments)


@cache
def host_operators():
    """torch.ops.autotune.* for tensors in host memory, from now on."""
    library = torch.library.Library("autotune", "IMPL")
    for name, run in (("attention", ops.run_attention), ("attention_varlen", ops.run_varlen),
                      ("attention_with_kvcache", ops.run_kvcache)):
        ops.implement(library, name, run, "CPU")
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
        monkeypatch.setattr(arrays, "_instances", {arrays.TorchArrays: gpu.tensors})
        forget_tensors()
        arrays.know_torch()
        yield gpu
    forget_tensors()
    fake_arrays.forget()


def forget_tensors():
    for kind in [kind for kind in arrays.LIBRARIES if issubclass(kind, torch.Tensor)]:
        del arrays.LIBRARIES[kind]
