"""attn_implementation="autotune" against eager, for tiny models of each kind: padding, packing, caches, generate, one graph."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from references import plain  # noqa: E402
from tiny_models import DECODERS, ENCODERS, pair, tokens  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

from autotune.integrations import layout, transformers as integration  # noqa: E402

KINDS = [*DECODERS, *ENCODERS]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_gpu", "registered")]


@pytest.fixture(scope="module", name="registered")
def register():
    integration.register()


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def padding(*sizes, rows=11):
    """A mask (B, rows): row b has sizes[b] pads before its tokens, or behind them if negative."""
    at = torch.arange(rows)
    return torch.stack([at >= size if size >= 0 else at < rows + size for size in sizes]).long()


def same(ours, eager, mask=None, atol=1e-4):
    assert ours.isfinite().all()  # of pads too: they are inputs of the next layer
    if mask is not None:
        ours, eager = ours * mask[..., None], eager * mask[..., None]
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pads", [None, (4, 0), (0, -5), (3, -3), (9, -10), (0, 0)])
def test_forward(kind, pads):
    eager, ours = pair(kind)
    x = tokens(2, 11)
    mask = None if pads is None else padding(*pads)
    same(ours(x, attention_mask=mask)[0], eager(x, attention_mask=mask)[0], mask)


@pytest.mark.parametrize("kind, without", [("mistral", dict(sliding_window=None)), ("gemma2", dict(attn_logit_softcapping=None)),
                                           ("gpt_oss", dict(s_aux=None)), ("modernbert", dict(sliding_window=None))])
def test_features_reach_the_kernel(kind, without, monkeypatch):
    """Each feature changes the answer, so that `test_forward` would notice its absence."""
    eager, ours = pair(kind)
    x = tokens(1, 11)
    name = {"attn_logit_softcapping": "softcap"}.get(*without) if len(without) == 1 and "attn_logit_softcapping" in without \
        else next(iter(without))
    forward = integration.attention_forward
    monkeypatch.setattr(integration, "attention_forward", lambda *args, **kw: forward(*args, **{**kw, name: None}))
    integration.register()
    try:
        assert (ours(x)[0] - eager(x)[0]).abs().max() > 1e-2
    finally:
        monkeypatch.undo()
        integration.register()


def test_without_the_mask_function_padding_is_lost(monkeypatch):
    """transformers drops masks of implementations that have no mask function, and says nothing."""
    eager, ours = pair("llama")
    monkeypatch.delitem(transformers.AttentionMaskInterface._global_mapping, integration.NAME)
    x, mask = tokens(2, 11), padding(4, 0)
    assert ((ours(x, attention_mask=mask)[0] - eager(x, attention_mask=mask)[0]) * mask[..., None]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_texts_answers_as_each_text_does(kind):
    """Unpadded, left-padded and right-padded: the same answers."""
    _, ours = pair(kind)
    texts = [tokens(1, 7, seed=1), tokens(1, 11, seed=2)]
    alone = [ours(text)[0] for text in texts]
    for sides in ((4, 0), (-4, 0)):
        first = torch.nn.functional.pad(texts[0], (4, 0) if sides[0] > 0 else (0, 4))
        mask = padding(*sides)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        together = ours(torch.cat([first, texts[1]]), attention_mask=mask, position_ids=positions)[0]
        same(together[0][mask[0].bool()], alone[0][0])
        same(together[1], alone[1][0])


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("lengths", [((4, 7),), ((4, 7), (1, 10))])
def test_packed_rows(kind, lengths):
    eager, ours = pair(kind)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    x = tokens(len(lengths), 11)
    out = ours(x, position_ids=positions, use_cache=False)[0]
    same(out, eager(x, position_ids=positions, use_cache=False)[0])


def test_packed_rows_as_a_collator_gives_them():
    eager, ours = pair("llama")
    x, positions = tokens(1, 11), torch.cat([torch.arange(4), torch.arange(7)])[None]
    starts = torch.tensor([0, 4, 11], dtype=torch.int32)
    out = ours(x, position_ids=positions, use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=7,
               max_length_k=7)[0]
    same(out, eager(x, position_ids=positions, use_cache=False)[0])


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pads", [None, (4, 0)])
def test_generate(kind, cache, pads):
    eager, ours = pair(kind)
    x = tokens(2, 9)
    mask = torch.ones_like(x) if pads is None else padding(*pads, rows=9)
    how = dict(attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation=cache, disable_compile=True)
    assert torch.equal(ours.generate(x, **how), eager.generate(x, **how))


@pytest.mark.parametrize("kind", DECODERS)
def test_a_prompt_in_two_pieces(kind):
    """More queries than one over a cache, with left padding, then a step without a mask."""
    eager, ours = pair(kind)
    x, mask = tokens(2, 9), padding(3, 0, rows=9)
    results = []
    for model in (ours, eager):
        first = model(x[:, :5], attention_mask=mask[:, :5], use_cache=True)
        second = model(x[:, 5:], attention_mask=mask, past_key_values=first.past_key_values, use_cache=True)
        results.append(torch.cat([first[0], second[0]], 1))
    same(*results, mask)
    results = []
    for model in (ours, eager):
        first = model(x[:, :7], use_cache=True)
        results.append(model(x[:, 7:], past_key_values=first.past_key_values, use_cache=True)[0])
    same(*results)


@pytest.mark.parametrize("kind", ["gemma2", "modernbert"])  # windows, full layers, a cap; both ways. 20 s each
def test_one_graph(kind, torch_gpu):
    """A whole model, with padding, packed or neither, has no graph break, and other paddings do not compile again."""
    eager, ours = pair(kind)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    x = tokens(2, 11)
    more = dict(use_cache=False) if kind in DECODERS else {}
    for pads in ((4, 0), (0, -5), (2, 1)):
        mask = padding(*pads)
        same(compiled(x, attention_mask=mask, **more)[0], eager(x, attention_mask=mask, **more)[0], mask)
    assert len(graphs) == 1
    same(compiled(x, **more)[0], eager(x, **more)[0])
    if kind in DECODERS:
        positions = torch.cat([torch.arange(4), torch.arange(7)])[None].expand(2, -1)
        same(compiled(x, position_ids=positions, **more)[0], eager(x, position_ids=positions, **more)[0])
    assert torch_gpu.calls


def test_nothing_waits_for_the_device(monkeypatch):
    """No number is read from a tensor on the way through mask and attention."""
    _, ours = pair("llama")
    x, mask = tokens(2, 9), padding(3, 0, rows=9)

    def refuse(*_):
        raise AssertionError("a tensor was read on the host")

    cache = ours(x[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    for name in ("item", "tolist", "__bool__", "nonzero", "numpy", "cpu", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    ours(x[:, 5:], attention_mask=mask, past_key_values=cache, position_ids=torch.arange(5, 9)[None])


def test_layers_share_what_was_made_of_the_mask(monkeypatch):
    _, ours = pair("llama")
    made = []
    monkeypatch.setattr(layout, "_sequences", lambda *args, make=layout._sequences: made.append(args) or make(*args))
    ours(tokens(2, 11), attention_mask=padding(4, 0))
    assert len(made) == 1


def test_keys_are_not_copied():
    """Heads outermost, as caches have them: rows of all batch entries are one view."""
    k = torch.randn(3, 2, 7, 16).transpose(1, 2)
    one, other, gap = layout.as_rows(k, k, 3)
    rows = layout.joined(one)
    assert one is other is k and gap == 7 and rows.data_ptr() == k.data_ptr()
    for b in range(3):
        assert torch.equal(rows[b * 14:b * 14 + 7], k[b])
    odd = torch.randn(3, 7, 2, 17)[..., :16]
    assert torch.equal(layout.joined(layout.as_rows(odd, odd, 3)[0])[7:14], odd[1])


@pytest.mark.parametrize("keys, firsts", [(40, (37, 3)), (40, (3, 39)), (11, (4, 0))])
def test_a_padded_step_reads_whole_pages(torch_gpu, keys, firsts):
    """Pages begin at a row's first token, so they overlap; the last one may reach beyond what is there. `window` and positions
    count from the first token, too."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, 16, generator=generator)
    k, v = (torch.randn(2, 2, keys, 16, generator=generator) for _ in range(2))
    mask = torch.arange(keys) >= torch.tensor(firsts)[:, None]
    spans = layout.spans(mask, 2, keys, keys - 1, 0, "cpu")
    module = pair("llama")[0].model.layers[0].self_attn
    out, _ = integration.attention_forward(module, q, k, v, spans, scaling=0.25, sliding_window=9)
    assert torch_gpu.calls[-1]["page_size"] == (16 if 2 * keys >= 16 else 1)
    for b, first in enumerate(firsts):
        expected = plain(*(x[b:b + 1, :, -keys + first:].transpose(1, 2) if x is not q else x[b:b + 1].transpose(1, 2)
                           for x in (q, k, v)), causal=True, window=(8, None), scale=0.25)
        torch.testing.assert_close(out[b:b + 1].double(), expected, rtol=1e-4, atol=1e-4)


