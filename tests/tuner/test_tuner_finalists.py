from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tuner_fakes import FAKE, H200, PROBLEM, SPACE, FakeBuilder, fails

from autotune import kernels
from autotune.core.measurement import Measurement, beats
from autotune.database.record import Record
from autotune.tuner.finalists import CONTENDER, UNLIKE, choose, decide, measured_record, predicted_record
from autotune.tuner.points import steps_between

A, B, C, D = [c for c in SPACE if not fails(c)][:4]
DEFAULT = FAKE.default(PROBLEM, H200)


def timed(time, noise=0.001):
    return Measurement.of_samples([time * (1 - noise), time, time * (1 + noise)], policy="graph", sm_clock_mhz=1980)


def test_finalists_are_the_fastest_contenders_and_the_default():
    times = {A: 100.0, B: 101.0, C: 104.0, D: 100 * CONTENDER + 1, DEFAULT: 250.0}
    assert choose(times, DEFAULT, 4, lambda config: FAKE) == [A, B, C, DEFAULT]
    assert choose(times, DEFAULT, 1, lambda config: FAKE) == [A, DEFAULT]
    assert choose({A: 5.0, DEFAULT: 5.0}, DEFAULT, 4, lambda config: FAKE) == [A, DEFAULT]
    assert choose({}, DEFAULT, 4, lambda config: FAKE) == [DEFAULT]


def test_half_of_the_finalists_are_unlike_those_before_them():
    first = A if A != DEFAULT else B
    near = first, next(c for c in SPACE if c != DEFAULT and 0 < steps_between(FAKE, c, first) < UNLIKE and c.text > first.text)
    far = next(c for c in SPACE if c != DEFAULT and all(steps_between(FAKE, c, other) >= UNLIKE for other in near))
    times = {near[0]: 100.0, near[1]: 101.0, far: 104.0}
    assert choose(times, DEFAULT, 2, lambda config: FAKE) == [near[0], far, DEFAULT]
    assert choose(times, DEFAULT, 3, lambda config: FAKE) == [near[0], near[1], far, DEFAULT]
    times.pop(far)
    assert choose(times, DEFAULT, 2, lambda config: FAKE) == [near[0], near[1], DEFAULT]  # nothing else is left


def test_of_short_kernels_more_are_timed_again():
    """A race's one graph may be lucky by more than 8 %."""
    times = {A: 9.0, B: 9.9, C: 10.2, D: 10.5, DEFAULT: 20.0}
    assert set(choose(times, DEFAULT, 2, lambda config: FAKE)) == {A, B, C, DEFAULT}
    assert choose({config: 100 * time for config, time in times.items()}, DEFAULT, 2, lambda config: FAKE) == [A, DEFAULT]


def test_a_clear_winner_wins():
    assert decide({A: timed(90), B: timed(100), DEFAULT: timed(110)}, DEFAULT, SPACE) == (A, [])


def test_the_default_stays_unless_beaten_beyond_noise():
    assert decide({A: timed(99.8), DEFAULT: timed(100)}, DEFAULT, SPACE) == (DEFAULT, [A])
    assert decide({A: timed(95), DEFAULT: timed(100)}, DEFAULT, SPACE)[0] == A


def test_ties_break_by_canonical_order_not_by_luck():
    for times in ((100.0, 100.2), (100.2, 100.0)):
        winner, ties = decide({B: timed(times[1]), A: timed(times[0]), DEFAULT: timed(120)}, DEFAULT, [A, B])
        assert (winner, ties) == (A, [B])


def test_what_fails_the_final_cannot_win():
    wrong = Measurement(outcome="wrong", message="row 3")
    assert decide({A: wrong, B: timed(100), DEFAULT: timed(120)}, DEFAULT, SPACE)[0] == B
    assert decide({A: timed(100), DEFAULT: wrong}, DEFAULT, SPACE)[0] == A
    with pytest.raises(ValueError, match="no finalist works"):
        decide({A: wrong}, DEFAULT, SPACE)


@pytest.mark.slow
@given(st.lists(st.floats(95, 110), min_size=5, max_size=5), st.floats(0, 0.02))
def test_the_pick_is_never_slower_than_the_default(times, noise):
    entries = dict(zip((A, B, C, D, DEFAULT), (timed(t, noise) for t in times)))
    winner, ties = decide(entries, DEFAULT, SPACE)
    assert entries[winner].time_us <= entries[DEFAULT].time_us
    assert winner == DEFAULT or beats(min(entries.values(), key=lambda m: m.time_us), entries[DEFAULT])
    assert winner not in ties


@pytest.fixture
def fake_kernel(monkeypatch):
    monkeypatch.setitem(kernels.KERNELS, FAKE.name, FAKE)


def test_records_survive_the_database_form(fake_kernel):
    built = FakeBuilder().build(PROBLEM.static, A)
    results = {A: timed(90.123456), B: timed(90.2), DEFAULT: timed(100)}
    record = measured_record(PROBLEM, H200, built, results, [B], DEFAULT, Counter(ok=10, spilled=3), "time is up")
    assert (record.time_us, record.default_time_us, record.trials) == (90.1235, 100.0, 13)
    assert record.conditions["search"] == {"stopped": "time is up", "ok": 10, "spilled": 3}
    assert record.conditions["policy"] == "graph" and record.conditions["sm_clock_mhz"] == 1980
    assert Record.from_entry(PROBLEM.text, record.as_entry(), record.gpu) == record
    guess = predicted_record(PROBLEM, H200, [(50.0, built)], DEFAULT)
    assert guess.evidence == "predicted" and guess.default_config is None
    assert Record.from_entry(PROBLEM.text, guess.as_entry(), guess.gpu) == guess
