"""Arguments that no kernel can do right are refused with a sentence (robustness F8, F9)."""

import numpy as np
import pytest
from fake_arrays import GPU, Tensor, fake_gpu, qkv  # noqa: F401 (a fixture)

import autotune
from autotune.core.problem import Problem
from autotune.device.arrays import AttentionError
from autotune.kernels import KERNELS

CALLS = {"attention": (autotune.attention, 3), "attention_varlen": (autotune.attention_varlen, 7),
         "attention_with_kvcache": (autotune.attention_with_kvcache, 3), "explain": (autotune.explain, 3),
         "explain_varlen": (autotune.explain_varlen, 7), "explain_with_kvcache": (autotune.explain_with_kvcache, 3)}
EACH = pytest.mark.parametrize("name", CALLS)


class Tracer:
    """As jax's: it has the method, and no memory."""

    def __dlpack__(self):
        raise AttributeError("traced")

    __dlpack_device__ = __dlpack__


@EACH
@pytest.mark.parametrize("what", [None, 5, "q", np.ndarray, Tracer(), np.zeros((1, 2, 2, 64))],
                         ids=["none", "int", "text", "class", "tracer", "numpy"])
def test_f9_what_is_no_array_of_a_gpu_is_a_sentence(name, what):
    call, count = CALLS[name]
    with pytest.raises(AttentionError, match="q is a"):
        call(*[what] * count)


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError])
def test_f9_an_array_without_memory_is_a_sentence(gpu, monkeypatch, error):
    def read(tensor):
        raise error("Cannot access data pointer")

    monkeypatch.setattr(gpu.library, "read", read)
    for call in (autotune.attention, autotune.attention_with_kvcache):
        with pytest.raises(AttentionError, match="cannot be read .*Cannot access data pointer.*dense array"):
            call(*qkv())


class Learned(Tensor):
    """A number that is learned."""

    def __init__(self):
        super().__init__(np.float32(0.5))
        self.requires_grad = True

    def __float__(self):
        return 0.5


@pytest.mark.parametrize("keyword", ["scale", "softcap"])
@pytest.mark.parametrize("call", [autotune.attention, autotune.attention_with_kvcache, autotune.explain])
def test_f8_a_learned_number_is_not_cut_from_its_gradient(gpu, call, keyword):
    with pytest.raises(AttentionError, match="require[sd]? grad"):
        call(*qkv(), **{keyword: Learned()})


@pytest.mark.parametrize("keyword", ["k_scale", "v_scale"])
def test_f8_a_learned_scale_of_a_cache_is_refused(gpu, keyword):
    with pytest.raises(AttentionError, match=f"{keyword} requires grad"):
        autotune.attention_with_kvcache(*qkv(), **{keyword: Learned()})


def test_f8_forward_mode_over_a_cache_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(gpu.library, "forward_mode", lambda: True)
    with pytest.raises(AttentionError, match="forward-mode"):
        autotune.attention_with_kvcache(*qkv())


def test_a_given_config_runs(gpu):
    q, k, v = qkv()
    text = str(autotune.explain(q, k, v).match.config)
    for config in (text, autotune.explain(q, k, v).match.config):
        autotune.attention(q, k, v, config=config)
    assert gpu.calls[-1]["kernel"] == text.split()[0]
    slow = "forward_simt num_warps=4 rows_per_warp=8 smem_bytes=16512 longest_first=true head_group=1"
    autotune.attention(q, k, v, config=slow)
    assert gpu.calls[-1]["kernel"] == "forward_simt" and autotune.explain(q, k, v, config=slow).kernel.name == "forward_simt"
    assert "the caller chose this config" in str(autotune.explain(q, k, v, config=slow))
    for wrong in ("nonsense", slow.replace("num_warps=4", "num_warps=5"), slow.replace("16512", "16513")):
        with pytest.raises(AttentionError, match="config"):
            autotune.attention(q, k, v, config=wrong)
    with pytest.raises(AttentionError, match="cannot serve"):
        autotune.attention(q, k, v, config=KERNELS["decode_mma"].default(Problem(op="decode", head_dim=64), GPU))
