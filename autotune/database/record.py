"""What tuning found: `Record`, its YAML form, and the rule by which two records of one problem become one.

`Record.from_entry` is the only way from a file to a record, and it lets nothing through that is not a legal value of a
declared field: a config is typed against its kernel's parameters before anything else may see it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property

from ..core.config import Config, ConfigError
from ..core.gpu import Gpu
from ..kernels import config_from_dict
from ..core.problem import Problem, ProblemError
from ..core.reading import quoted

EVIDENCE = ("measured", "predicted")

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,79}", re.ASCII)  # also a folder's name, so nothing that could leave the folder
DATE_FORMAT = "%Y-%m-%d %H:%M:%S UTC"  # sorts as text; the suffix keeps YAML from making it a datetime
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2} UTC")
# No right clock is before this module was written: one that is (no battery, no network) does not decide what is in the future.
NO_CLOCK_BEFORE = "2026-12-01 00:00:00 UTC"
JUST_NOW = timedelta(hours=1)  # the age of a record that a writer has found itself
AHEAD = timedelta(days=1)  # as far as the date of a record may be ahead of this clock
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_DEPTH = 3  # of `conditions`
_GPU_FIELDS = ("name", "arch", "sms", "l2_bytes", "memory_clock_mhz")


class RecordError(ValueError):
    """A record that cannot be true, with a sentence that says which field is wrong and what is allowed."""


@dataclass(frozen=True)
class GpuKey:
    """Which GPU a record is about. Identity is physical; `name` is a label and takes no part in comparisons."""

    name: str = field(compare=False)
    arch: int
    sms: int
    l2_bytes: int
    memory_clock_mhz: int

    def __post_init__(self):
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise RecordError(f"gpu name is {quoted(self.name)}; allowed are lower-case letters, digits and '-': nvidia-h200")
        for name in _GPU_FIELDS[1:]:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**48:
                raise RecordError(f"gpu {name} is {quoted(value)}; it must be an int of at least 0")

    @classmethod
    def of(cls, gpu: Gpu) -> GpuKey:
        return cls(gpu.name, *gpu.identity)

    @classmethod
    def from_entry(cls, entry: object) -> GpuKey:
        if not isinstance(entry, Mapping) or set(entry) != set(_GPU_FIELDS):
            raise RecordError(f"gpu must be a mapping with exactly {', '.join(_GPU_FIELDS)}")
        return cls(**entry)

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """The same tuple as `Gpu.identity`."""
        return self.arch, self.sms, self.l2_bytes, self.memory_clock_mhz

    def as_entry(self) -> dict:
        return {name: getattr(self, name) for name in _GPU_FIELDS}


@dataclass(frozen=True)
class Record:
    """The winner for one problem on one GPU, and how it is known.

    Times are medians in microseconds, kept to 6 significant digits. `ties` are other configs within noise of the winner.
    `default_config` is what an untuned call would run, with its time in the same session. `conditions` is plain data
    (how it was measured: policy, samples, spread, clocks, driver). `cubin_sha256` and `nvrtc` say which binary it was,
    `source_sha256`, if it is known, of which source, comments aside.
    Raises `RecordError` on construction if a field cannot be true.
    """

    problem: Problem
    gpu: GpuKey
    config: Config
    evidence: str  # one of EVIDENCE
    time_us: float
    date: str  # "2026-01-31 12:00:00 UTC"
    trials: int  # configs measured (or ranked, if predicted) to find the winner
    nvrtc: str  # "13.0.88"
    cubin_sha256: str
    autotune: str  # version of this package
    default_config: Config | None = None
    default_time_us: float | None = None
    source_sha256: str | None = None
    ties: tuple[tuple[Config, float], ...] = ()
    conditions: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        _require(self.evidence in EVIDENCE, f"evidence is {quoted(self.evidence)}; allowed are {', '.join(EVIDENCE)}")
        object.__setattr__(self, "time_us", _time(self.time_us, "time_us"))
        _require((self.default_config is None) == (self.default_time_us is None),
                 "default_config and default_time_us must both be there or both be missing")
        if self.default_time_us is not None:
            object.__setattr__(self, "default_time_us", _time(self.default_time_us, "default time_us"))
        ties = sorted(((config, _time(time, "tie time_us")) for config, time in self.ties), key=lambda tie: (tie[1], tie[0].text))
        object.__setattr__(self, "ties", tuple(ties))
        _require(type(self.trials) is int and 0 <= self.trials < 2**48,
                 f"trials is {quoted(self.trials)}; it must be an int of at least 0")
        for name, pattern, example in (("date", _DATE, "2026-01-31 12:00:00 UTC"), ("cubin_sha256", _SHA256, "64 hex digits"),
                                       ("nvrtc", re.compile(r"\d+\.\d+(\.\d+)*"), "13.0.88"),
                                       ("autotune", re.compile(r"\d[\w.+-]{0,60}"), "0.1.0")):
            value = getattr(self, name)
            _require(isinstance(value, str) and len(value) < 100 and pattern.fullmatch(value) is not None,
                     f"{name} is {quoted(value)}; expected is {example}")
        date_of(self.date)
        known = self.source_sha256
        _require(known is None or isinstance(known, str) and _SHA256.fullmatch(known) is not None,
                 f"source_sha256 is {quoted(known)}; expected is 64 hex digits")
        object.__setattr__(self, "conditions", _plain(self.conditions, "conditions", _MAX_DEPTH))

    @property
    def key(self) -> tuple:
        """Records with the same key are about the same thing, and `merge` makes one of them."""
        return self.gpu.identity, self.problem.text

    @cached_property
    def rank(self) -> tuple:
        """Total order up to equal content: measured before predicted, then the newest, then the fastest, then by text."""
        return self.evidence == "measured", self.date, -self.time_us, repr(self.as_entry())

    def is_of(self, binary) -> bool:
        """Whether this record is about `binary` (a `compile.Binary`): the same machine code, or made from the same source. NVRTC
        gives the same code for one source in one process after another, but in processes that had torch and other compilers
        loaded it has been seen to give another for 6 sources of 40."""
        return binary.sha256 == self.cubin_sha256 or self.source_sha256 is not None and self.source_sha256 == binary.source_sha256

    @property
    def speedup(self) -> float | None:
        """Default time / winner's time, or None if the default was not timed."""
        return self.default_time_us / self.time_us if self.default_time_us else None

    def as_entry(self) -> dict:
        """The YAML form, without problem and GPU, which stand above it."""
        entry = {"evidence": self.evidence, "config": self.config.as_dict(), "time_us": self.time_us}
        if self.default_config is not None:
            entry["default"] = self._beside(self.default_config, self.default_time_us)
        if self.ties:
            entry["ties"] = [self._beside(config, time) for config, time in self.ties]
        entry |= {"trials": self.trials, "date": self.date, "nvrtc": self.nvrtc, "autotune": self.autotune,
                  "cubin_sha256": self.cubin_sha256}
        if self.source_sha256 is not None:
            entry["source_sha256"] = self.source_sha256
        if self.conditions:
            entry["conditions"] = _sorted(self.conditions)
        return entry

    def _beside(self, config: Config, time_us: float) -> dict:
        """Of another config of this record its time, and what differs from the winner's: of another kernel, all."""
        if config.kernel != self.config.kernel:
            return {"config": config.as_dict(), "time_us": time_us}
        differs = {name: value for name, value in config.items if value != self.config[name]}
        return ({"config": differs} if differs else {}) | {"time_us": time_us}

    @classmethod
    def from_entry(cls, problem: object, entry: object, gpu: GpuKey) -> Record:
        """The record in a YAML entry. Raises `RecordError` with the reason if any part of it is not legal."""
        try:
            return _from_entry(cls, problem, entry, gpu)
        except (ProblemError, ConfigError) as error:
            raise RecordError(str(error)) from None