def test_holes_in_a_mask_stop():
    _, ours = pair("llama")
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 5] = 0
    with pytest.raises(RuntimeError, match="padding between its tokens"):
        ours(tokens(2, 11), attention_mask=mask)


def test_too_many_packed_sequences_stop(monkeypatch):
    _, ours = pair("llama")
    monkeypatch.setattr(integration, "LEAST_SEQUENCES", 2)
    with pytest.raises(RuntimeError, match="TOKENS_A_SEQUENCE"):
        ours(tokens(1, 11), position_ids=torch.zeros(1, 11, dtype=torch.long), use_cache=False)


def test_what_is_not_served_says_so():
    _, ours = pair("llama")
    x = tokens(1, 5)
    with pytest.raises(NotImplementedError, match='load this model with attn_implementation="sdpa"'):
        ours(x, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))
    attention = ours.model.layers[0].self_attn
    q = torch.randn(1, 4, 5, 16)
    with pytest.raises(NotImplementedError, match="attention_dropout"):
        integration.attention_forward(attention, q, q, q, None, dropout=0.1)
    from transformers.masking_utils import create_causal_mask
    with pytest.raises(NotImplementedError, match="a mask function of its own"):
        create_causal_mask(ours.config, torch.randn(1, 5, 64), None, None, or_mask_function=lambda b, h, q, k: q >= 0)
    with pytest.raises(NotImplementedError, match="the mask function or_masks"):
        create_causal_mask(ours.config, torch.randn(1, 5, 64), None, None, block_sequence_ids=torch.zeros(1, 5, dtype=torch.long))


def test_float32_norms_of_a_model_of_16_bits():
    eager, ours = pair("llama", torch.bfloat16)
    module, q = ours.model.layers[0].self_attn, torch.randn(1, 4, 5, 16)
    out, _ = integration.attention_forward(module, q, q, q, None)
    assert out.dtype == torch.bfloat16 and out.shape == (1, 5, 4, 16) and out.is_contiguous()
    x, mask = tokens(2, 11), padding(4, 0)
    same(ours(x, attention_mask=mask)[0].float(), eager(x, attention_mask=mask)[0].float(), mask, atol=0.5)
