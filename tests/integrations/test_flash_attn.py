"""autotune.flash_attn: signatures are those of flash-attn's wheels, parameters served or refused by name, numbers right."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml

torch = pytest.importorskip("torch")

from references import close, plain, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

from autotune import flash_attn as fa2  # noqa: E402
from autotune.calls import autograd  # noqa: E402
from autotune.flash_attn import cute as fa4, interface as fa3  # noqa: E402

pytestmark = pytest.mark.slow

SIGNATURES = yaml.safe_load((Path(__file__).parents[1] / "data" / "flash_attn_signatures.yaml").read_text())
OURS = {"flash_attn": "autotune.flash_attn", "flash_attn_interface": "autotune.flash_attn.interface",
        "flash_attn.cute": "autotune.flash_attn.cute"}
FUNCTIONS = [(module, name) for module, functions in SIGNATURES.items() for name in functions]
SERVED = {"q", "k", "v", "kv", "qkv", "k_cache", "v_cache", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
          "return_attn_probs", "return_softmax_lse", "return_lse", "learnable_sink", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens",
          "max_seqlen_q", "max_seqlen_k", "max_seqlen", "block_table", "page_table", "seqused_k", "cache_seqlens",
          "cache_batch_idx", "cache_leftpad", "num_heads_q"}
HINTS = {"deterministic", "num_splits", "pack_gqa", "scheduler_metadata", "min_seqlen_k", "disable_scheduler_metadata",
         "rotary_interleaved"}
OF_A_CACHE = {"k_descale", "v_descale"}  # with_kvcache of FlashAttention 3 serves them, its other functions refuse them


def starts(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("module, name", FUNCTIONS)
def test_signature(module, name):
    ours = inspect.signature(getattr(import_module(OURS[module]), name)).parameters.values()
    theirs = [next(iter(one.items())) if isinstance(one, dict) else (one, None) for one in SIGNATURES[module][name]]
    assert [p.name for p in ours] == [parameter for parameter, _ in theirs]
    for parameter, (_, default) in zip(ours, theirs):
        assert parameter.default == (inspect.Parameter.empty if default is None else ast.literal_eval(default)), parameter


def call_of(module, name):
    """(function, arguments that it serves)"""
    q, k, v = qkv(rows=6, keys=6, heads=2)
    packed = dict(cu_seqlens_q=starts(4, 8), cu_seqlens_k=starts(4, 8), max_seqlen_q=8, max_seqlen_k=8)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    arguments = {
        "flash_attn_func": dict(q=q, k=k, v=v), "flash_attn_kvpacked_func": dict(q=q, kv=torch.stack((k, v), 2)),
        "flash_attn_qkvpacked_func": dict(qkv=torch.stack((q, k, v), 2)),
        "flash_attn_varlen_func": dict(q=flat[0], k=flat[1], v=flat[2], **packed),
        "flash_attn_varlen_kvpacked_func": dict(q=flat[0], kv=torch.stack(flat[1:], 1), **packed),
        "flash_attn_varlen_qkvpacked_func": dict(qkv=torch.stack(flat, 1), cu_seqlens=starts(4, 8), max_seqlen=8),
        "flash_attn_with_kvcache": dict(q=q, k_cache=k, v_cache=v)}
    return getattr(import_module(OURS[module]), name), arguments[name]


@pytest.mark.parametrize("module, name", FUNCTIONS)
def test_what_is_not_served_is_refused_by_name(torch_gpu, module, name):
    function, arguments = call_of(module, name)
    function(**arguments)
    with_cache = name == "flash_attn_with_kvcache"
    refused = [p for p in inspect.signature(function).parameters
               if p not in SERVED | HINTS and not (with_cache and p in OF_A_CACHE | {"k", "v"})]
    assert refused
    for parameter in refused:
        with pytest.raises(NotImplementedError, match=f"^{parameter} of "):
            function(**arguments, **{parameter: torch.ones(2)})
    assert len(torch_gpu.calls) <= 2  # nothing ran but the call that is served


def test_hints_change_nothing(torch_gpu):
    for module, name in FUNCTIONS:
        function, arguments = call_of(module, name)
        expected = function(**arguments)
        for hint in HINTS & set(inspect.signature(function).parameters):
            again = function(**arguments, **{hint: {"scheduler_metadata": torch.ones(2)}.get(hint, 1)})
            for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (expected, again))):
                assert one is other is None or torch.equal(one, other), (name, hint)


def test_masks_scales_slopes_and_lse_in_each_generation(torch_gpu):
    q, k, v = qkv(rows=5, keys=9)
    mask = dict(softmax_scale=0.2, causal=True, window_size=(3, -1), softcap=7.0)
    expected = plain(q, k, v, scale=0.2, causal=True, window=(3, None), softcap=7.0)
    close(fa2.flash_attn_func(q, k, v, **mask), expected)
    out, lse, probabilities = fa2.flash_attn_func(q, k, v, **mask, return_attn_probs=True)
    close(out, expected)
    assert lse.shape == (2, 4, 5) and probabilities is None
    out, lse_3 = fa3.flash_attn_func(q, k, v, **mask, return_attn_probs=True)
    assert torch.equal(lse, lse_3)
    out, nothing = fa4.flash_attn_func(q, k, v, **mask)
    close(out, expected)
    assert nothing is None
    sinks = torch.randn(4)
    close(fa4.flash_attn_func(q, k, v, learnable_sink=sinks, return_lse=True)[0], plain(q, k, v, sinks=sinks))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1])
    assert not torch.equal(fa2.flash_attn_func(q, k, v, alibi_slopes=slopes), fa2.flash_attn_func(q, k, v))


@pytest.mark.parametrize("module, name", [one for one in FUNCTIONS if one[1] != "flash_attn_with_kvcache"])
def test_gradients(torch_gpu, monkeypatch, module, name):
    """Those of autotune's calls; `deterministic` ones are refused until torch is told so."""
    monkeypatch.setattr(autograd.gradients, "differentiate", lambda library, q, k, v, *_: (q * 0 + 1, k * 0 + 2, v * 0 + 3, None))
    monkeypatch.setattr(autograd, "_must_be_served", lambda *_: None)
    function, arguments = call_of(module, name)
    inputs = [arguments[key].requires_grad_() for key in ("q", "k", "v", "kv", "qkv") if key in arguments]
    out = function(**arguments)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    assert {float(number) for one in inputs for number in one.grad.unique()} == {1, 2, 3}
    if "deterministic" in inspect.signature(function).parameters:
        with pytest.raises(NotImplementedError, match=r"^deterministic of .*use_deterministic_algorithms\(True\)"):
            function(**arguments, deterministic=True)
        with torch.no_grad():
            function(**arguments, deterministic=True)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        function(**arguments, deterministic=True)


