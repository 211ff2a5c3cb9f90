"""torch's flash attention computed by autotune: results, layouts, what falls back, and that restore gives it all back."""

import pytest

torch = pytest.importorskip("torch")

from references import close, plain, qkv  # noqa: E402
from torch.nn.attention import _registry, varlen  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

import autotune  # noqa: E402
from autotune.integrations import sdpa  # noqa: E402

pytestmark = pytest.mark.slow

FLASH = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture(name="before")
def stand_in():
    """What is there before, for tensors in host memory: answers with sevens and counts."""
    library, calls = torch.library.Library("aten", "IMPL"), []

    def seven(query, *inputs, **more):
        calls.append((inputs, more))
        batch, heads, rows, _ = query.shape
        lse = query.new_full((batch, heads, rows), 7.0, dtype=torch.float32)
        return torch.full_like(query, 7), lse, None, None, rows, rows, *sdpa._auxiliary(query)

    library.impl("_scaled_dot_product_flash_attention", seven, "CPU")
    yield calls
    library._destroy()


@pytest.fixture(name="active")
def active_on_host(before):
    handle = sdpa.override("CPU")
    yield
    handle.remove()


def heads_first(*tensors):
    return tuple(x.transpose(1, 2) for x in tensors)


@pytest.mark.parametrize("causal, dim_v, contiguous", [(False, 64, False), (True, 64, True), (False, 128, False)])
def test_scaled_dot_product(torch_gpu, active, causal, dim_v, contiguous):
    q, k, v = heads_first(*qkv(rows=7, keys=7, dim_v=dim_v))
    if contiguous:
        q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse, *_, rows, keys, seed, offset, debug = FLASH(q, k, v, 0.0, causal, scale=0.3)
    close(out.transpose(1, 2), plain(*heads_first(q, k, v), causal=causal, scale=0.3))
    assert dim_v != 64 or out.stride() == q.stride()  # as torch's own: the query's layout
    assert lse.shape == (2, 4, 7) and (rows, keys) == (7, 7) and seed.dtype == offset.dtype == torch.uint64
    assert torch_gpu.calls


@pytest.mark.parametrize("what", ["dropout", "debug mask", "gradient", "float64", "not square", "group"])
def test_the_rest_falls_back(torch_gpu, active, before, what):
    q, k, v = heads_first(*qkv(rows=5, keys=9 if what == "not square" else 5, dtype=torch.float64 if what ==
                          "float64" else torch.bfloat16, heads=3 if what == "group" else 4))
    q.requires_grad_(what == "gradient")
    out = FLASH(q, k, v, 0.1 if what == "dropout" else 0.0, what == "not square", what == "debug mask", scale=0.5)[0]
    assert (out == 7).all() and len(before) == 1 and before[0][1].get("scale") == 0.5
    assert not torch_gpu.calls


def test_restore_gives_everything_back(torch_gpu, before, monkeypatch):
    q, k, v = heads_first(*qkv(rows=5, keys=5))
    monkeypatch.setattr(sdpa.override, "__defaults__", ("CPU",))
    assert _registry.current_flash_attention_impl() is None
    for _ in range(2):
        autotune.activate()
        assert _registry.current_flash_attention_impl() == "autotune"
        close(FLASH(q, k, v)[0].transpose(1, 2), plain(*heads_first(q, k, v)))
        autotune.restore()
        assert (FLASH(q, k, v)[0] == 7).all() and _registry.current_flash_attention_impl() is None


def test_nothing_is_active_after_an_import():
    assert _registry.current_flash_attention_impl() is None


def test_packed_and_paged_sequences(torch_gpu, active):
    q, k, v = (x[0] for x in qkv(batch=1, rows=9, keys=9))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    expected = torch.cat([plain(*(x[None, a:b] for x in (q, k, v)), causal=True)[0] for a, b in ((0, 4), (4, 9))])
    out, lse = varlen.varlen_attn(q, k, v, starts, starts, 5, 5, enable_gqa=True,
                                  return_aux=varlen.AuxRequest(lse=True), window_size=(-1, 0))
    close(out, expected)
    assert lse.shape == (4, 9)
    pages, table = torch.full((6, 2, 2, 64), float("nan"), dtype=k.dtype), torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32)
    pages_v = pages.clone()
    for b, begin, length in ((0, 0, 4), (1, 4, 5)):
        for j in range(length):
            pages[table[b, j // 2], j % 2], pages_v[table[b, j // 2], j % 2] = k[begin + j], v[begin + j]
    out = varlen.varlen_attn(q, pages, pages_v, starts, None, 5, 6, window_size=(-1, 0), block_table=table, enable_gqa=True,
                             seqused_k=torch.tensor([4, 5], dtype=torch.int32))
    close(out, expected)


def test_packed_windows_and_used_keys(torch_gpu, active):
    q, k, v = qkv(batch=1, rows=4, keys=9)
    starts_q, starts_k = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)
    out = torch.ops.aten._flash_attention_forward(
        q[0],
        k[0],
        v[0],
        starts_q, starts_k, 3, 5, 0.0, False, False, window_size_left=2, window_size_right=0, seqused_k=torch.tensor(
            [2, 4],
            dtype=torch.int32)) [0]
    close(out[:1][None], plain(q[:, :1], k[:, :2], v[:, :2], window=(2, 0)))
    close(out[1:][None], plain(q[:, 1:], k[:, 4:8], v[:, 4:8], window=(2, 0)))
