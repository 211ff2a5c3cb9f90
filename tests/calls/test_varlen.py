"""attention_varlen on a GPU made of numpy: each sequence is as `attention` has it, and what does not fit is one sentence."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_arrays import Tensor, aligned, fake_gpu, random  # noqa: F401 (a fixture)
from test_attention import expected

import autotune
from autotune.calls import plans
from autotune.device.arrays import DTYPE_NAMES, AttentionError
from autotune.check.numerics import array_dtype, to_float32
from autotune.calls.call import Call
from autotune.core.problem import Problem, ProblemError

QUERIES, KEYS = (4, 0, 1, 6), (7, 3, 1, 0)


def starts(lengths, device=0):
    return Tensor(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)


def packed(queries=QUERIES, keys=KEYS, heads_q=4, heads_kv=2, head_dim=64, head_dim_v=0, dtype="bf16"):
    """The positional arguments of a call."""
    total_q, total_k = sum(queries), sum(keys)
    return (random((total_q, heads_q, head_dim), dtype, 1), random((total_k, heads_kv, head_dim), dtype, 2),
            random((total_k, heads_kv, head_dim_v or head_dim), dtype, 3), starts(queries), starts(keys), max(queries), max(keys))


def agrees(gpu, call, tolerance=0.02, queries=QUERIES, keys=KEYS, **keywords):
    """Calls attention_varlen on the fake GPU and compares each sequence with `expected`."""
    q, k, v = call[:3]
    name = DTYPE_NAMES[q.dtype.name]
    gpu.compute = name, q.shape[2], v.shape[2]
    out, lse = autotune.attention_varlen(*call, return_lse=True, **keywords)
    assert out.dtype == q.dtype and out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == q.shape[1::-1]
    slopes, sinks = keywords.pop("alibi_slopes", None), keywords.pop("sinks", None)
    assert slopes is None  # `expected` has none
    row = key = 0
    for number, (many_q, many_k) in enumerate(zip(queries, keys)):
        of_keys = slice(key, key + many_k)
        wanted_out, wanted_lse = expected(*(Tensor(x.array[None]) for x in (q[row:row + many_q], k[of_keys], v[of_keys])),
                                          sinks=None if sinks is None else sinks.array.astype(np.float64),
                                          **{name: value for name, value in keywords.items() if name != "out"})
        got = to_float32(np.ascontiguousarray(out.array[row:row + many_q]), name)
        np.testing.assert_allclose(got, wanted_out[0], atol=tolerance, err_msg=f"sequence {number}")
        np.testing.assert_allclose(lse.array[:, row:row + many_q], wanted_lse[0], atol=tolerance)
        row, key = row + many_q, key + many_k
    return out


@pytest.mark.parametrize("keywords", [
    {}, dict(causal=True), dict(window=(2, None)), dict(window=(1, 1)), dict(window=(0, 3), causal=True), dict(scale=0.5),
    dict(scale=-0.5), dict(sinks=random((4,), "fp32"))])
def test_each_sequence_is_attention_of_its_own(gpu, keywords):
    agrees(gpu, packed(), **keywords)
    assert gpu.calls[-1]["kernel"] == "forward_wgmma" and gpu.calls[-1]["tickets"]


@pytest.mark.parametrize("changes", [dict(heads_q=6, heads_kv=1), dict(head_dim=128, head_dim_v=64), dict(dtype="fp16"),
                                     dict(queries=(5,), keys=(9,)), dict(queries=(1,) * 70, keys=(2,) * 70)])
def test_shapes(gpu, changes):
    agrees(gpu, packed(**changes), causal=True, **{name: changes[name] for name in ("queries", "keys") if name in changes})


def test_other_dtypes_and_head_dims_take_kernels_that_compute_them(gpu):
    agrees(gpu, packed(dtype="fp32"), tolerance=1e-5, causal=True)
    agrees(gpu, packed(head_dim=40, head_dim_v=20), causal=True)
    assert {call["kernel"] for call in gpu.calls} == {"forward_simt"}


def test_slopes_are_of_heads_or_of_sequences_and_heads(gpu):
    call = packed()
    gpu.compute = "bf16", 64, 64
    flat = random((4,), "fp32")
    out = autotune.attention_varlen(*call, alibi_slopes=flat)
    assert gpu.calls[-1]["alibi_batch_stride"] == 0
    each = aligned((4, 4), np.dtype(np.float32))
    each[...] = flat.array
    assert (autotune.attention_varlen(*call, alibi_slopes=Tensor(each)).array == out.array).all()
    assert gpu.calls[-1]["alibi_batch_stride"] == 4
    each[3] += 1  # of the last sequence, which has no key, and then of the first
    assert (autotune.attention_varlen(*call, alibi_slopes=Tensor(each)).array == out.array).all()
    each[0] += 1
    assert (autotune.attention_varlen(*call, alibi_slopes=Tensor(each)).array != out.array).any()


def test_views_are_read_in_place_and_what_a_kernel_cannot_read_is_copied(gpu):
    q, _, _, *rest = packed()
    kv = random((sum(KEYS), 3, 2, 64), seed=2)  # fused k and v
    agrees(gpu, (q, kv[:, 0], kv[:, 2], *rest), causal=True)
    heads_first = Tensor(random((2, sum(KEYS), 64), seed=4).array.transpose(1, 0, 2))
    agrees(gpu, (q, heads_first, kv[:, 1], *rest))
    assert gpu.library.copies == 0 and gpu.calls[0]["k_row_stride"] == 3 * 2 * 64
    one_for_all = Tensor(np.broadcast_to(kv.array[:1, 0], kv.array[:, 0].shape))  # a stride of 0
    agrees(gpu, (q, one_for_all, kv[:, 1], *rest))
    assert gpu.library.copies == 0 and gpu.calls[-1]["kernel"] == "forward_mma"
    spread = Tensor(np.repeat(q.array, 2, axis=2)[..., ::2])  # last stride 2
    agrees(gpu, (spread, kv[:, 0], kv[:, 1], *rest))
    assert gpu.library.copies == 1
    every_other = [Tensor(np.repeat(each.array, 2)[::2]) for each in rest[:2]]
    agrees(gpu, (q, kv[:, 0], kv[:, 1], *every_other, *rest[2:]))
    assert gpu.library.copies == 3


def test_out_is_written_and_rows_of_no_sequence_are_left_alone(gpu):
    call = packed()
    out = aligned((sum(QUERIES) + 3, 4, 64), array_dtype("bf16"))
    out.view(np.uint16)[...] = 0x3F80
    longer = random((sum(QUERIES) + 3, 4, 64))
    gpu.compute = "bf16", 64, 64
    for target in (Tensor(out), Tensor(np.repeat(out, 2, axis=2)[..., ::2])):  # the second in a copy
        assert autotune.attention_varlen(longer, *call[1:], out=target) is target
        bits = np.ascontiguousarray(target.array).view(np.uint16)
        assert (bits[sum(QUERIES):] == 0x3F80).all() and (bits[:4] != 0x3F80).any()


def test_lengths_never_change_the_plan_but_by_their_bucket(gpu):
    call = packed()
    for longest_q, longest_k in ((6, 7), (100, 7), (6, 2**29)):  # more than there are counts as all
        autotune.attention_varlen(*call[:5], longest_q, longest_k, causal=True)
    assert len(gpu.built) == 1
    out = agrees(gpu, call, causal=True)
    assert (out.array == agrees(gpu, (*call[:5], 1, 1), causal=True).array).all()  # too small: another config at the most
    problem = Problem(kv="varlen", batch=4, heads_q=4, heads_kv=2, seqlen_q=6, seqlen_k=7, head_dim=64, window_right=0)
    assert plans.find(Call.of(problem, 0).key()) is not None


def test_nothing_to_do_launches_nothing(gpu):
    sinks = random((4,), "fp32")
    out, lse = autotune.attention_varlen(*packed(keys=(0, 0, 0, 0))[:5], 6, 0, sinks=sinks, return_lse=True)
    assert not out.array.any() and (lse.array == sinks.array[:, None]).all()
    assert autotune.attention_varlen(*packed(queries=(0, 0), keys=(3, 1))).shape == (0, 4, 64)
    q, k, v = packed()[:3]
    assert not autotune.attention_varlen(q, k, v, starts(()), starts(()), 0, 0).array.any()
    assert not gpu.launches


def test_a_captured_launch_has_a_counter_of_its_own(gpu):
    call = packed()
    gpu.capturing = True
    with pytest.raises(AttentionError, match=r"call autotune.prepare\('forward-bf16-b4-h4x2-q6-k7-d64-varlen'\)"):
        autotune.attention_varlen(*call)
    gpu.capturing = False
    autotune.prepare("forward-bf16-b4-h4x2-q6-k7-d64-varlen", 0)
    counters = []
    for capturing in (False, False, True, True):
        gpu.capturing = capturing
        autotune.attention_varlen(*call)
        counters.append(gpu.calls[-1]["tickets"])
    assert counters[0] == counters[1] and len(set(counters)) == 3


def replaced(index, value):
    call = list(packed())
    call[index] = value
    return call


@pytest.mark.parametrize("call, words", [
    (replaced(3, [0, 11]), "cu_seqlens_q is a list"),
    (replaced(3, Tensor(np.zeros(5, np.int64))), "cu_seqlens_q is int64; it must be int32"),
    (replaced(4, Tensor(np.zeros(5, np.float32))), "cu_seqlens_k is float32; it must be int32"),
    (replaced(4, starts(KEYS, device=1)), "cu_seqlens_k is on device 1 and q on device 0"),
    (replaced(3, starts(QUERIES, device=-1)), "cu_seqlens_q is in host memory"),
    (replaced(3, Tensor(np.zeros((5, 1), np.int32))), r"cu_seqlens_q has shape \(5, 1\); it must be \(batch \+ 1,\)"),
    (replaced(4, starts((7, 4))), "cu_seqlens_q has 5 and cu_seqlens_k 3 elements"),
    (replaced(5, None), "max_seqlen_q is None; it must be an int, .* so 11, the length of all, will do"),
    (replaced(6, None), "max_seqlen_k is None"),
    (replaced(6, 7.5), "max_seqlen_k is 7.5; it must be an int"),
    (replaced(5, -1), "max_seqlen_q is -1; it must be from 0"),
    (replaced(0, random((1, 11, 4, 64))), r"q has shape \(1, 11, 4, 64\); it must be \(total_q, heads_q, head_dim\)"),
    (replaced(1, random((11, 2, 32))), r"k has shape \(11, 2, 32\); it must be \(total_k, heads_kv, head_dim\)"),
    (replaced(2, random((12, 2, 64))), r"v has shape \(12, 2, 64\)"),
    (replaced(1, random((11, 2, 64), "fp16")), "q, k and v must have one dtype"),
    (replaced(1, np.zeros((11, 2, 64), np.float16)), "k is a ndarray"),
])
def test_what_does_not_fit_is_one_sentence(gpu, call, words):
    with pytest.raises(AttentionError, match=words):
        autotune.attention_varlen(*call)
    assert not gpu.launches


@pytest.mark.parametrize("keywords, words", [
    (dict(window=(-1, 0)), "left side is -1"), (dict(scale=float("nan")), "scale is nan"),
    (dict(softcap=-1.0), "softcap is -1.0"), (dict(sinks=random((3,), "fp32")), r"sinks has shape \(3,\)"),
    (dict(alibi_slopes=random((2, 4), "fp32")), r"or \(4, 4\)"),
    (dict(out=random((10, 4, 64))), r"it must have shape \(1, 11, 4, 64\)"), (dict(out=random((1, 11, 4, 64))), r"out has shape"),
])
def test_keywords_that_do_not_fit(gpu, keywords, words):
    with pytest.raises((AttentionError, ProblemError), match=words):
        autotune.attention_varlen(*packed(), **keywords)


def test_a_head_dim_that_no_kernel_computes(gpu):
    with pytest.raises(AttentionError, match="no kernel can serve forward-bf16-b4-.*-varlen .*: forward_wgmma: head_dim"):
        autotune.attention_varlen(*packed(head_dim=4096))


def test_what_requires_grad_goes_through_autograd(gpu, monkeypatch):
    recorded = []
    monkeypatch.setitem(sys.modules, "autotune.calls.autograd", SimpleNamespace(attend=lambda *call,
                                                                                **keywords: recorded.append(call)))
    monkeypatch.setattr(Tensor, "contiguous", lambda tensor: tensor, raising=False)
    q, *rest = packed()
    q.requires_grad = True
    autotune.attention_varlen(q, *rest)
    (function, _, *_, places, starts), = recorded
    assert function is autotune.attention_varlen and places == tuple(rest[2:]) == tuple(starts)


def test_explain_says_what_runs_and_what_is_copied(gpu):
    call = packed()
    explanation = autotune.explain_varlen(*call, causal=True)
    assert str(explanation.problem) == "forward-bf16-b4-h4x2-q6-k7-d64-causal-varlen"
    assert explanation.kernel.name == "forward_wgmma" and explanation.copies == () and "copies   none" in str(explanation)
    spread = Tensor(np.repeat(call[0].array, 2, axis=2)[..., ::2])
    every_other = Tensor(np.repeat(call[3].array, 2)[::2])
    explanation = autotune.explain_varlen(spread, *call[1:3], every_other, *call[4:], scale=-1.0)
    assert explanation.copies == ("q is negated, because scale is negative", "q is copied: its last stride is 2, not 1",
                                  "cu_seqlens_q is copied: its stride is not 1")
    backwards = Tensor(call[1].array[::-1])
    assert autotune.explain_varlen(call[0], backwards, *call[2:]).kernel.name == "forward_mma"
    assert autotune.explain_varlen(*packed(keys=(0, 0, 0, 0))[:5], 6, 0).kernel is None
    assert not gpu.launches and not gpu.built
    with pytest.raises(AttentionError, match="max_seqlen_q is None"):
        autotune.explain_varlen(*replaced(5, None))


def test_untuned_calls_say_so_once(gpu, recwarn):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for longest in (6, 2):
            autotune.attention_varlen(*packed()[:5], longest, 7)
    told = [str(one.message) for one in caught if one.category is plans.UntunedWarning]
    assert len(told) == 1 and "`autotune tune --problem forward-bf16-b4-h4x2-q6-k7-d64-varlen`" in told[0]
    assert caught[0].filename == __file__
