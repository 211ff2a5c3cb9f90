"""Gradients of calls on torch tensors: what is recorded, saved, refused. Kernels are replaced by torch's own arithmetic on the
CPU."""

import math
import weakref

import pytest

torch = pytest.importorskip("torch")

from autotune.calls import autograd, gradients  # noqa: E402
from autotune.calls.arguments import records  # noqa: E402
from autotune.core.gpu import by_name  # noqa: E402
from autotune.core.masks import CAUSAL, FULL  # noqa: E402
from autotune.device.arrays import AttentionError, library_of  # noqa: E402

pytestmark = pytest.mark.slow


def plain(q, k, v, sinks, scale, causal, starts=None):
    """(out, lse) of (B, S, H, D) tensors; with `starts` of packed sequences, (S, H, D) and equal starts of queries and keys."""
    if starts is not None:
        parts = [plain(*(array[None, begin:end] for array in (q, k, v)), sinks, scale, causal)
                 for begin, end in zip(starts, starts[1:])]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)
    group = q.shape[2] // k.shape[2]
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", p if sinks is None else p[..., :-1], v.repeat_interleave(group, 2)), lse


def forward(q, k, v, *places, sinks, return_lse, causal, window, scale, softcap, alibi_slopes, config):
    assert config is None and return_lse and not torch.is_grad_enabled()
    out, lse = plain(q.float(), k.float(), v.float(), sinks, scale, causal, places[0].tolist() if places else None)
    return out.to(q.dtype), lse.float()


def backward(library, q, k, v, out, lse, dout, dlse, sinks, slopes, mask, packed, want_sinks):
    assert dout.shape == out.shape and dout.dtype == q.dtype and (dlse is None or dlse.is_contiguous())
    arrays = [array.detach().float().requires_grad_() for array in (q, k, v)]
    sink = None if sinks is None else sinks.detach().float().requires_grad_()
    with torch.enable_grad():
        out, lse = plain(*arrays, sink, mask.scale, mask.bounds == CAUSAL, None
                         if packed is None else packed.cu_seqlens_q.tolist())
        loss = (out * dout.float()).sum() + (0 if dlse is None else (lse * dlse).sum())
        found = torch.autograd.grad(loss, arrays + ([sink] if sink is not None else []))
    return *(each.to(array.dtype) for each, array in zip(found, (q, k, v))), found[3].to(sinks.dtype) if want_sinks else None


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(gradients, "differentiate", backward)
    monkeypatch.setattr(autograd, "detect", lambda device: by_name("nvidia-h200"))
    autograd._refused.clear()


def attend(q, k, v, *, causal=True, scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None,
           starts=None):
    places = () if starts is None else (starts, starts, len(q), len(q))
    return autograd.attend(forward, library_of(q), q, k, v, places, gradients.Packed(*places) if places else None,
                           bounds=CAUSAL if causal else FULL, scale=scale, softcap=softcap, sinks=sinks,
                           alibi_slopes=alibi_slopes, return_lse=return_lse, out=out)


def tensors(dtype=torch.bfloat16, shape=(2, 20), requires_grad=True):
    torch.manual_seed(1)
    return [torch.randn(*shape, heads, 16, dtype=dtype, requires_grad=requires_grad) for heads in (4, 2, 2)]


def expected(arrays, loss, scale=0.25, sinks=None):
    copies = [array.detach().float().requires_grad_() for array in arrays]
    sink = None if sinks is None else sinks.detach().float().requires_grad_()
    loss(*plain(*copies, sink, scale, True)).backward()
    return [array.grad for array in copies] + ([] if sink is None else [sink.grad])


def close(got, wanted):
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.float() - theirs).abs().max() <= 0.02 * theirs.abs().max() + 1e-3


def test_gradients_of_out_lse_and_sinks():
    q, k, v = tensors()
    for dtype in (torch.float32, torch.bfloat16):
        sinks = torch.randn(4, dtype=dtype, requires_grad=True)
        def loss(out, lse):
            return (out.float() * torch.arange(16)).sum() + (lse * lse).sum()
        loss(*attend(q, k, v, sinks=sinks, return_lse=True)).backward()
        close([q.grad, k.grad, v.grad, sinks.grad], expected((q, k, v), loss, sinks=sinks))
        assert sinks.grad.dtype == dtype
        for array in (q, k, v):
            array.grad = None


def test_packed_sequences():
    q, k, v = tensors(shape=(30,))
    starts = torch.tensor([0, 7, 7, 30], dtype=torch.int32)
    attend(q, k, v, starts=starts).float().pow(2).sum().backward()
    copies = [array.detach().float().requires_grad_() for array in (q, k, v)]
    plain(*copies, None, 0.25, True, [0, 7, 7, 30])[0].pow(2).sum().backward()
    close([q.grad, k.grad, v.grad], [array.grad for array in copies])


