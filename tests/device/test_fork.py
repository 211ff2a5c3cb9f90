"""Two launches of one call on two streams: who waits for what."""

import threading
from types import SimpleNamespace

import pytest
from fake_arrays import fake_gpu  # noqa: F401 (a fixture)

from autotune.device import streams, counters

LIKE = SimpleNamespace(device=0)


def test_each_stream_has_one_beside_it_for_good(gpu):
    first, other, elsewhere = streams.beside(0, 7), streams.beside(0, 8), streams.beside(1, 7)
    assert streams.beside(0, 7) is first and len({each.stream for each in (first, other, elsewhere)}) == 3


def test_work_begins_after_what_was_enqueued_and_is_waited_for(gpu):
    with streams.beside(0, 7) as stream:
        gpu.runtime.log.append("work")
    assert [entry if entry == "work" else (entry[0], entry[2]) for entry in gpu.runtime.log] == [
        ("record", 7), ("wait", stream), "work", ("record", stream), ("wait", 7)]
    (_, begin, _), (_, begun, _), _, (_, end, _), (_, ended, _) = gpu.runtime.log
    assert begin == begun != end == ended


def test_a_launch_that_fails_does_not_leave_the_other_one_behind(gpu):
    """Its arrays may be freed once the caller's stream has gone on."""
    with pytest.raises(RuntimeError, match="the second"):
        with streams.beside(0, 7):
            raise RuntimeError("the second launch failed")
    assert gpu.runtime.log[-1][::2] == ("wait", 7)


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_default_stream_is_that_of_the_arrays_device(gpu, stream):
    with streams.beside(1, stream) as other:
        assert gpu.runtime.device_of[other] == 1
    assert gpu.runtime.current == 0 and len(gpu.runtime.log) == 4


def drawn(gpu, stream):
    return counters.take(gpu.library, LIKE, 0, counters.stream_id(stream), 1, False)[0]


def test_each_thread_has_its_own_default_stream(gpu):
    """One handle names them all."""
    found = []
    threads = [threading.Thread(target=lambda: found.append([streams.beside(0, stream) for stream in (2, 7)])) for _ in range(2)]
    for thread in threads:
        thread.start()
    alive = [streams.beside(0, stream) for stream in (2, 7)]
    for thread in threads:
        thread.join()
    (a, shared), (b, same) = alive, found[0]
    assert a is not b and shared is same
    own = {drawn(gpu, stream) for stream in (2, 7)}
    other = []
    thread = threading.Thread(target=lambda: other.extend(drawn(gpu, stream) for stream in (2, 7)))
    thread.start()
    thread.join()
    assert len(own) == 2 and other[0] not in own and other[1] in own
