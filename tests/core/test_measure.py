"""Measurements survive files and processes; the statistics tell noise from a difference."""

import json
import pickle

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.measurement import (
    NOISE_FLOOR, OUTCOMES, SAMPLES_LIMIT, Measurement, beats, hopeless, median_error, quartile_spread, ties, within_noise,
)

TIMES = st.floats(1e-3, 1e7)


FAILURES = [outcome for outcome in OUTCOMES if outcome != "ok"]
CONDITIONS = st.dictionaries(st.sampled_from(["driver", "nvrtc", "other_processes"]),
                             st.text("abc.1", min_size=1) | st.integers(0, 9))


@st.composite
def measurements(draw):
    if draw(st.booleans()):
        return Measurement(draw(st.sampled_from(FAILURES)), draw(st.text(max_size=50)), conditions=draw(CONDITIONS))
    return Measurement.of_samples(draw(st.lists(TIMES, min_size=1, max_size=300)), policy="graph, 3 sets",
                                  conditions=draw(CONDITIONS), sm_clock_mhz=draw(st.none() | st.integers(100, 3000)),
                                  error_ratio=draw(st.none() | st.floats(0, 1)))


@given(measurements())
def test_round_trips(m):
    assert Measurement.from_dict(m.as_dict()) == m
    assert Measurement.from_dict(json.loads(json.dumps(m.as_dict()))) == m
    assert Measurement.from_dict(yaml.safe_load(yaml.safe_dump(m.as_dict()))) == m
    assert pickle.loads(pickle.dumps(m)) == m


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=30))
def test_numbers_are_written_without_an_exponent(samples):
    m = Measurement.of_samples(samples)
    assert all("e" not in repr(value) for value in (m.time_us, m.spread, *m.samples_us))


@pytest.mark.parametrize("change, words", [
    ({"outcome": "great"}, "outcome is 'great'"), ({"time_us": -1.0}, "time_us is -1.0; it must be a number above 0"),
    ({"time_us": "12"}, "time_us"), ({"time_us": float("nan")}, "time_us"), ({"samples_us": [1.0, "x"]}, "samples_us"),
    ({"sm_clock_mhz": 1.5}, "sm_clock_mhz"), ({"spread": True}, "spread"), ({"conditions": {1: 2}}, "conditions"),
    ({"colour": 1}, "unknown fields: colour"), ({"outcome": "wrong"}, "only one that is ok has a time"),
])
def test_bad_dicts_say_what_is_wrong(change, words):
    good = Measurement.of_samples([1.0, 2.0]).as_dict()
    with pytest.raises(ValueError) as error:
        Measurement.from_dict({**good, **change})
    assert words in str(error.value)


@pytest.mark.parametrize("data", [None, [], {}, {"message": "x"}, {"outcome": "ok"}])
def test_what_is_no_measurement(data):
    with pytest.raises(ValueError):
        Measurement.from_dict(data)


def test_a_failure_carries_no_time():
    assert Measurement("timeout", "no answer in 10 s").as_dict() == {"outcome": "timeout", "message": "no answer in 10 s"}
    with pytest.raises(ValueError):
        Measurement("crashed", time_us=1.0)
    with pytest.raises(ValueError):
        Measurement.of_samples([])


def test_median_and_spread():
    m = Measurement.of_samples([10.0, 11.0, 12.0, 13.0, 100.0])
    assert m.time_us == 12.0 and m.spread == pytest.approx(1 / 12, abs=1e-4)
    assert quartile_spread([5.0]) == 0 and median_error([5.0]) == 0 and median_error([]) == 0
    assert len(Measurement.of_samples([1.0] * 1000).samples_us) == SAMPLES_LIMIT


def test_noise():
    quiet = Measurement.of_samples([100.0, 100.1, 99.9, 100.0])
    near = Measurement.of_samples([100.0 * (1 + NOISE_FLOOR * 0.9)] * 4)
    far = Measurement.of_samples([102.0, 102.1, 101.9, 102.0])
    noisy = Measurement.of_samples([98.0, 102.0, 106.0, 101.0])
    assert within_noise(quiet, near) and not within_noise(quiet, far) and within_noise(noisy, quiet)
    assert beats(quiet, far) and not beats(far, quiet) and not beats(quiet, near)
    failed = Measurement("wrong", "x")
    assert beats(quiet, failed) and not beats(failed, quiet) and not beats(failed, failed)
    assert ties([far, quiet, failed, near]) == [1, 3] and ties([failed]) == []


@given(st.lists(TIMES, min_size=1, max_size=20), st.lists(TIMES, min_size=1, max_size=20))
def test_noise_is_symmetric(a, b):
    a, b = Measurement.of_samples(a), Measurement.of_samples(b)
    assert within_noise(a, b) == within_noise(b, a) and within_noise(a, a)
    assert not (beats(a, b) and beats(b, a))


def test_hopeless():
    assert not hopeless([200.0], 100.0, 1.2) and hopeless([200.0, 130.0], 100.0, 1.2)
    assert not hopeless([200.0, 110.0], 100.0, 1.2) and not hopeless([200.0, 300.0], None, 1.2)