def merge(*groups: Iterable[Record]) -> dict[tuple, Record]:
    """`Record.key` -> the one that counts, out of all groups.

    Associative, commutative and idempotent: the greatest `rank` wins. So a predicted record never replaces a measured one.
    """
    merged: dict[tuple, Record] = {}
    for record in (record for group in groups for record in group):
        other = merged.get(record.key)
        if other is None or record.rank > other.rank:
            merged[record.key] = record
    return merged


_ENTRY_FIELDS = {f.name for f in fields(Record)} - {"problem", "gpu", "default_config", "default_time_us"} | {"default"}
_OPTIONAL = {"default", "ties", "conditions", "source_sha256"}


def date_of(text: str) -> datetime:
    """The moment that a record's date names. Raises `RecordError` if there is no such day or hour."""
    try:
        return datetime.fromisoformat(text.removesuffix(" UTC")).replace(tzinfo=timezone.utc)
    except ValueError:
        raise RecordError(f"date is {quoted(text)}, which is no date; expected is 2026-01-31 12:00:00 UTC") from None


def from_the_future(date: str) -> bool:
    """Whether a date is further ahead of this clock than clocks differ: it was written by a wrong one, and would win for good."""
    now = max(datetime.now(timezone.utc), date_of(NO_CLOCK_BEFORE))
    return date_of(date) > now + AHEAD