def test_packed_variants_of_fa3(torch_gpu):
    q, k, v = qkv(rows=6, keys=6)
    close(fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=4, causal=True), plain(q, k, v, causal=True))


def test_sequences_and_their_pages(torch_gpu):
    q, k, v = qkv(batch=1, rows=9, keys=9)
    packed = starts(4, 5)
    expected = torch.cat([plain(x[0], x[1], x[2], causal=True) for x in ([y[:, :4] for y in (q, k, v)],
                                                                         [y[:, 4:] for y in (q, k, v)])], 1)[0]
    close(fa2.flash_attn_varlen_func(q[0], k[0], v[0], packed, packed, 5, 5, causal=True), expected)
    close(fa4.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=packed, cu_seqlens_k=packed, causal=True)[0], expected)
    pages = torch.full((6, 2, 2, 64), float("nan"), dtype=k.dtype)
    pages_v, table = pages.clone(), ints(3, 1, 0, 5, 4, 2).view(2, 3)
    for b, (begin, end) in enumerate(((0, 4), (4, 9))):
        for j in range(end - begin):
            pages[table[b, j // 2], j % 2], pages_v[table[b, j // 2], j % 2] = k[0, begin + j], v[0, begin + j]
    close(fa2.flash_attn_varlen_func(q[0], pages, pages_v, packed, packed, 5, 5, causal=True, block_table=table), expected)
    out, lse = fa4.flash_attn_varlen_func(q[0], pages, pages_v, cu_seqlens_q=packed, seqused_k=ints(4, 5), page_table=table,
                                          max_seqlen_q=5, causal=True, return_lse=True)
    close(out, expected)
    assert lse.shape == (4, 9)
    out, _ = fa4.flash_attn_varlen_func(q[:, :4], pages, pages_v, seqused_k=ints(4), page_table=table[:1], causal=True)
    close(out[0], expected[:4])


def test_used_keys_of_packed_sequences(torch_gpu):
    q, k, v = qkv(batch=1, rows=4, keys=9)
    out = fa3.flash_attn_varlen_func(q[0], k[0], v[0], starts(1, 3), starts(4, 5), 3, 5, seqused_k=ints(2, 5), causal=True)
    close(out[:1][None], plain(q[:, :1], k[:, :2], v[:, :2]))
    close(out[1:][None], plain(q[:, 1:], k[:, 4:], v[:, 4:], causal=True))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("fa", [fa2, fa3])
def test_new_keys_are_written_behind_the_cache(torch_gpu, fa, paged):
    q, k, v = qkv(rows=2, keys=8)
    _, new_k, new_v = qkv(rows=2, keys=2, seed=3)
    k_cache, v_cache, where = k.clone(), v.clone(), {}
    if paged:
        k_cache, v_cache = (torch.zeros(8, 3, 2, 64, dtype=k.dtype) for _ in range(2))
        where = {"block_table" if fa is fa2 else "page_table": ints(7, 0, 3, 4, 6, 1).view(2, 3)}
        for b, j in ((b, j) for b in range(2) for j in range(8)):
            page = next(iter(where.values()))[b, j // 3]
            k_cache[page, j % 3], v_cache[page, j % 3] = k[b, j], v[b, j]
    out = fa.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, cache_seqlens=ints(3, 6), causal=True, **where)
    for b, length in ((0, 3), (1, 6)):
        keys, values = (torch.cat((x[b:b + 1, :length], new[b:b + 1]), 1) for x, new in ((k, new_k), (v, new_v)))
        close(out[b:b + 1], plain(q[b:b + 1], keys, values, causal=True))
        if not paged:
            assert torch.equal(k_cache[b, length:length + 2], new_k[b]) and torch.equal(k_cache[b, :length], k[b, :length])


def test_rows_of_the_cache_and_left_padding(torch_gpu):
    q, k, v = qkv(batch=3, rows=1, keys=8)
    rows, first = ints(2, 0), ints(1, 3)
    out = fa2.flash_attn_with_kvcache(q[:2], k, v, cache_seqlens=ints(5, 8), cache_batch_idx=rows)
    close(out[:1], plain(q[:1], k[2:, :5], v[2:, :5]))
    close(out[1:], plain(q[1:2], k[:1], v[:1]))
    out, lse = fa3.flash_attn_with_kvcache(q[:2], k, v, cache_seqlens=ints(5, 8), cache_batch_idx=rows, cache_leftpad=first,
                                           return_softmax_lse=True)
    close(out[:1], plain(q[:1], k[2:, 1:5], v[2:, 1:5]))
    close(out[1:], plain(q[1:2], k[:1, 3:], v[:1, 3:]))
    assert lse.shape == (2, 4, 1)
    out = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=6)
    close(out, plain(q, k[:, :6], v[:, :6]))


def test_descales_of_an_8_bit_cache(torch_gpu):
    q, k, v = qkv(rows=1, keys=8)
    k8, v8 = (x.float().to(torch.float8_e4m3fn) for x in (k, v))
    scales = torch.tensor([0.5, 2.0])
    expected = plain(q, k8.float() * scales[:, None], v8.float() * scales[:, None])
    close(fa3.flash_attn_with_kvcache(q, k8, v8, k_descale=scales.expand(2, 2), v_descale=scales), expected)
    with pytest.raises(NotImplementedError, match="v_descale of each sequence"):
        fa3.flash_attn_with_kvcache(q, k8, v8, v_descale=torch.ones(2, 2))


def test_refusals_say_what_to_do(torch_gpu):
    q, k, v = qkv(rows=1)
    with pytest.raises(NotImplementedError, match="rotary_cos of flash_attn 2 is not supported.*rotate q and k before"):
        fa2.flash_attn_with_kvcache(q, k, v, rotary_cos=torch.ones(7, 8), rotary_sin=torch.ones(7, 8))
    with pytest.raises(ValueError, match="k and v must both be given"):
        fa2.flash_attn_with_kvcache(q, k, v, k=k)
    with pytest.raises(ValueError, match="cache_seqlens is None"):
        fa2.flash_attn_with_kvcache(q, k, v, k=k, v=v)
