"""Gradients of whole models against those of eager: through masks, padding and packing, of every parameter, sinks too. Kernels of
the backward are replaced by torch's own arithmetic."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from references import plain, qkv  # noqa: E402
from tiny_models import pair, tokens  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

import autotune  # noqa: E402
from autotune.calls import autograd  # noqa: E402
from autotune.integrations import layout  # noqa: E402

pytestmark = pytest.mark.slow

MASK = torch.ones(2, 11, dtype=torch.long)
MASK[0, :4] = 0
PACKED = torch.stack([torch.cat([torch.arange(4), torch.arange(7)]), torch.cat([torch.arange(1), torch.arange(10)])])


def differentiate(library, q, k, v, out, lse, dout, dlse, sinks, slopes, mask, packed, want_sinks):
    """What the kernels compute, in float64: of one call, or of packed sequences one by one."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    sink = leaves[3] if sinks is not None else None
    with torch.enable_grad():
        how = dict(window=mask.bounds[:2], scale=mask.scale, softcap=mask.softcap, sinks=sink)
        if packed is None:
            attended = plain(*leaves[:3], **how)
        else:
            starts = zip(*(pairs for x in packed[:2] for pairs in (x.tolist(), x.tolist()[1:])))
            attended = torch.cat([plain(leaves[0][None, a:b], leaves[1][None, c:d], leaves[2][None, c:d], **how)[0]
                                  if d > c else leaves[0][a:b] * 0 for a, b, c, d in starts if b > a])
        found = torch.autograd.grad(attended, leaves, dout.double()[:attended.shape[0]], allow_unused=True)
    found = [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves)]
    return *(each.to(x.dtype) for each, x in zip(found, (q, k, v))), found[3].to(sinks.dtype) if want_sinks else None


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch, torch_gpu):
    monkeypatch.setattr(autograd.gradients, "differentiate", differentiate)
    monkeypatch.setattr(autograd, "_must_be_served", lambda *_: None)


@pytest.mark.parametrize("kind, how", [("llama", "padded"), ("gemma2", "plain"), ("gemma2", "padded"), ("gpt_oss", "padded"),
                                       ("gpt_oss", "packed"), ("modernbert", "padded")])
def test_gradients_of_every_parameter(kind, how):
    x, weight = tokens(2, 11), torch.randn(2, 11, 97 if kind != "modernbert" else 64, generator=torch.Generator().manual_seed(5))
    arguments = dict(padded=dict(attention_mask=MASK), packed=dict(position_ids=PACKED), plain={})[how]
    found = []
    for model in pair(kind):
        model.zero_grad()
        out = model(x, **arguments, **({} if kind == "modernbert" else dict(use_cache=False)))[0]
        ((out * weight * (MASK[..., None] if how == "padded" else 1)).sum()).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    eager, ours = found
    assert kind != "gpt_oss" or any(name.endswith("sinks") and grad.abs().max() > 0 for name, grad in ours.items())
    for name, grad in eager.items():
        assert (grad is None) == (ours[name] is None), name
        if grad is not None:
            assert (ours[name] - grad).abs().max() <= 1e-3 * grad.abs().max() + 1e-5, name


def test_no_gradients_where_none_are_recorded():
    q, k, v = (x.requires_grad_() for x in qkv())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not autotune.attention(q, k, v).requires_grad
    assert autotune.attention(q, k, v).requires_grad


def test_rows_that_are_trained_do_not_overlap():
    """Views whose rows overlap have gradients that torch adds up one by one."""
    k = torch.randn(3, 2, 7, 16).transpose(1, 2).contiguous()
    rows = layout.joined(layout.as_rows(k, k, 3)[0])
    assert rows.data_ptr() == k.data_ptr() and rows.shape == (21, 2, 16) and torch.equal(rows, k.flatten(0, 1))
    q = k.requires_grad_()
    assert "as_strided" not in layout.joined(q).grad_fn.name().lower()