def after(record: Record, known: Record | None) -> Record:
    """`record`, which was found just now, with a date that lets it replace `known`, whose clock was ahead of this one. As it is
    if it is about an earlier measurement, or of lesser evidence."""
    if known is None or record.date > known.date or record.evidence != known.evidence or record == known:
        return record
    if abs(datetime.now(timezone.utc) - date_of(record.date)) > JUST_NOW:
        return record
    return replace(record, date=(date_of(known.date) + timedelta(seconds=1)).strftime(DATE_FORMAT))


def _from_entry(cls, text: object, entry: object, gpu: GpuKey) -> Record:
    _require(isinstance(text, str), f"problem {quoted(text)} is not text")
    problem = Problem.parse(text)
    _require(problem.text == text, f"problem {quoted(text)} is written {problem.text!r} in its canonical form")
    _fields(entry, "entry", _ENTRY_FIELDS, _OPTIONAL)
    ties = entry.get("ties", [])
    _require(isinstance(ties, list) and len(ties) <= 1000, "ties must be a list of at most 1000")
    config = _config(entry["config"], "config")
    default = _timed(entry["default"], "default", config) if "default" in entry else (None, None)
    values = {name: entry[name] for name in ("evidence", "time_us", "date", "trials", "nvrtc", "autotune", "cubin_sha256")}
    record = cls(problem, gpu, config, default_config=default[0], default_time_us=default[1],
                 source_sha256=entry.get("source_sha256"), ties=tuple(_timed(tie, "tie", config) for tie in ties),
                 conditions=entry.get("conditions", {}), **values)
    _require(not from_the_future(record.date), f"date is {record.date}, more than a day ahead of this machine's clock")
    return record


def _timed(entry: object, where: str, winner: Config) -> tuple[Config, float]:
    """A config beside the winner: one that names no kernel says only where it differs."""
    _fields(entry, where, {"config", "time_us"}, {"config"})
    config = entry.get("config", {})
    if isinstance(config, Mapping) and "kernel" not in config:
        config = {**winner.as_dict(), **config}
    return _config(config, where), entry["time_us"]


def _config(entry: object, where: str) -> Config:
    _require(isinstance(entry, Mapping) and all(isinstance(name, str) for name in entry),
             f"{where}: a config must be a mapping such as {{kernel: forward_mma, block_m: 128}}")
    return config_from_dict(entry, where)


def _fields(entry: object, where: str, allowed: set[str], optional: set[str]) -> None:
    _require(isinstance(entry, Mapping), f"{where} must be a mapping")
    for name in entry:
        _require(name in allowed, f"{where}: {quoted(name)} is not a field; allowed are {', '.join(sorted(allowed))}")
    for name in sorted(allowed - optional):
        _require(name in entry, f"{where}: field {quoted(name)} is missing")


def _time(value: object, name: str) -> float:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-3 <= value < 1e12 and math.isfinite(value)
    _require(ok, f"{name} is {quoted(value)}; it must be a number of microseconds, of at least 0.001")
    return float(f"{value:.6g}")


def _plain(value: object, where: str, depth: int) -> object:
    """A copy of `value` made of mappings, lists and scalars that YAML gives back unchanged, or `RecordError`."""
    if isinstance(value, Mapping) and depth:
        _require(all(map(_is_text, value)), f"{where}: every name must be text")
        return {name: _plain(item, f"{where}.{name}", depth - 1) for name, item in value.items()}
    if isinstance(value, (list, tuple)) and depth and where != "conditions":
        return [_plain(item, where, depth - 1) for item in value]
    ok = value is None or type(value) in (bool, int) or type(value) is float and math.isfinite(value) or _is_text(value)
    _require(ok and where != "conditions", f"{where} is {quoted(value)}; it must be plain data, nested at most {_MAX_DEPTH} deep")
    return value


def _is_text(value: object) -> bool:
    """Whether a file can hold `value`: a lone surrogate has no UTF-8 form."""
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _sorted(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise RecordError(message)
