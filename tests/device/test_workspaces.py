"""Workspaces that a stream keeps: whose they are, how many are made, and which launches get one."""

import threading

import numpy as np
from fake_arrays import Tensor, fake_gpu, qkv  # noqa: F401 (a fixture)
from fake_cuda import FakeError

import autotune
from autotune.device import workspaces

MB = 1 << 20
LENGTHS = Tensor(np.array([2000], np.int32))


def find(stream, size=1000, device=0):
    return workspaces.find(device, (stream, None), size)


def decode(**options):
    arrays = qkv(batch=1, seqlen_q=1, seqlen_k=2000)
    return autotune.attention_with_kvcache(*arrays, cache_seqlens=LENGTHS, num_splits=4, **options)


def test_a_stream_has_one_of_its_own(gpu):
    places = [find(stream, device=device) for stream in (1, 2) for device in (0, 1)]
    assert len(set(places)) == 4 and all(places)
    assert [find(stream, MB, device) for stream in (1, 2) for device in (0, 1)] == places
    assert [device for device, _ in gpu.memory] == [0, 1, 0, 1] and not gpu.unfinished


def test_it_grows_in_powers_of_two_and_not_without_end(gpu):
    first = find(1)
    second = find(1, MB + 4)
    assert second != first and find(1, 2 * MB) == find(1) == second
    assert find(1, workspaces.MOST_BYTES) and not find(1, workspaces.MOST_BYTES + 4)
    sizes = [len(memory) for _, memory in gpu.memory]
    assert sizes == [MB, 2 * MB, workspaces.MOST_BYTES] and sum(sizes) < 2 * workspaces.MOST_BYTES


def test_streams_that_come_and_go_do_not_use_up_the_device(gpu, monkeypatch):
    monkeypatch.setattr(workspaces, "MOST_OF_A_DEVICE", 3 * MB)
    places = [find(stream) for stream in range(5)]
    assert all(places[:3]) and places[3:] == [0, 0] and find(0) == places[0] and find(0, device=1)


def test_where_the_driver_has_no_memory_it_is_not_asked_again(gpu, monkeypatch):
    asked = []

    def malloc(size):
        asked.append(size)
        raise FakeError("cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(gpu, "malloc", malloc)
    assert find(1) == find(2) == 0 and asked == [MB]


def test_a_stream_that_is_not_told_from_others_has_none(gpu):
    assert workspaces.find(0, None, 1000) == 0 and not gpu.memory


def test_threads_that_ask_at_once_get_one(gpu):
    found = []
    threads = [threading.Thread(target=lambda: found.append(find(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(gpu.memory) == 1


def test_calls_on_a_stream_have_the_same_and_captured_ones_their_own(gpu):
    decode()
    first = gpu.calls[-1]["partial_o"]
    decode()
    assert gpu.calls[-1]["partial_o"] == first and not gpu.library.workspaces
    gpu.library.streams[0] = 75
    decode()
    assert gpu.calls[-1]["partial_o"] != first and not gpu.library.workspaces
    gpu.capturing = True
    decode()
    (_, capturing), = gpu.library.workspaces
    assert capturing and gpu.calls[-1]["partial_o"]


def test_calls_of_two_kernels_allocate(gpu):
    """Another thread's call on the stream may come between them."""
    chosen = autotune.lookup("decode-bf16-b1-h4x2-q1-k2000-d64", "nvidia-h200").config.text
    decode(config=chosen.replace("cluster_merges=true", "cluster_merges=false")
           .replace("last_block_merges=true", "last_block_merges=false"))
    assert [call["partial_o"] != 0 for call in gpu.calls] == [True, True] and len(gpu.library.workspaces) == 1
