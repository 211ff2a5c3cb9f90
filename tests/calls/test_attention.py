"""What reaches the kernel, and what comes back, with a GPU made of numpy."""

import numpy as np
import pytest
from fake_arrays import Tensor, aligned, fake_gpu, qkv, random  # noqa: F401 (a fixture)

import autotune
from autotune.device.arrays import DTYPE_NAMES
from autotune.check.numerics import array_dtype, to_float32


def expected(q, k, v, causal=False, window=(None, None), prefix=0, scale=None, sinks=None, softcap=0.0, slopes=None):
    """(out, lse) in float64, by a way of its own: a loop over rows."""
    q, k, v = (to_float32(np.ascontiguousarray(x.array), DTYPE_NAMES[x.dtype.name]).astype(np.float64) for x in (q, k, v))
    batch, rows, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    left, right = window
    right = 0 if causal else right
    out, lse = np.zeros((batch, rows, heads, v.shape[3])), np.full((batch, heads, rows), -np.inf)
    for b in range(batch):
        for h in range(heads):
            for i in range(rows):
                here = i + keys - rows
                seen = [j for j in range(keys) if j < prefix
                        or (left is None or j >= here - left) and (right is None or j <= here + right)]
                scores = [scale * q[b, i, h] @ k[b, j, h // group] for j in seen]
                if softcap:
                    scores = [softcap * np.tanh(score / softcap) for score in scores]
                if slopes is not None:
                    scores = [score - slopes[b, h] * abs(here - j) for score, j in zip(scores, seen)]
                scores += [] if sinks is None else [float(sinks[h])]
                if scores:
                    top = max(scores)
                    weights = np.exp(np.array(scores) - top)
                    lse[b, h, i] = top + np.log(weights.sum())
                    for j, weight in zip(seen, weights / weights.sum()):
                        out[b, i, h] += weight * v[b, j, h // group]
    return out, lse


def agrees(gpu, q, k, v, tolerance=0.02, **keywords):
    """Calls attention on the fake GPU and compares it with `expected`."""
    name = DTYPE_NAMES[q.dtype.name]
    gpu.compute = name, q.shape[3], v.shape[3]
    out, lse = autotune.attention(q, k, v, return_lse=True, **keywords)
    sinks, slopes = keywords.pop("sinks", None), keywords.pop("alibi_slopes", None)
    wanted_out, wanted_lse = expected(q, k, v, **{name: value for name, value in keywords.items() if name != "out"},
                                      sinks=None if sinks is None else sinks.array.astype(np.float64),
                                      slopes=None if slopes is None else np.broadcast_to(slopes.array, (q.shape[0], q.shape[2])))
    assert out.dtype == q.dtype and out.shape == wanted_out.shape and lse.dtype == np.float32
    np.testing.assert_allclose(to_float32(np.ascontiguousarray(out.array), name), wanted_out, atol=tolerance)
    np.testing.assert_allclose(lse.array, wanted_lse, atol=tolerance)
    return out


@pytest.mark.parametrize("keywords", [
    {}, dict(causal=True), dict(window=(2, None)), dict(window=(1, 1)), dict(window=(0, 3), causal=True), dict(window=(None, 2)),
    dict(scale=0.5), dict(scale=-0.5), dict(scale=0), dict(scale=0.0, causal=True), dict(window=[np.int64(2), None])])
def test_masks_and_scales(gpu, keywords):
    agrees(gpu, *qkv(), **keywords)
    agrees(gpu, *qkv(seqlen_q=9, seqlen_k=4), **keywords)  # more queries than keys: some see nothing


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 2), (28, 4), (6, 1)])
def test_group_sizes(gpu, heads):
    agrees(gpu, *qkv(heads_q=heads[0], heads_kv=heads[1]), causal=True)


def test_head_dim_of_v_differs(gpu):
    assert agrees(gpu, *qkv(head_dim=128, head_dim_v=64), causal=True).shape[3] == 64


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_sinks_of_any_float_dtype(gpu, dtype):
    values = np.array([-1.0, 0.5, 3.0, 0.0])
    sinks = Tensor(values.astype(array_dtype("bf16") if dtype == "bfloat16" else dtype))
    agrees(gpu, *qkv(), sinks=sinks, causal=True)
    agrees(gpu, *qkv(), sinks=Tensor(np.repeat(sinks.array, 2)[::2]))  # strided: copied
    assert gpu.library.copies == 1


@pytest.mark.parametrize("keywords", [{}, dict(causal=True), dict(window=(3, 2), softcap=2.0), dict(scale=0), dict(scale=-0.5)])
def test_slopes_are_of_heads_or_of_batch_entries_and_heads(gpu, keywords):
    slopes = 2.0 ** -np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    for array in (slopes[0], -slopes[1], slopes, slopes[:1].repeat(2, 0), np.broadcast_to(slopes[:1], (2, 4))):
        agrees(gpu, *qkv(), alibi_slopes=Tensor(array), **keywords)
        agrees(gpu, *qkv(seqlen_q=9, seqlen_k=4), alibi_slopes=Tensor(array), sinks=random((4,), "fp32"), **keywords)
    assert gpu.library.copies == 0 and len({call["kernel"] for call in gpu.calls}) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_slopes_of_any_float_dtype_are_converted(gpu, dtype):
    slopes = np.array([[0.5, 0.25, 0.125, 1.0]] * 2).astype(array_dtype("bf16") if dtype == "bfloat16" else dtype)
    agrees(gpu, *qkv(), alibi_slopes=Tensor(slopes))
    agrees(gpu, *qkv(), alibi_slopes=Tensor(np.repeat(slopes.astype(np.float32), 2, axis=1)[:, ::2]))  # strided
    assert gpu.library.copies == 2


