"""Bad arguments: one sentence each, the same from attention() and explain(), and nothing is launched."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_arrays import Tensor, fake_gpu, qkv, random  # noqa: F401 (a fixture)

import autotune
from autotune.calls import arguments
from autotune.core.masks import CAUSAL
from autotune.device.arrays import AttentionError
from autotune.core.problem import ProblemError



def zeros(size, dtype=np.float32, device=0):
    return Tensor(np.zeros(size, dtype), device)


BAD = [
    ("q is a list", lambda q, k, v: ([1], k, v, {}), "q is a list; it must be an array"),
    ("numpy", lambda q, k, v: (q.array, k, v, {}), "q is a numpy.ndarray in host memory"),
    ("k of another library", lambda q, k, v: (q, k.array, v, {}), "k is a ndarray; it must be an array of fake, as q is"),
    ("v is None", lambda q, k, v: (q, k, None, {}), "v is a NoneType"),
    ("rank", lambda q, k, v: (q[0], k, v, {}), r"q has shape \(5, 4, 64\); it must be \(batch, seqlen_q, heads_q, head_dim\)"),
    ("batch", lambda q, k, v: (q, k[:1], v, {}), r"k has shape \(1, 7, 2, 64\); it must be .* which is \(2, 7, 2, 64\)"),
    ("length of v", lambda q, k, v: (q, k, v[:, :6], {}), r"v has shape \(2, 6, 2, 64\); it must be .* and k \(2, 7, 2, 64\)"),
    ("heads of v", lambda q, k, v: (q, k, v[:, :, :1], {}), r"v has shape \(2, 7, 1, 64\)"),
    ("head dim", lambda q, k, v: (q, k[..., :32], v, {}), r"k has shape \(2, 7, 2, 32\)"),
    ("group", lambda q, k, v: (q[:, :, :3], k, v, {}), "q has 3 heads and k has 2; heads_q must be a multiple of heads_kv"),
    ("no heads", lambda q, k, v: (q, k[:, :, :0], v[:, :, :0], {}), "k has 0; heads_q must be a multiple"),
    ("dtypes", lambda q, k, v: (q, random(k.shape, "fp16"), v, {}), "k is float16 and q is bfloat16; .* must have one dtype"),
    ("dtype", lambda q, k, v: (*(Tensor(x.array.astype(np.float64)) for x in (q, k, v)), {}), "q is float64; allowed"),
    ("devices", lambda q, k, v: (q, Tensor(k.array, 1), v, {}), "k is on device 1 and q on device 0"),
    ("host", lambda q, k, v: (*(Tensor(x.array, -1) for x in (q, k, v)), {}), "q is in host memory; it must be on a CUDA GPU"),
    ("window is an int", lambda q, k, v: (q, k, v, dict(window=3)), "window is 3; it must be a pair"),
    ("window is an array", lambda q, k, v: (q, k, v, dict(window=np.arange(3))),
     r"window is array\(\[0, 1, 2\]\); it must be a pair"),
    ("window of floats", lambda q, k, v: (q, k, v, dict(window=np.array([1.5, 2]))), "left side is .*1.5.*; it must be an int"),
    ("negative window", lambda q, k, v: (q, k, v, dict(window=(-1, 0))), "left side is -1; it must be an int .*, or None"),
    ("window with causal", lambda q, k, v: (q, k, v, dict(window=(7, -8))), "right side is -8"),
    ("float window", lambda q, k, v: (q, k, v, dict(window=(1.5, None))), "left side is 1.5"),
    ("bool window", lambda q, k, v: (q, k, v, dict(window=(True, None))), "left side is True"),
    ("nan scale", lambda q, k, v: (q, k, v, dict(scale=float("nan"))), "scale is nan; it must be a finite number"),
    ("text scale", lambda q, k, v: (q, k, v, dict(scale="big")), "scale is 'big'"),
    ("huge scale", lambda q, k, v: (q, k, v, dict(scale=1e39)), "scale is 1e"),
    ("huge int scale", lambda q, k, v: (q, k, v, dict(scale=10**400)), "scale is 1000"),
    ("huge int softcap", lambda q, k, v: (q, k, v, dict(softcap=10**400)), "softcap is nan; it must be 0"),
    ("negative softcap", lambda q, k, v: (q, k, v, dict(softcap=-1.0)), "softcap is -1.0; it must be 0"),
    ("text softcap", lambda q, k, v: (q, k, v, dict(softcap="x")), "softcap is nan; it must be 0"),
    ("sinks' shape", lambda q, k, v: (q, k, v, dict(sinks=zeros(3))), r"sinks has shape \(3,\); it must be \(4,\)"),
    ("sinks' dtype", lambda q, k, v: (q, k, v, dict(sinks=zeros(4, np.int32))), "sinks is int32; allowed are"),
    ("sinks' library", lambda q, k, v: (q, k, v, dict(sinks=np.zeros(4))), "sinks is a ndarray; it must be an array of fake"),
    ("sinks' device", lambda q, k, v: (q, k, v, dict(sinks=zeros(4, device=1))), "sinks is on device 1"),
    ("slopes' shape", lambda q, k, v: (q, k, v, dict(alibi_slopes=zeros(3))),
     r"alibi_slopes has shape \(3,\); it must be \(4,\) or \(2, 4\)"),
    ("slopes' batch", lambda q, k, v: (q, k, v, dict(alibi_slopes=zeros((1, 4)))), r"alibi_slopes has shape \(1, 4\)"),
    ("slopes' dtype", lambda q, k, v: (q, k, v, dict(alibi_slopes=zeros(4, np.int64))), "alibi_slopes is int64; allowed are"),
    ("slopes' device", lambda q, k, v: (q, k, v, dict(alibi_slopes=zeros(4, device=1))), "alibi_slopes is on device 1"),
    ("slopes' library", lambda q, k, v: (q, k, v, dict(alibi_slopes=[0.5] * 4)), "alibi_slopes is a list; it must be an array"),
    ("out's shape", lambda q, k, v: (q, k, v, dict(out=q[:, :4])),
     r"out has shape \(2, 4, 4, 64\).* must have shape \(2, 5, 4, 64\)"),
    ("out's dtype", lambda q, k, v: (q, k, v, dict(out=random(q.shape, "fp16"))), "out has .* dtype float16"),
    ("out overlaps itself", lambda q, k, v: (q, k, v, dict(out=Tensor(np.broadcast_to(q.array[:1], q.shape)))),
     "out has elements that share"),
    ("out's rank", lambda q, k, v: (q, k, v, dict(out=q[0])), r"out has shape \(5, 4, 64\); it must be"),
    ("head dim too large", lambda q, k, v: (*qkv(head_dim=2048), {}), "no kernel can serve"),
]


@pytest.mark.parametrize("make, sentence", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
@pytest.mark.parametrize("call", ["attention", "explain"])
def test_bad_arguments_get_one_sentence(gpu, make, sentence, call):
    q, k, v, keywords = make(*qkv())
    with pytest.raises((AttentionError, ProblemError), match=sentence) as caught:
        getattr(autotune, call)(q, k, v, **keywords)
    assert "\n" not in str(caught.value)
    assert not gpu.launches


def test_a_window_may_be_any_pair(gpu):
    q, k, v = qkv()
    for window in ((3, 0), [3, 0], np.array([3, 0])):
        autotune.attention(q, k, v, window=window)
    assert [(call["window_left"], call["window_right"]) for call in gpu.calls] == [(3, 0)] * 3
    autotune.attention(q, k, v, window=[None, None])
    assert gpu.calls[-1]["window_left"] == gpu.calls[-1]["window_right"] > 1 << 29


def test_what_requires_grad_goes_through_autograd(gpu, monkeypatch):
    recorded = []
    module = SimpleNamespace(attend=lambda function, library, *arrays, **keywords: recorded.append((function, keywords))
                             or "recorded")
    monkeypatch.setitem(sys.modules, "autotune.calls.autograd", module)
    q, k, v = qkv()
    sinks, slopes = zeros(4), zeros(4)
    for array in (q, k, v, sinks, slopes):
        array.requires_grad = True
        assert autotune.attention(q, k, v, causal=True, sinks=sinks, alibi_slopes=slopes) == "recorded"
        array.requires_grad = False
    assert len(recorded) == 5 and all(function is autotune.attention and keywords["bounds"] == CAUSAL
                                  for function, keywords in recorded)
    out, lse = autotune.attention(q, k, v, sinks=sinks, return_lse=True)
    assert len(recorded) == 5 and gpu.launches


def test_a_cache_has_no_gradients(gpu):
    q, k, v = qkv()
    k.requires_grad = True
    with pytest.raises(AttentionError, match="k_cache requires grad, but attention over a cache has no gradients"):
        autotune.attention_with_kvcache(q, k, v)


def test_windows_and_scales_are_normalised():
    assert arguments.window_bounds((3, 5), True) == (3, 0)
    assert arguments.window_bounds((None, 2**40), False) == (None, arguments.MAX_LENGTH)
    assert arguments.positive_scale(-0.0) == (arguments.SMALLEST_SCALE, False)
    assert arguments.positive_scale(-2) == (2.0, True)
