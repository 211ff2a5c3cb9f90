"""Which config would be chosen for problems whose times are known? Replays lookups on the measured times of covers, without a
GPU.

    python benchmarks/replayed.py [--gpu NAME] [--out FILE]

Each problem of each cover is chosen for from what the others say: one left out, every fifth, or a whole region of sizes. The
loss is the time of what is chosen / the best of the cover there. `account`: by the kernels' own accounts alone. `bound_held`:
the share of problems that lost no more than the bound said. `coverage`: of the rows of coverage-h200.yaml that name two
configs, how many would today be served by the one that was measured faster, how many by the slower one; the rest by a third
one.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Callable, Iterable, Sequence

import _result
import yaml

from autotune.core.gpu import Gpu, by_name
from autotune.core.problem import Problem
from autotune.database import cover as covers
from autotune.database import view
from autotune.database.cover import Cover
from autotune.database.expect import expectations, loss_of
from autotune.database.known import points_of
from autotune.database.lookup import lookup
from autotune.kernels import KERNELS, config_from_text

FOLDS, REGIONS = 5, 4
OPS = "forward", "decode"


def main() -> int:
    parser = _result.parser(__doc__, "replayed-h200.yaml")
    parser.add_argument("--gpu", default="nvidia-h200", help="whose covers, and whose coverage (nvidia-h200)")
    options = parser.parse_args()
    gpu = by_name(options.gpu)
    found = [cover for path in sorted((view.shipped_root() / gpu.name / covers.FOLDER).glob("*.yaml"))
             if isinstance(cover := covers.read(path), Cover)]
    if not found:
        print(f"no cover of {gpu.name} ships; `autotune tune --cover --model all` measures them", file=sys.stderr)
        return 1
    rows = {cover.static.text: {name: replayed(cover, gpu, known) for name, known in WAYS.items()} for cover in found}
    summary, parts = {}, {}
    for op in OPS:
        of_op = [ways for static, ways in rows.items() if static.startswith(op)]
        for name in WAYS:
            outcomes = [outcome for ways in of_op for outcome in ways[name]]
            summary.update({f"{op}_{name}_{what}": value for what, value in facts(outcomes).items()
                            if name != "account" or not what.startswith("bound")})  # nothing was measured that bounds it
    for static, ways in rows.items():
        of_part = facts(ways["one_out"])
        parts[static] = " ".join(str(of_part[name]) for name in ("loss", "p95", "worst"))
    summary.update(compared(_result.RESULTS / f"coverage-{gpu.name.split('-')[-1]}.yaml", gpu))
    whole = {"summary": summary, "gpu": gpu.name, "date": _result.date(), "command": _result.command(),
             "loss_p95_worst_one_out": parts}  # no conditions: nothing is timed
    options.out.write_text(yaml.safe_dump(whole, sort_keys=False, default_flow_style=None, width=130))
    print(yaml.safe_dump(summary, sort_keys=False))
    return 0


def _region(problem: Problem) -> float:
    """The size by which problems are sorted into regions."""
    return problem.compulsory_bytes if problem.op == "decode" else problem.flops


def _regions(problems: Sequence[Problem]) -> list[int]:
    order = sorted(range(len(problems)), key=lambda n: (_region(problems[n]), n))
    return [order.index(n) * REGIONS // len(problems) for n in range(len(problems))]


# Way -> which other problems of a cover (m) are known where one (n) is chosen for.
WAYS: dict[str, Callable[[Sequence[Problem]], Callable[[int, int], bool]]] = {
    "account": lambda problems: lambda n, m: False,
    "one_out": lambda problems: lambda n, m: n != m,
    "fifth_out": lambda problems: lambda n, m: n % FOLDS != m % FOLDS,
    "region_out": lambda problems: (lambda regions: lambda n, m: regions[n] != regions[m])(_regions(problems)),
}


def replayed(cover: Cover, gpu: Gpu, way: Callable) -> list[tuple[float, float]]:
    """(loss, its bound) of each problem of `cover`."""
    points, known, outcomes = points_of(cover, gpu), way(cover.problems), []
    for n, point in enumerate(points):
        others = [other for m, other in enumerate(points) if known(n, m)]
        found = [e for e in expectations(point.problem, gpu, others, [(config, None) for config in cover.configs])
                 if KERNELS[e.config.kernel].family(e.config) in point.times]
        chosen = point.times[KERNELS[found[0].config.kernel].family(found[0].config)]
        outcomes.append((chosen / min(point.times.values()), loss_of(found)[1]))
    return outcomes


def facts(outcomes: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Geometric mean, 95th percentile and worst of losses; how often the bound held, and its geometric mean."""
    losses, bounds = zip(*outcomes)
    ordered = sorted(losses)
    return {"loss": _mean(losses), "p95": round(ordered[math.ceil(0.95 * len(ordered)) - 1], 3), "worst": round(ordered[-1], 3),
            "bound_held": round(sum(loss <= bound for loss, bound in outcomes) / len(ordered), 3), "bound": _mean(bounds)}


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return round(math.exp(sum(logs) / len(logs)), 4)


def compared(path: Path, gpu: Gpu) -> dict[str, int]:
    """What would serve the rows of a coverage that name two configs: `coverage_faster`, `coverage_slower`, `coverage_other`."""
    counts: dict[str, int] = defaultdict(int)
    for text, row in yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["problems"].items():
        if "served" in row:
            problem = Problem.parse(text)
            steps = {name: _launch(problem, config_from_text(row[name])) for name in ("best", "served")}
            today = _launch(problem, lookup(problem, gpu).config)
            counts["faster" if today == steps["best"] else "slower" if today == steps["served"] else "other"] += 1
    return {f"coverage_{name}": counts[name] for name in ("faster", "slower", "other")}


def _launch(problem: Problem, config) -> tuple:
    """What of a config makes a difference on `problem`: its family, and the grid that follows from the rest."""
    kernel = KERNELS[config.kernel]
    return kernel.family(config), kernel.plan(problem, config)[0].grid


if __name__ == "__main__":
    sys.exit(main())
