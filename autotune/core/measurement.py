"""What timing a candidate gives: `Measurement`, a typed outcome, and the statistics that compare two of them.

Pure: nothing here needs a GPU. `timing` takes the times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from statistics import median
from types import MappingProxyType
from typing import Mapping, Sequence

OUTCOMES = ("ok", "illegal", "compile_failed", "spilled", "advisory", "miscompiled",
            "launch_failed", "wrong", "timeout", "crashed")

NOISE_FLOOR = 0.005  # medians of one kernel, timed twice in one process, differ by up to 0.5 %
MESSAGE_LIMIT = 4000  # characters kept of a compiler's or a driver's message
SAMPLES_LIMIT = 100  # kept of a long run, evenly


@dataclass(frozen=True)
class Measurement:
    """How one candidate did. A failure is an outcome with a message, never a large time.

    Times are in microseconds. `time_us` is the median of `samples_us` (each the mean of the launches in one graph replay, or
    one launch), `spread` half the distance of their quartiles over the median. `error_ratio` is error / allowed of the check.
    """

    outcome: str
    message: str = ""
    time_us: float | None = None
    samples_us: tuple[float, ...] = ()
    spread: float | None = None
    policy: str = ""
    sm_clock_mhz: int | None = None
    error_ratio: float | None = None
    conditions: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome is {self.outcome!r}; allowed are {', '.join(OUTCOMES)}")
        if (self.outcome == "ok") != (self.time_us is not None):
            raise ValueError(f"a measurement that is {self.outcome} has time_us {self.time_us}; only one that is ok has a time")
        object.__setattr__(self, "message", self.message[:MESSAGE_LIMIT])
        object.__setattr__(self, "samples_us", tuple(self.samples_us))
        object.__setattr__(self, "conditions", MappingProxyType(dict(self.conditions)))

    def __reduce__(self):  # a mapping proxy does not pickle, and measurements cross process borders
        return _rebuild, (self.as_dict(),)

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @classmethod
    def of_samples(cls, samples_us: Sequence[float], **others) -> Measurement:
        """An ok measurement of these times. Raises `ValueError` if there is none."""
        if not samples_us:
            raise ValueError("a measurement needs at least one sample")
        kept = samples_us[::-(-len(samples_us) // SAMPLES_LIMIT)]
        return cls("ok", time_us=_short(median(samples_us)), samples_us=tuple(map(_short, kept)),
                   spread=round(quartile_spread(samples_us), 4), **others)

    def as_dict(self) -> dict[str, object]:
        """Plain values for YAML and JSON: no field that says nothing, no tuple, no number that YAML would read as text."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["samples_us"] = list(self.samples_us)
        values["conditions"] = dict(self.conditions)
        return {name: value for name, value in values.items() if value is not None and value not in ("", [], {})}

    @classmethod
    def from_dict(cls, data: object) -> Measurement:
        """The measurement that `as_dict` wrote. Raises `ValueError` saying which field is wrong."""
        if not isinstance(data, Mapping):
            raise ValueError(f"a measurement is a mapping, not {type(data).__name__}")
        if unknown := set(data) - set(_CHECKS):
            raise ValueError(f"measurement has unknown fields: {', '.join(sorted(map(str, unknown)))}")
        if "outcome" not in data:
            raise ValueError("measurement has no outcome")
        for name, value in data.items():
            check, wanted = _CHECKS[name]
            if not check(value):
                raise ValueError(f"measurement: {name} is {value!r}; it must be {wanted}")
        return cls(**data)


def quartile_spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, over the median: 0.002 means that half of the samples lie within 0.2 %."""
    ordered = sorted(samples)
    return (_quantile(ordered, 0.75) - _quantile(ordered, 0.25)) / 2 / median(ordered)


def median_error(samples: Sequence[float]) -> float:
    """The relative standard error of the median, from the quartiles, so that a few throttled samples do not count.

    For normal samples sigma is 0.7413 times the quartiles' distance and the median's error 1.2533 sigma / sqrt(n).
    """
    return 1.2533 * 0.7413 * 2 * quartile_spread(samples) / math.sqrt(len(samples)) if samples else 0.0


def within_noise(a: Measurement, b: Measurement) -> bool:
    """Whether the times of two ok measurements differ by no more than chance: 2 standard errors, at least `NOISE_FLOOR`."""
    difference = abs(a.time_us - b.time_us) / min(a.time_us, b.time_us)
    return difference <= max(NOISE_FLOOR, 2 * math.hypot(median_error(a.samples_us), median_error(b.samples_us)))


def beats(a: Measurement, b: Measurement) -> bool:
    """Whether `a` is faster than `b` beyond noise. A failure beats nothing and is beaten by what is ok."""
    if not (a.ok and b.ok):
        return a.ok and not b.ok
    return a.time_us < b.time_us and not within_noise(a, b)


def ties(measurements: Sequence[Measurement]) -> list[int]:
    """Indices, in order, of those that are within noise of the fastest, itself included. Empty if none is ok."""
    ok = [i for i, m in enumerate(measurements) if m.ok]
    if not ok:
        return []
    best = measurements[min(ok, key=lambda i: measurements[i].time_us)]
    return [i for i in ok if within_noise(measurements[i], best)]


def hopeless(samples_us: Sequence[float], best_us: float | None, factor: float) -> bool:
    """Whether even the fastest sample is more than `factor` times the best known time: more samples cannot change the verdict."""
    return best_us is not None and len(samples_us) >= 2 and min(samples_us) > factor * best_us


def _short(value: float) -> float:
    """Six significant digits are more than any clock gives, and no exponent stands in their text from 0.0001 up."""
    return float(f"{value:.6g}")


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _rebuild(data: dict) -> Measurement:
    return Measurement.from_dict(data)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_time(value: object) -> bool:
    return _is_number(value) and value > 0


_CHECKS = {
    "outcome": (lambda v: v in OUTCOMES, f"one of {', '.join(OUTCOMES)}"),
    "message": (lambda v: isinstance(v, str), "text"),
    "time_us": (_is_time, "a number above 0"),
    "samples_us": (lambda v: isinstance(v, (list, tuple)) and all(map(_is_time, v)), "a list of numbers above 0"),
    "spread": (lambda v: _is_number(v) and v >= 0, "a number from 0"),
    "policy": (lambda v: isinstance(v, str), "text"),
    "sm_clock_mhz": (lambda v: type(v) is int and v >= 0, "an int from 0"),
    "error_ratio": (lambda v: _is_number(v) and v >= 0, "a number from 0"),
    "conditions": (lambda v: isinstance(v, Mapping) and all(isinstance(k, str) for k in v), "a mapping with text keys"),
}
