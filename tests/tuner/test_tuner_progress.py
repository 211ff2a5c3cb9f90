import io

import pytest
from tuner_fakes import SPACE

from autotune.core.measurement import Measurement
from autotune.tuner import progress as progress_module
from autotune.tuner.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def ok(time):
    return Measurement.of_samples([time])


def test_counts_best_and_time_left(clock):
    progress = Progress(3, 40.0, io.StringIO())
    progress.problem("first")
    progress.trial(SPACE[0], ok(12.5))
    progress.trial(SPACE[1], ok(11.0))
    progress.trial(SPACE[2], Measurement(outcome="compile_failed", message="x"))
    best = f"best 11.0 us ({SPACE[1].digest})"
    assert progress.status(1010.0) == f"3 configs: ok 2, compile failed 1; {best}; at most 1 min 50 s left"
    clock[0] += 20
    progress.finished("done")
    progress.problem("second")
    assert progress.seconds_left(clock[0]) == 40  # by the pace of the first
    assert progress.status(clock[0]).startswith("0 configs: ; none works yet")


def test_lines_are_rare_when_it_is_no_terminal(clock):
    stream = io.StringIO()
    progress = Progress(1, 40.0, stream)
    progress.problem("p")
    for config in SPACE[:100]:
        clock[0] += 0.2
        progress.trial(config, ok(5.0))
    progress.finished("result")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[1/1] p" and lines[-1] == "  result" and 4 <= len(lines) - 2 <= 6
    assert "\r" not in stream.getvalue()


def test_a_terminal_shows_one_line_that_is_rewritten(clock):
    stream = Terminal()
    progress = Progress(1, 40.0, stream)
    progress.problem("p")
    for config in SPACE[:10]:
        clock[0] += 0.2
        progress.trial(config, ok(5.0))
    progress.finished("result")
    assert stream.getvalue().count("\n") == 2 and stream.getvalue().count("\r") >= 10


@pytest.mark.parametrize("seconds, text", [(0, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (4200, "1 h 10 min")])
def test_duration(seconds, text):
    assert duration(seconds) == text