def test_only_some_inputs_require_grad():
    q, k, v = tensors(requires_grad=False)
    sinks = torch.zeros(4, requires_grad=True)
    attend(q, k, v, sinks=sinks).sum().backward()
    assert sinks.grad is not None and q.grad is k.grad is v.grad is None
    k.requires_grad_()
    attend(q, k, v, sinks=sinks.detach()).sum().backward()
    assert k.grad is not None and q.grad is None


@pytest.mark.parametrize("what", ["expanded", "transposed", "lse only", "float32"])
def test_gradients_that_come_back_in_other_forms(what):
    q, k, v = tensors()
    out, lse = attend(q, k, v, return_lse=True)
    if what == "lse only":
        lse.sum().backward()
        close([q.grad, k.grad, v.grad], [*expected((q, k, v), lambda out, lse: lse.sum())[:2], torch.zeros(v.shape)])
    else:
        loss = {"expanded": lambda out: out.sum(), "transposed": lambda out: out.transpose(1, 2).contiguous().pow(2).sum(),
                "float32": lambda out: out.float().pow(2).sum()}[what]
        loss(out).backward()
        close([q.grad, k.grad, v.grad], expected((q, k, v), lambda out, lse: loss(out)))


def test_a_negative_scale():
    q, k, v = tensors()
    attend(q, k, v, scale=-0.5).float().pow(2).sum().backward()
    close([q.grad, k.grad, v.grad], expected((q, k, v), lambda out, lse: out.pow(2).sum(), scale=-0.5))


def test_graphs_can_be_kept_hooked_and_checkpointed():
    from torch.utils.checkpoint import checkpoint

    q, k, v = tensors()
    out = attend(q, k, v)
    out.sum().backward(retain_graph=True)
    once = q.grad.clone()
    out.sum().backward()
    assert torch.equal(q.grad, 2 * once)
    seen = []
    handle = q.register_hook(seen.append)
    for reentrant in (True, False):
        q.grad = None
        checkpoint(attend, q, k, v, use_reentrant=reentrant).sum().backward()
        assert torch.equal(q.grad, once) and torch.equal(seen.pop(), once)
    handle.remove()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_saved_tensors_are_freed_and_watched():
    q, k, v = tensors()
    out = attend(q, k, v)
    alive = weakref.ref(out)
    del out
    assert alive() is None
    out = attend(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_has_no_gradient_says_so():
    q, k, v = tensors()
    for keywords, words in ((dict(alibi_slopes=torch.ones(4, requires_grad=True)), "alibi_slopes requires grad"),
                            (dict(scale=torch.tensor(1.0, requires_grad=True)), "scale requires grad"),
                            (dict(out=torch.empty_like(q)), "out cannot be given")):
        with pytest.raises(AttentionError, match=words):
            attend(q, k, v, **keywords)
    with pytest.raises(AttentionError, match="fp32.*torch.no_grad"):
        attend(*(array.float() for array in (q, k, v)))
    gradient, = torch.autograd.grad(attend(q, k, v).float().pow(2).sum(), q, create_graph=True)
    with pytest.raises(AttentionError, match="differentiated twice"):
        gradient.float().sum().backward()


def test_forward_mode_is_refused():
    import torch.autograd.forward_ad as forward_ad

    q, k, v = tensors(requires_grad=False)
    library = library_of(q)
    assert not library.forward_mode() and not records(library, q, k, v, None)
    with forward_ad.dual_level():
        assert records(library, q, None)
        with pytest.raises(AttentionError, match="forward-mode"):
            attend(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    assert records(library, None, q.clone().requires_grad_())


def test_deterministic_algorithms_are_asked_for_in_the_backward(monkeypatch):
    asked = []
    monkeypatch.setattr(gradients, "differentiate", lambda *arguments: asked.append(arguments[10].deterministic)
                        or backward(*arguments))
    q, k, v = tensors()
    attend(q, k, v).sum().backward()
    out = attend(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True]


def test_of_nothing():
    sinks = torch.zeros(4, requires_grad=True)
    q, k, v = (torch.zeros(2, rows, heads, 16, dtype=torch.bfloat16, requires_grad=True)
               for rows, heads in ((3, 4), (0, 2), (0, 2)))
    call = autograd.Recorded(None, (), {}, library_of(q), None, None, None)
    dlse = torch.ones(2, 4, 3)
    dq, dk, dv, dsinks = call.backward(q, k, v, None, None, sinks, None, dlse, True)
    assert not dq.any() and dk.shape == k.shape and dv.shape == v.shape and dsinks.tolist() == [6.0] * 4
