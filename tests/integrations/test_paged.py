"""Packed queries over pages in pieces that decode kernels take: arithmetic on the device, whatever the lengths."""

import pytest

torch = pytest.importorskip("torch")

from references import close, plain, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

from autotune.integrations import paged  # noqa: E402

pytestmark = pytest.mark.slow


def batch_of(queries, lengths, behind=0):
    starts = torch.tensor([0, *queries, *[0] * behind]).cumsum(0).int()
    table = torch.arange(len(queries) + behind).int()[:, None] * 8 + torch.arange(8).int()
    return paged.Batch(starts, torch.tensor([*lengths, *[0] * behind]).int(), table, max(queries), max(lengths))


def test_pieces_end_at_their_own_keys():
    made = batch_of([1, 40, 0, 16, 17], [9, 50, 3, 16, 20]).pieces(74)
    assert made.starts.tolist()[:8] == [0, 1, 17, 33, 41, 57, 73, 74] and set(made.starts.tolist()[8:]) == {74}
    assert made.lengths.tolist()[:7] == [9, 26, 42, 50, 16, 19, 20] and not any(made.lengths.tolist()[7:])
    assert made.table[:7, 0].tolist() == [0, 8, 8, 8, 24, 32, 32] and made.longest_q == 16
    assert len(made.lengths) == 74 // 16 + 5 and len(made.starts) == len(made.lengths) + 1


def test_pieces_of_a_padded_graph():
    """More rows of queries and more sequences than the batch has; all pieces that could be needed are there."""
    made = batch_of([20, 3], [20, 30], behind=2).pieces(64)
    assert made.starts.tolist() == [0, 16, 20] + [23] * 6 and made.lengths.tolist() == [16, 20, 30] + [0] * 5
    for queries in ([16] * 4, [64, 0, 0, 0], [17, 17, 17, 13], [1, 1, 1, 61]):
        cut = batch_of(queries, [64] * 4).pieces(64)
        assert int(cut.starts.diff().max()) <= 16 and int(cut.starts[-1]) == 64
        assert int((cut.lengths == 64).sum()) == sum(n > 0 for n in queries)  # each sequence's last piece sees all its keys


def test_an_8_bit_cache_of_a_batch_that_is_not_causal_is_refused(torch_gpu):
    q, k, v = (x[0] for x in qkv(1, 20, 20))
    pages = [torch.zeros(8, 4, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2)]
    with pytest.raises(NotImplementedError, match="is causal: choose a cache of 16 bits"):
        paged.attend(q, *pages, batch_of([20], [20]), causal=False)


def test_layers_share_pieces_and_one_query_each_needs_none(torch_gpu):
    q, k, v = qkv(2, 1, 32)
    batch = batch_of([1, 1], [32, 17])
    pages = [x.reshape(16, 4, 2, 64) for x in (k, v)]
    out = torch.zeros(2, 4, 64, dtype=q.dtype)
    close(paged.attend(q[:, 0], *pages, batch, out=out)[:1], plain(q[:1], k[:1], v[:1])[:, 0])
    close(out[1:], plain(q[1:], k[1:, :17], v[1:, :17])[:, 0])
    assert "cu_seqlens_q" not in torch_gpu.calls[-1] or not torch_gpu.calls[-1]["cu_seqlens_q"]
    assert batch._pieces is None and batch.pieces(2) is batch.pieces(2)
