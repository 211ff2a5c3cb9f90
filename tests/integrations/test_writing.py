"""write_kvcache on torch tensors: slots, 8 bits with scales, graphs, what it refuses, and attention over what was written."""

import pytest

torch = pytest.importorskip("torch")

from references import close, plain, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

import autotune  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_gpu")]
SLOTS = torch.tensor([6, -1, 11, 0, 5])


def pages(dtype=torch.bfloat16, dim_v=64):
    return torch.zeros(3, 4, 2, 64, dtype=dtype), torch.zeros(3, 4, 2, dim_v, dtype=dtype)


def tokens(dim_v=64):
    _, k, v = qkv(batch=1, keys=5, dim_v=dim_v)
    return k[0], v[0]


@pytest.mark.parametrize("slots", [SLOTS, SLOTS.int()])
def test_slots(slots):
    (k, v), (k_pages, v_pages) = tokens(dim_v=128), pages(dim_v=128)
    assert autotune.write_kvcache(k, v, k_pages, v_pages, slots) is None
    for cache, new in ((k_pages.flatten(0, 1), k), (v_pages.flatten(0, 1), v)):
        assert torch.equal(cache[[6, 11, 0, 5]], new[[0, 2, 3, 4]]) and cache.any(-1).any(-1).sum() == 4


@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor(0.5), torch.tensor([0.5, 2.0])])
def test_eight_bits_and_back(scale):
    (k, v), (k_pages, v_pages) = tokens(), pages(torch.float8_e4m3fn)
    autotune.write_kvcache(k, v, k_pages, v_pages, torch.arange(5), k_scale=scale, v_scale=scale)
    divisor = 1.0 if scale is None else torch.as_tensor(scale).view(-1, 1)
    assert torch.equal(k_pages.flatten(0, 1)[:5].float(), (k.float() / divisor).to(torch.float8_e4m3fn).float())
    q = qkv(batch=1, rows=1)[0]
    out = autotune.attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=torch.tensor([5], dtype=torch.int32),
                                          page_table=torch.tensor([[0, 1]], dtype=torch.int32), k_scale=scale, v_scale=scale)
    stored = [(x.float() / divisor).to(torch.float8_e4m3fn).float() * divisor for x in (k, v)]
    close(out, plain(q, *(x[None] for x in stored)))


def test_in_one_graph_with_attention(torch_gpu):
    (k, v), (k_pages, v_pages) = tokens(), pages()
    q, table, lengths = qkv(batch=1, rows=1)[0], torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)

    def step(q, k, v, k_pages, v_pages, slots):
        autotune.write_kvcache(k, v, k_pages, v_pages, slots)
        return autotune.attention_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths, page_table=table)

    out = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, k_pages, v_pages, torch.arange(5))
    close(out, plain(q, k[None], v[None]))
    assert [call["kernel"] for call in torch_gpu.calls][0] == "cache_write"


def test_refusals(torch_gpu):
    (k, v), (k_pages, v_pages) = tokens(), pages()
    for changed, match in (
        (dict(slot_mapping=SLOTS[: 3]),
         r"slot_mapping has shape \(3,\)"),
        (dict(slot_mapping=SLOTS.float()),
         "int32 or int64"),
        (dict(v=v[: 3]),
         r"v has shape \(3, 2, 64\)"),
        (dict(k_cache=k_pages[:,:,: 1]),
         "k_cache has shape"),
        (dict(k_cache=k_pages.half(),
              v_cache=v_pages.half()),
         "the cache is fp16"),
        (dict(k_scale=2.0),
         "k_scale must be None"),
        (dict(k=k.float(),
              v=v.float()),
         "keys and values are fp32"),
        (dict(v_cache=v_pages.half()),
         "one dtype"),
        (dict(k=k[0]),
         "k has shape")):
        arguments = {**dict(k=k, v=v, k_cache=k_pages, v_cache=v_pages, slot_mapping=SLOTS), **changed}
        with pytest.raises(autotune.AttentionError, match=match):
            autotune.write_kvcache(**arguments)
    torch_gpu.capturing = True
    with pytest.raises(autotune.AttentionError, match="before the capture"):
        autotune.write_kvcache(k, v, k_pages, v_pages, SLOTS)
    autotune.write_kvcache(k[:0], v[:0], k_pages, v_pages, SLOTS[:0])
