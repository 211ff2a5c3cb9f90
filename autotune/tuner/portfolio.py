"""The few configs of a cover: who may be among them, and who is chosen once some problems were timed."""

from __future__ import annotations

import math
from typing import Iterable, Iterator, Mapping, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem, Static
from ..database.record import Record
from ..kernels import KERNELS, candidates, default_config
from ..kernels.base import Kernel

CANDIDATES = 44  # raced on the anchors
SEEDS = 20  # of them, at the most, that won before; the rest are those that kernels expect most of
CHOSEN = 9
OUTSIDER = 1.6  # a kernel whose best estimate is this many times the best kernel's is not raced
ENOUGH = 1.01  # a config is added only if what it makes problems faster comes to this, all together
DESCENTS = 4  # rounds of moves from the best by estimate
ALIKE = 0.005  # estimates that differ by less say nothing of which is faster


def candidates_of(static: Static, problems: Sequence[Problem], records: Iterable[Record], gpu: Gpu,
                  before: Iterable[Config] = (), count: int = CANDIDATES) -> list[Config]:
    """Configs to race for `static`, `count` at the most: those of the cover `before`, what won for it, defaults of `problems`,
    what won for static parts like it; and for each of `problems` those that its kernel expects most of, one after another."""
    kernels = _worthwhile(problems, gpu)
    kin = sorted((record for record in records if record.problem.op == static.op), key=lambda record: _unlike(record, static))
    won = [config for record in kin for config in (record.config, *(config for config, _ in record.ties))
           if _unlike(record, static)[0] == 0]
    others = [record.config for record in kin if _unlike(record, static)[0] > 0]
    defaults = [kernel.default(problem, gpu) for kernel in kernels for problem in problems]
    seeds: dict[tuple, Config] = {}
    for config in (*before, *won[:SEEDS], *defaults, *others[:SEEDS]):
        kernel = KERNELS[config.kernel]
        config = kernel.config(static, config.values)
        if kernel in kernels and kernel.illegal(static, config, gpu) is None:
            seeds.setdefault(_source(config), config)
    chosen = dict(list(seeds.items())[:SEEDS])
    moves: dict[Config, list[Config]] = {}
    ranked = [_descent(problem, list(seeds.values()), static, gpu, moves) for problem in problems]
    for rank in range(max(map(len, ranked), default=0)):
        for configs in ranked:
            if len(chosen) < count and rank < len(configs):
                chosen.setdefault(_source(configs[rank]), configs[rank])
    return list(chosen.values())


def _source(config: Config) -> tuple:
    """What configs of one binary have in common."""
    return config.kernel, KERNELS[config.kernel].compile_key(config)


def _descent(problem: Problem, seeds: Sequence[Config], static: Static, gpu: Gpu,
             moves: dict[Config, list[Config]]) -> list[Config]:
    """What moves from the best of `seeds` come to by estimate, the best first; of those alike the ones nearest to a seed. All are
    of the default's kernel: estimates of two kernels are not so good as to be compared. `moves` remembers where configs lead."""
    kernel = default_config(problem, gpu).kernel
    estimates = {config: _estimate(problem, config, gpu) for config in seeds if config.kernel == kernel}
    expanded: set[Config] = set()
    for _ in range(DESCENTS):
        fresh = [config for config in sorted(estimates, key=estimates.get)[:2] if config not in expanded]
        if not fresh:
            break
        for config in fresh:
            expanded.add(config)
            if config not in moves:
                moves[config] = list(neighbours(config, static, gpu))
            estimates.update({moved: _estimate(problem, moved, gpu) for moved in moves[config] if moved not in estimates})
    order = {config: n for n, config in enumerate(estimates)}
    return sorted(estimates, key=lambda config: (round(math.log(estimates[config]) / ALIKE), order[config]))


def neighbours(config: Config, static: Static, gpu: Gpu) -> Iterator[Config]:
    """Legal configs that differ from `config` in one parameter, or by one step each in two numeric ones of the source, such as
    wider tiles in fewer buffers."""
    kernel = KERNELS[config.kernel]
    free = [p for p in kernel.parameters if not p.derived and p.name not in kernel.sized]
    single = [{p.name: value} for p in free for value in p.values if value != config[p.name]]
    steps = [(p.name, p.values[n]) for p in free if p.kind == "compile" and type(p.values[0]) is int
             for n in (p.values.index(config[p.name]) - 1, p.values.index(config[p.name]) + 1) if 0 <= n < len(p.values)]
    double = [{one: value, other: second} for n, (one, value) in enumerate(steps) for other, second in steps[n + 1:]
              if one != other]
    for change in (*single, *double):
        values = {**config.values, **change}
        if "split_keys" in change:
            values["num_splits"] = 2 if change["split_keys"] else 1
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
