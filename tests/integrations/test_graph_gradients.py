"""Gradients inside graphs: no breaks, what tracing sees is what a launch gives, numbers of plain attention. Kernels of the
backward are torch's own arithmetic on the CPU."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from references import close, plain, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

import autotune  # noqa: E402
from autotune.calls import autograd, gradients  # noqa: E402
from autotune.device.arrays import AttentionError  # noqa: E402
from autotune.integrations import training  # noqa: E402

pytestmark = pytest.mark.slow

ASKED = []


def differentiate(*arguments):
    """`gradients.differentiate` by torch's autograd over plain attention: in another thread, as operators run below autograd."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_differentiate, *arguments).result()


def _differentiate(library, q, k, v, out, lse, dout, dlse, sinks, slopes, mask, packed, want_sinks):
    ASKED.append(mask)
    arrays = [array.detach().float().requires_grad_() for array in (q, k, v)]
    sink = None if sinks is None else sinks.detach().float().requires_grad_()
    with torch.enable_grad():
        wanted = scored(*arrays, sink, mask, None if packed is None else packed.cu_seqlens_q.tolist())
        loss = sum((each * grad.float()).sum() for each, grad in zip(wanted, (dout, dlse)) if grad is not None)
        found = torch.autograd.grad(loss, arrays + ([] if sink is None else [sink]), allow_unused=True)
    filled = [torch.zeros_like(array) if each is None else each for each, array in zip(found, arrays + [sink])]
    return *(each.to(q.dtype).contiguous() for each in filled[:3]), filled[3] if want_sinks else None


def scored(q, k, v, sinks, mask, starts):
    if starts is not None:
        parts = [scored(*(array[None, begin:end] for array in (q, k, v)), sinks, mask, None)
                 for begin, end in zip(starts, starts[1:])]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)
    group, rows, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * mask.scale
    if mask.softcap:
        s = mask.softcap * torch.tanh(s / mask.softcap)
    if mask.bounds.window_right is not None:
        s = s.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", p if sinks is None else p[..., :-1], v.repeat_interleave(group, 2)), lse


@pytest.fixture(autouse=True)
def on_the_cpu(torch_gpu, monkeypatch):
    library = torch.library.Library("autotune", "IMPL")
    library.impl("attention_recorded", training.run_recorded, "CPU")
    library.impl("attention_backward", training.run_backward, "CPU")
    monkeypatch.setattr(gradients, "differentiate", differentiate)
    for module in (training, autograd):
        monkeypatch.setattr(module, "_must_be_served", lambda *_: None)
    ASKED.clear()
    yield
    library._destroy()


def step(q, k, v, sinks):
    out, lse = autotune.attention(q * 2, k, v, causal=True, softcap=5.0, sinks=sinks, return_lse=True)
    return (out.float() ** 2).sum() + lse.sum()


def grads(function, *arrays):
    copies = [array.detach().clone().requires_grad_() for array in arrays]
    function(*copies).backward()
    return [array.grad for array in copies]


def test_a_training_step_has_no_graph_break():
    q, k, v = qkv(rows=6, keys=6, dtype=torch.bfloat16)
    sinks = torch.randn(4)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found, wanted = grads(compiled, q, k, v, sinks), grads(step, q, k, v, sinks)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == theirs.dtype and torch.allclose(mine.float(), theirs.float(), rtol=0.03, atol=0.03)
    assert ASKED[0].softcap == 5.0 and ASKED[0].bounds.window_right == 0


def test_sizes_may_change_and_only_some_inputs_need_gradients():
    def loss(k, q, v):
        return autotune.attention(q, k, v, causal=True).float().pow(2).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 6, 9):
        q, k, v = qkv(rows=rows, keys=rows, dtype=torch.bfloat16)
        results = []
        for function in (compiled, loss):
            key = k.clone().requires_grad_()
            function(key, q, v).backward()
            results.append(key.grad.float())
        assert torch.allclose(*results, rtol=0.03, atol=0.03)


def test_packed_sequences():
    q, k, v = (array[0] for array in qkv(batch=1, rows=9, keys=9, dtype=torch.bfloat16))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)

    def loss(q, k, v):
        return autotune.attention_varlen(q, k, v, starts, starts, 5, 5, causal=True, scale=-0.3).float().pow(2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(grads(compiled, q, k, v), grads(loss, q, k, v), strict=True):
        assert torch.allclose(mine.float(), theirs.float(), rtol=0.03, atol=0.03)


def test_numbers_are_those_of_plain_attention():
    q, k, v = qkv(rows=6, keys=6, dtype=torch.float32)
    compiled = torch.compile(lambda *arrays: autotune.attention(*arrays, causal=True), fullgraph=True, backend="aot_eager")
    q.requires_grad_()
    close(compiled(q, k, v).detach(), plain(q.detach(), k, v, causal=True))


def test_what_tracing_sees_is_what_operators_give():
    q, k, v = (array.requires_grad_() for array in qkv(rows=5, keys=7, dtype=torch.bfloat16))
    rest = (None, None, None, None, 0, 0, 0.25, 0.0, -1, 0, *[0] * len(training.NUMBERS))
    torch.library.opcheck(torch.ops.autotune.attention_recorded.default, (q, k, v, *rest),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_what_has_no_gradient_says_so():
    q, k, v = (array.requires_grad_() for array in qkv(dtype=torch.bfloat16))
    slopes = torch.ones(4, requires_grad=True)
    for keywords, words in ((dict(alibi_slopes=slopes), "alibi_slopes requires grad"),
                            (dict(out=torch.empty_like(q)), "out cannot be given")):
        with pytest.raises(Exception, match=words):
            torch.compile(lambda: autotune.attention(q, k, v, **keywords), fullgraph=True, backend="aot_eager")()
    rest = (None, None, None, None, 0, 0, 0.25, 0.0, -1, 0, *[0] * len(training.NUMBERS))
    out, _ = torch.ops.autotune.attention_recorded.default(q, k, v, *rest)
    gradient, = torch.autograd.grad(out.float().pow(2).sum(), q, create_graph=True)
    with pytest.raises(AttentionError, match="differentiated twice"):
        gradient.float().sum().backward()


def test_determinism_is_asked_for_in_the_backward():
    q, k, v = qkv(dtype=torch.bfloat16)
    compiled = torch.compile(lambda q: autotune.attention(q, k, v).float().sum(), fullgraph=True, backend="aot_eager")
    torch.use_deterministic_algorithms(True)
    try:
        compiled(q.requires_grad_()).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert ASKED[-1].deterministic
