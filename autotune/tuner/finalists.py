"""Who goes to the final, who wins it, and the record of it."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timezone
from typing import Callable, Mapping, Sequence

from .. import __version__
from ..core.config import Config
from ..core.gpu import Gpu
from ..kernels.base import Kernel
from ..core.measurement import Measurement, within_noise
from ..core.problem import Problem
from ..database.record import GpuKey, Record
from .builder import Built
from .points import steps_between

CONTENDER = 1.08  # configs within this factor of the best may win the final: racing times them with few samples
# below, a race's one graph may be lucky by more than that (33.7, 38.4 and 39.7 us of one decode step), but samples
SHORT_US = 50.0
SHORT_CONTENDER, SHORT_COUNT = 1.15, 2  # cost little: more may win, and so many times as many are timed again
UNLIKE = 3  # single-step changes of compile parameters
MAX_TIES = 8  # kept in a record


def choose(times_us: Mapping[Config, float], default: Config, count: int,
           kernel_of: Callable[[Config], Kernel]) -> list[Config]:
    """`count` contenders (of short kernels twice as many), and the default: always last, and also if it is not among `times_us`.

    Half of them are the fastest, the others the fastest that are unlike those before them: under load a GPU lowers its clock by a
    third, and then tiles that use less power win. On an H200 (4 x 4096, D128, causal) the search's best, 427 us against 438, took
    478 us in the final's load where the other took 451.
    """
    best = min(times_us.values(), default=0.0)
    short = best < SHORT_US
    count *= SHORT_COUNT if short else 1
    near = (SHORT_CONTENDER if short else CONTENDER) * best
    ranked = sorted((config for config, time in times_us.items() if time <= near and config != default),
                    key=lambda config: (times_us[config], config.text))
    chosen = ranked[:count - count // 2]
    for config in [c for c in ranked if c not in chosen]:
        if len(chosen) < count and all(steps_between(kernel_of(config), config, other) >= UNLIKE for other in chosen):
            chosen.append(config)
    chosen += [config for config in ranked if config not in chosen][:count - len(chosen)]
    return [*chosen, default]


def decide(timed: Mapping[Config, Measurement], default: Config, order: Sequence[Config]) -> tuple[Config, list[Config]]:
    """(winner, ties) of measurements that were taken interleaved. Ties are the others within noise of the fastest.

    The default wins if nothing beats it beyond noise; else, of those within noise of the fastest, the first in `order`,
    so that two tunes of one GPU agree. Raises `ValueError` if none is ok.
    """
    ok = {config: m for config, m in timed.items() if m.outcome == "ok"}
    if not ok:
        raise ValueError("no finalist works")
    fastest = min(ok, key=lambda config: (ok[config].time_us, config.text))
    rank = {config: i for i, config in enumerate(order)}
    limit = ok[default].time_us if default in ok else float("inf")  # noise is not transitive: a tie may be behind the default
    tied = [config for config in ok if ok[config].time_us <= limit
            and (config == fastest or within_noise(ok[config], ok[fastest]))]
    tied.sort(key=lambda config: (config != default, rank.get(config, len(rank)), config.text))
    return tied[0], tied[1:]


def measured_record(problem: Problem, gpu: Gpu, winner: Built, timed: Mapping[Config, Measurement], ties: Sequence[Config],
                    default: Config, outcomes: Counter, reason: str) -> Record:
    """The record of a final. `outcomes` counts how all trials ended; `reason` says why the search stopped."""
    mine = timed[winner.config]
    reference = timed.get(default)
    known = reference is not None and reference.outcome == "ok"
    conditions = {**mine.conditions, "policy": mine.policy, "samples": len(mine.samples_us), "spread": mine.spread,
                  "sm_clock_mhz": mine.sm_clock_mhz, "error_ratio": mine.error_ratio,
                  "search": {"stopped": reason, **{name: outcomes[name] for name in sorted(outcomes)}}}
    return Record(problem, GpuKey.of(gpu), winner.config, "measured", mine.time_us, _now(), outcomes.total(),
                  winner.binary.nvrtc, winner.binary.sha256, __version__, default if known else None,
                  reference.time_us if known else None, winner.binary.source_sha256,
                  tuple((c, timed[c].time_us) for c in ties[:MAX_TIES]), _plain(conditions))


def predicted_record(problem: Problem, gpu: Gpu, ranked: Sequence[tuple[float, Built]], default: Config) -> Record:
    """The record of a ranking by estimate, best first."""
    time_us, winner = ranked[0]
    reference = next((estimate for estimate, built in ranked if built.config == default), None)
    return Record(problem, GpuKey.of(gpu), winner.config, "predicted", time_us, _now(), len(ranked), winner.binary.nvrtc,
                  winner.binary.sha256, __version__, default if reference else None, reference, winner.binary.source_sha256)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _plain(value: object) -> object:
    """`value` without what is unknown, floats to 4 significant digits: conditions are read by people, diffs stay small."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return float(f"{value:.4g}") if isinstance(value, float) else value