def test_a_soft_cap_reaches_the_kernel(gpu):
    agrees(gpu, *qkv(), softcap=1.5, causal=True)
    agrees(gpu, *qkv(), softcap=3, scale=2.0)


def test_fp32_takes_the_kernel_that_computes_it(gpu):
    agrees(gpu, *qkv(dtype="fp32"), tolerance=1e-5, causal=True)
    assert gpu.calls[-1]["kernel"] == "forward_simt"


def test_head_dims_that_tensor_cores_do_not_take(gpu):
    agrees(gpu, *qkv(head_dim=40, head_dim_v=20), causal=True)
    agrees(gpu, *qkv(head_dim=1), causal=True)


def test_views_are_read_in_place_and_nothing_is_copied(gpu):
    q = random((2, 4, 5, 64), seed=1).transpose(0, 2, 1, 3)  # (B, H, S, D) storage
    kv = random((2, 7, 3, 2, 64), seed=2)  # fused k and v
    k, v = kv[:, :, 0], kv[:, :, 2]
    agrees(gpu, q, k, v, causal=True)
    backwards = random((2, 5, 4, 64), seed=5)[::-1, ::-1]  # negative strides
    agrees(gpu, backwards, k, v)
    one_for_all = Tensor(np.broadcast_to(k.array[:1], k.shape))  # a stride of 0
    agrees(gpu, q, one_for_all, v)
    assert gpu.library.copies == 0
    assert gpu.calls[0]["k_row_stride"] == 3 * 2 * 64 and gpu.calls[1]["q_row_stride"] < 0
    assert [call["kernel"] for call in gpu.calls] == ["forward_wgmma", "forward_mma", "forward_mma"]


def test_what_the_copy_engine_cannot_read_runs_without_it_and_only_that(gpu):
    q, k, v = qkv()
    one_for_all = Tensor(np.broadcast_to(v.array[:, :1], v.shape))  # a stride of 0
    for _ in range(2):
        agrees(gpu, q, k, one_for_all, causal=True)
        agrees(gpu, q, k, v, causal=True)
    assert [call["kernel"] for call in gpu.calls] == ["forward_mma", "forward_wgmma"] * 2 and len(gpu.built) == 2
    single = qkv(batch=1, seqlen_k=1)
    agrees(gpu, single[0], Tensor(np.broadcast_to(single[1].array, (1, 1, 2, 64))), single[2])
    assert gpu.calls[-1]["kernel"] == "forward_wgmma"  # the stride of a single element means nothing
    assert gpu.library.copies == 0


def test_what_a_kernel_cannot_read_in_place_is_copied(gpu):
    q, k, v = qkv()
    spread = aligned((2, 5, 4, 128), q.dtype)[..., ::2]  # last stride 2
    spread[...] = q.array
    agrees(gpu, Tensor(spread), k, v)
    assert gpu.library.copies == 1
    raw = aligned((2 * 7 * 2 * 64 + 8,), k.dtype)[1:1 + k.array.size].reshape(k.shape)  # address not a multiple of 16
    raw[...] = k.array
    agrees(gpu, q, Tensor(raw), v)
    assert gpu.library.copies == 2
    odd = aligned((2, 7, 2, 68), v.dtype)[..., :64]  # strides not multiples of 8
    odd[...] = v.array
    agrees(gpu, q, k, Tensor(odd))
    assert gpu.library.copies == 3


def test_the_stride_of_a_size_of_one_means_nothing(gpu):
    q, k, v = qkv(batch=1)
    strides = list(q.array.strides)
    strides[0] = 6
    odd = np.lib.stride_tricks.as_strided(q.array, q.shape, strides)
    agrees(gpu, Tensor(odd), k, v)
    assert gpu.library.copies == 0


def test_out_is_written_in_place_or_through_a_copy(gpu):
    q, k, v = qkv()
    out = random(q.shape, seed=9)
    assert agrees(gpu, q, k, v, out=out) is out
    assert gpu.calls[-1]["out"] == out.array.ctypes.data
    view = Tensor(aligned((2, 5, 4, 128), q.dtype)[..., ::2])
    assert agrees(gpu, q, k, v, out=view) is view
    assert gpu.calls[-1]["out"] != view.array.ctypes.data
    inside = Tensor(aligned((2, 10, 4, 64), q.dtype)[:, ::2])  # strided rows: in place
    assert agrees(gpu, q, k, v, out=inside) is inside
    assert gpu.calls[-1]["out"] == inside.array.ctypes.data


def test_the_arrays_device_and_their_librarys_stream_are_used(gpu):
    q, k, v = qkv()
    autotune.attention(q, k, v)
    autotune.attention(*(Tensor(x.array, 1) for x in (q, k, v)))
    assert gpu.streams == [70, 71] and [launch[0] for launch in gpu.launches] == [1000, 1001]


# Empty inputs


@pytest.mark.parametrize("sizes", [dict(batch=0), dict(seqlen_q=0), dict(seqlen_k=0), dict(seqlen_q=0, seqlen_k=0)])
def test_empty_inputs_launch_nothing(gpu, sizes):
    q, k, v = qkv(**sizes)
    for causal in (False, True):
        out, lse = autotune.attention(q, k, v, causal=causal, return_lse=True)
        assert out.shape == q.shape and lse.shape == (q.shape[0], 4, q.shape[1])
        assert (out.array == 0).all() and (lse.array == -np.inf).all()
    sinks = Tensor(np.array([0.5, 1.0, -2.0, 0.0], np.float32))
    target = random(q.shape)
    out, lse = autotune.attention(q, k, v, sinks=sinks, return_lse=True, out=target)
    assert out is target and (out.array == 0).all() and (lse.array == sinks.array[None, :, None]).all()
    assert not gpu.launches and not gpu.built
