"""Counters that launches draw from belong to one stream for as long as the process lives, whatever becomes of its handle."""

import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from fake_arrays import FakeGpu, Tensor, fake_gpu, qkv, random  # noqa: F401 (a fixture)

import autotune
from autotune.device import capture, counters

LIKE = SimpleNamespace(device=0)


def taken(gpu, stream, count=4):
    return counters.take(gpu.library, LIKE, 0, counters.stream_id(stream), count, False)[0]


def test_a_stream_with_the_handle_of_one_that_was_destroyed_has_other_counters(gpu):
    first = taken(gpu, 77)
    assert taken(gpu, 77) == first
    gpu.stream_ids[77] = 1001  # destroyed, perhaps while its launches are still to run, and made again
    second = taken(gpu, 77)
    assert second != first and taken(gpu, 77) == second
    with counters._lock:
        (_, size), *_ = counters._in_use.values()
    assert abs(second - first) >= 4 * size


def test_default_streams_need_no_name(gpu, monkeypatch):
    monkeypatch.setattr(counters, "_id_of", lambda: pytest.fail("asked"))
    assert len({taken(gpu, stream) for stream in (0, 1, 2)}) == 3


def test_a_thread_that_comes_after_another_has_a_default_stream_of_its_own(gpu):
    """Python gives the number of a thread that has ended to the next one."""
    found = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: found.append((threading.get_ident(), taken(gpu, capture.PER_THREAD))))
        thread.start()
        thread.join()
    assert len({pointer for _, pointer in found}) == 4


@pytest.mark.parametrize("without", ["a name", "room"])
def test_a_stream_that_is_not_told_from_others_draws_from_new_counters_each_time(gpu, without, monkeypatch):
    """A driver older than CUDA 12 gives streams no name; and of streams that come and go without end only so many are kept."""
    if without == "room":
        monkeypatch.setattr(counters, "MOST_STREAMS", 3)
        kept = [taken(gpu, 100 + n) for n in range(3)]
        assert not gpu.library.workspaces
    else:
        monkeypatch.setattr(counters, "_id_of", lambda: None)
    for _ in range(3):
        pointer, array = counters.take(gpu.library, LIKE, 0, counters.stream_id(200), 4, False)
        assert pointer == gpu.library.pointer(array) and not array.array.any()
    assert len(gpu.library.workspaces) == 3
    if without == "room":
        assert [taken(gpu, 100 + n) for n in range(3)] == kept and len(counters._in_use) == 3


def test_counters_that_are_lent_live_until_both_kernels_of_a_mixed_batch_are_launched(gpu, monkeypatch):
    """Freed before, they would be the workspace of the second kernel, which runs beside the first."""
    monkeypatch.setattr(counters, "_id_of", lambda: None)
    lent, alive = [], []
    make, launch = gpu.library.workspace, FakeGpu.launchKernel

    def workspace(*arguments):
        array = make(*arguments)
        lent.append(weakref.ref(array))
        return array

    def launched(self, *arguments):
        alive.append(len(lent) and all(array() is not None for array in lent))
        launch(self, *arguments)

    monkeypatch.setattr(gpu.library, "workspace", workspace)
    monkeypatch.setattr(FakeGpu, "launchKernel", launched)
    cache = random((2, 2000, 2, 64))
    lengths, starts = (Tensor(np.array(numbers, np.int32)) for numbers in ([2000, 2000], [0, 1, 151]))
    autotune.attention_with_kvcache(random((151, 4, 64)), cache, cache, cache_seqlens=lengths, cu_seqlens_q=starts,
                                    max_seqlen_q=150)
    assert alive == [True, True] and len(lent) >= 3  # counters of each, and the splits of the decodes


def test_a_call_on_a_stream_that_took_a_handle_over(gpu):
    q, k, v = qkv(batch=1, seqlen_q=1, seqlen_k=2000)
    lengths = Tensor(np.array([2000], np.int32))
    drawn = []
    for name in (1, 1, 2):
        gpu.stream_ids[gpu.library.streams[0]] = name
        autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, num_splits=4)
        drawn.append(gpu.calls[-1]["tickets"])
    assert drawn[0] == drawn[1] != drawn[2]
