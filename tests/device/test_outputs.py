"""Outputs that torch's adapter allocates: by the short way where that gives memory of the right device, else as ever."""

import pytest

torch = pytest.importorskip("torch")

from autotune.device.arrays import TorchArrays  # noqa: E402

SHAPE, STRIDES = (2, 3, 4, 64), (768, 256, 64, 1)


@pytest.mark.parametrize("current", [0, 1, None])  # None: a torch that lacks the short way
def test_an_output_is_like_a_new_empty_one(monkeypatch, current):
    library, short = TorchArrays(), []

    def empty_strided(*arguments):
        short.append(arguments)
        return torch._C._dynamo.guards._empty_strided_cpu(*arguments)

    monkeypatch.setattr(library, "_empty_strided", empty_strided, raising=False)
    monkeypatch.setattr(library, "_current_device", lambda: current)
    like = torch.nn.Parameter(torch.zeros(2, 3, 4, 192, dtype=torch.bfloat16))
    with torch.no_grad():
        made, expected = library.dense(like, 0, SHAPE, STRIDES), like.new_empty(SHAPE)
    assert short == ([(SHAPE, STRIDES, torch.bfloat16)] if current == 0 else [])
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
        assert getattr(made, name) == getattr(expected, name)
    assert type(made) is torch.Tensor and made.stride() == expected.stride() == STRIDES


@pytest.mark.gpu
def test_an_output_on_the_gpu_comes_from_torchs_pool():
    library, like = TorchArrays(), torch.zeros(SHAPE, device="cuda", dtype=torch.float16)
    before = torch.cuda.memory_allocated()
    made = library.dense(like, like.get_device(), SHAPE, STRIDES)
    assert library._current_device() == like.get_device() and made.device == like.device and made.is_contiguous()
    assert torch.cuda.memory_allocated() - before >= made.nbytes
    with torch.inference_mode():
        assert library.dense(like, like.get_device(), SHAPE, STRIDES).is_inference()
