"""Two launches of one call on two streams: who waits for what."""

import pytest
from fake_arrays import fake_gpu  # noqa: F401 (a fixture)

from autotune import fork


def test_each_stream_has_one_beside_it_for_good(gpu):
    first, other, elsewhere = fork.beside(0, 7), fork.beside(0, 8), fork.beside(1, 7)
    assert fork.beside(0, 7) is first and len({each.stream for each in (first, other, elsewhere)}) == 3


def test_work_begins_after_what_was_enqueued_and_is_waited_for(gpu):
    with fork.beside(0, 7) as stream:
        gpu.runtime.log.append("work")
    assert [entry if entry == "work" else (entry[0], entry[2]) for entry in gpu.runtime.log] == [
        ("record", 7), ("wait", stream), "work", ("record", stream), ("wait", 7)]
    (_, begin, _), (_, begun, _), _, (_, end, _), (_, ended, _) = gpu.runtime.log
    assert begin == begun != end == ended


def test_a_launch_that_fails_does_not_leave_the_other_one_behind(gpu):
    """Its arrays may be freed once the caller's stream has gone on."""
    with pytest.raises(RuntimeError, match="the second"):
        with fork.beside(0, 7):
            raise RuntimeError("the second launch failed")
    assert gpu.runtime.log[-1][::2] == ("wait", 7)
