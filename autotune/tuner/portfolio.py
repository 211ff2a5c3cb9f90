"""The few configs of a cover: who may be among them, and who is chosen once some problems were timed."""

from __future__ import annotations

import math
from typing import Iterable, Mapping, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem, Static
from ..database.record import Record
from ..kernels import KERNELS, candidates
from ..kernels.base import Kernel

CANDIDATES = 28  # raced on the anchors
CHOSEN = 12
OUTSIDER = 1.6  # a kernel whose best estimate is this many times the best kernel's is not raced
ENOUGH = 1.003  # a config is added only if it makes some problem this much faster


def candidates_of(static: Static, problems: Sequence[Problem], records: Iterable[Record], gpu: Gpu,
                  count: int = CANDIDATES) -> list[Config]:
    """Configs to race for `static`: what won for it, then defaults of `problems`, what won for static parts like it, and the best
    of their neighbours by estimate, `count` in all."""
    kernels = _worthwhile(problems, gpu)
    kin = sorted((record for record in records if record.problem.op == static.op), key=lambda record: _unlike(record, static))
    won = [config for record in kin for config in (record.config, *(config for config, _ in record.ties))
           if _unlike(record, static)[0] == 0]
    others = [record.config for record in kin if _unlike(record, static)[0] > 0]
    defaults = [kernel.default(problem, gpu) for kernel in kernels for problem in problems]
    seeds: dict[tuple, Config] = {}
    for config in (*won[:2 * count // 3], *defaults, *others[:count]):
        kernel = KERNELS[config.kernel]
        config = kernel.config(static, config.values)
        if kernel in kernels and kernel.illegal(static, config, gpu) is None:
            seeds.setdefault(KERNELS[config.kernel].family(config), config)
        if len(seeds) >= 3 * count // 4:
            break
    moves = {KERNELS[moved.kernel].family(moved): moved for config in seeds.values() for moved in neighbours(config, static, gpu)}
    moves = {key: config for key, config in moves.items() if key not in seeds}
    chosen = list(seeds.values())
    estimates = {problem: sorted(moves.values(), key=lambda config: (_estimate(problem, config, gpu), config.text))
                 for problem in problems}
    for rank in range(len(moves)):
        for problem in problems:
            if len(chosen) < count and estimates[problem][rank] not in chosen:
                chosen.append(estimates[problem][rank])
    return chosen


def neighbours(config: Config, static: Static, gpu: Gpu) -> Iterable[Config]:
    """Legal configs that differ from `config` in one searched compile parameter, by one step where values are ordered."""
    kernel = KERNELS[config.kernel]
    for parameter in kernel.parameters:
        if parameter.derived or parameter.kind != "compile":
            continue
        here = parameter.values.index(config[parameter.name])
        for n in (here - 1, here + 1):
            if 0 <= n < len(parameter.values):
                values = {**config.values, parameter.name: parameter.values[n]}
                if parameter.name == "split_keys":
                    values["num_splits"] = 2 if parameter.values[n] else 1
                try:
                    moved = kernel.config(static, values)
                except KeyError:
                    continue
                if kernel.illegal(static, moved, gpu) is None and _searched(kernel, static, moved, gpu):
                    yield moved


def _searched(kernel: Kernel, static: Static, config: Config, gpu: Gpu) -> bool:
    return kernel.searched(static, {**config.values, "split_keys": False}, gpu) and all(
        config[p.name] in p.values_beside(config.values) for p in kernel.parameters if p.kind == "launch")


def choose(times_us: Mapping[Config, Sequence[float | None]], count: int = CHOSEN, always: Iterable[Config] = ()) -> list[Config]:
    """`count` of the configs such that each problem (a column of `times_us`) has one near its best: one after another, each time
    the one that brings the mean of log(best chosen / best of all) down most. `always` come first."""
    columns = range(max((len(row) for row in times_us.values()), default=0))
    best = [min((row[i] for row in times_us.values() if row[i]), default=None) for i in columns]
    chosen: list[Config] = []
    have = [math.inf] * len(best)

    def cost(config: Config | None) -> float:
        row = times_us[config] if config else [None] * len(best)
        costs = [min(math.log(min(have[i], row[i] or math.inf, 1e12) / best[i]), 2.0) for i in columns if best[i]]
        return sum(costs) + 2 * sum(c * c for c in costs) ** 0.5

    for wanted in always:
        if wanted in times_us and wanted not in chosen:
            chosen.append(wanted)
            have = [min(a, b or math.inf) for a, b in zip(have, times_us[wanted])]
    while len(chosen) < min(count, len(times_us)):
        found = min((config for config in times_us if config not in chosen), key=lambda config: (cost(config), str(config)))
        if chosen and cost(None) - cost(found) < math.log(ENOUGH):
            break
        chosen.append(found)
        have = [min(a, b or math.inf) for a, b in zip(have, times_us[found])]
    return chosen


def _worthwhile(problems: Sequence[Problem], gpu: Gpu) -> list[Kernel]:
    """Kernels whose default is not hopelessly behind, by estimate, on every problem."""
    found: dict[Kernel, None] = {}
    for problem in problems:
        guesses = {kernel: _estimate(problem, kernel.default(problem, gpu), gpu) for kernel in candidates(problem, gpu)}
        least = min(guesses.values(), default=0.0)
        found.update({kernel: None for kernel, guess in guesses.items() if guess <= OUTSIDER * least})
    return list(found)


def _estimate(problem: Problem, config: Config, gpu: Gpu) -> float:
    kernel = KERNELS[config.kernel]
    return kernel.account_us(problem, kernel.fitted(problem, config, gpu), gpu)


def _unlike(record: Record, static: Static) -> tuple:
    """How unlike the static part of a record is: 0 first if it is the same but for which 16 bits."""
    own = record.problem.static.in_bf16
    same = own == static.in_bf16
    return (0 if same else 1, abs(math.log2(own.head_dim / static.head_dim)) + abs(math.log2(own.head_dim_v / static.head_dim_v)),
            own.kv != static.kv, own.mask != static.mask, own.kv_dtype != static.kv_dtype, own.softcap != static.softcap,
            own.alibi != static.alibi, record.problem.text)
