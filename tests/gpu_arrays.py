"""What the GPU tests of attention() share: CuPy and torch as fixtures, problems, and the check on their arrays."""

import pytest

import autotune
from autotune.check.checkers import check_launch
from autotune.core.problem import Problem


@pytest.fixture(name="cupy")
def cupy_fixture():
    return pytest.importorskip("cupy")


@pytest.fixture(name="torch")
def torch_fixture():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


def call(problem, inputs, **keywords):
    return autotune.attention(inputs.q, inputs.k, inputs.v, **problem.bounds.arguments,
                              scale=inputs.scale, softcap=problem.softcap, sinks=inputs.sinks, alibi_slopes=inputs.alibi_slopes,
                              **keywords)


def verdict(problem, cupy, convert=lambda array: array, kinds=None):
    """check_launch of attention() with arrays that went through `convert`; out and lse are what was checked."""
    def run(inputs, out, lse):
        arrays = {name: convert(getattr(inputs, name)) for name in ("q", "k", "v", "sinks", "alibi_slopes")}
        target = convert(out)
        given = type("Given", (), {**arrays, "scale": inputs.scale})
        result, log = call(problem, given, return_lse=True, out=target)
        assert result is target and type(log) is type(target) and tuple(log.shape) == lse.shape
        lse[...] = cupy.from_dlpack(log)

    return check_launch(run, problem, kinds=kinds, xp=cupy)


def to_torch(torch):
    """A converter from CuPy to a torch tensor of the same memory; bfloat16 goes as integers."""
    def convert(array):
        if array is not None and array.dtype.name == "bfloat16":
            return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
        if array is not None and array.dtype.name == "uint8":
            return torch.from_dlpack(array).view(torch.float8_e4m3fn)
        return None if array is None else torch.from_dlpack(array)

    return convert


def problem_of(dtype="bf16", lengths=(113, 203), head_dim=64, heads=(4, 2), batch=2, **fields):
    return Problem(dtype=dtype, batch=batch, heads_q=heads[0], heads_kv=heads[1], seqlen_q=lengths[0], seqlen_k=lengths[1],
                   head_dim=head_dim, **fields)


def names(problem):
    return problem.text
