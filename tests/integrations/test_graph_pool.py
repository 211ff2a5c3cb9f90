"""What a call allocates from torch does not outlive it: torch refuses to record a graph (`mode="reduce-overhead"`) whose pool
holds more than its outputs, also of what was allocated while it warmed up, when no capture can be seen."""

import gc

import pytest

torch = pytest.importorskip("torch")

from references import close, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

import autotune  # noqa: E402
from autotune.calls import autograd  # noqa: E402
from autotune.device import counters  # noqa: E402

pytestmark = pytest.mark.slow

STARTS = torch.tensor([0, 2, 5, 30], dtype=torch.int32)
LENGTHS = torch.tensor([450, 7], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.2], dtype=torch.bfloat16)  # read as float32, so copied


def split_decode():
    return autotune.attention_with_kvcache(*qkv(rows=1, keys=500), cache_seqlens=LENGTHS, num_splits=4, alibi_slopes=SLOPES)


def mixed_batch():
    q, k, v = qkv(batch=1, rows=30, keys=64)
    return autotune.attention_with_kvcache(
        q[0], k.view(4, 16, 2, 64), v.view(4, 16, 2, 64), cu_seqlens_q=STARTS, page_table=torch.tensor([[0], [1], [2]]).int(),
        cache_seqlens=torch.tensor([5, 9, 16]).int(), return_lse=True)


def packed():
    q, k, v = (x[0] for x in qkv(batch=1, rows=30, keys=30))
    return autotune.attention_varlen(q, k, v, STARTS, STARTS, 25, 25, causal=True, return_lse=True)


def strided():
    q, k, v = qkv(rows=5, keys=40)
    return autotune.attention(q[..., ::2], k[..., ::2], v[..., ::2], alibi_slopes=SLOPES)


def written():
    _, k, v = qkv(batch=1, keys=3)
    autotune.write_kvcache(k[0], v[0], *(torch.zeros(2, 8, 2, 64, dtype=k.dtype) for _ in range(2)), torch.tensor([3, 4, 9]))


def differentiated():
    q, k, v = (x.requires_grad_() for x in qkv())
    autotune.attention(q, k, v).float().sum().backward()


def storages() -> set:
    """Addresses of all memory that some tensor holds, but for fake ones, which other tests may have left."""
    tensors = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.device.type == "cpu"}


def kept(result) -> set:
    results = result if isinstance(result, tuple) else (result,)
    return {output.untyped_storage().data_ptr() for output in results if output is not None}


CALLS = split_decode, mixed_batch, packed, strided, written, differentiated


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_nothing_that_a_call_allocates_is_kept(torch_gpu, monkeypatch, call):
    monkeypatch.setattr(autograd.gradients, "differentiate", lambda library, q, k, v, *_: (q * 0, k * 0, v * 0, None))
    monkeypatch.setattr(autograd, "_must_be_served", lambda *_: None)
    call()  # loads, warns
    for stream, capturing in ((71, False), (72, True)):  # torch warms up on a stream of its own, then captures on it
        torch_gpu.tensors.stream, torch_gpu.capturing = (lambda device, stream=stream: stream), capturing
        before = storages()
        result = call()
        assert storages() - before <= kept(result)
        if capturing and torch_gpu.calls[-1].get("tickets"):  # once more, with no counters left that were made ahead
            counters._reserve.clear()
            before = storages()
            again = call()
            assert storages() - before <= kept(again) and torch_gpu.calls[-1]["tickets"]
        del result


def test_counters_are_the_drivers_and_zero(torch_gpu, monkeypatch):
    """In whatever pool torch allocates now; at most one request of the driver for many streams."""
    monkeypatch.setattr("autotune.device.workspaces.MOST_BYTES", 0)
    begun = len(torch_gpu.memory)
    pointers = []
    for stream in (80, 81, 80):
        torch_gpu.tensors.stream = lambda device, stream=stream: stream
        close(split_decode(), reference())
        pointers.append(torch_gpu.calls[-1]["tickets"])
    assert pointers[0] == pointers[2] != pointers[1] and len(torch_gpu.memory) == begun + 1
    device, memory = torch_gpu.memory[-1]
    assert device == 0 and memory.raw == bytes(4 * counters.RESERVE) and not torch_gpu.unfinished


def reference():
    q, k, v = qkv(rows=1, keys=500)
    slopes, rows = SLOPES.double(), []
    for b, length in enumerate(LENGTHS.tolist()):
        away = torch.arange(length).sub(length - 1).abs()
        queries, keys, values = (x[b:b + 1, :length].double().transpose(1, 2) for x in (q, k, v))
        scores = queries @ keys.repeat_interleave(2, 1).mT / 8 - slopes[:, None, None] * away
        rows.append((scores.softmax(-1) @ values.repeat_interleave(2, 1)).transpose(1, 2))
    return torch.cat(rows)


@pytest.mark.gpu
def test_reduce_overhead_records_what_draws_tickets():
    """torch warms up, records and replays; lengths change between replays."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, rows, heads, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
               for rows, heads in ((1, 4), (2000, 2), (2000, 2)))
    starts = torch.tensor([0, 700, 2000], dtype=torch.int32, device="cuda")

    def steps(q, k, v, lengths):
        decoded = autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=4)
        return decoded, autotune.attention_varlen(k[0], k[0], v[0], starts, starts, 1300, 1300, causal=True)

    compiled = torch.compile(steps, mode="reduce-overhead", fullgraph=True)
    for length in (1900, 1900, 1900, 12, 333):
        lengths = torch.tensor([length, 7], dtype=torch.int32, device="cuda")
        for one, other in zip(compiled(q, k, v, lengths), steps(q, k, v, lengths)):
            torch.testing.assert_close(one.clone(), other)
