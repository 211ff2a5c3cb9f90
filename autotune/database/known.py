"""What the search path knows of one static part on one GPU: records, covers, and the times that they give."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Iterable, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem, Static
from ..kernels import KERNELS
from . import cover as covers
from . import view
from .cover import Cover
from .expect import Expectation, Point, expectations, loss_of
from .record import GpuKey, Record

# Without a cover: what records of neighbours were found to lose (benchmarks/results/neighbours-h200.yaml: 1.03, one 1.25).
OF_RECORDS = 1.04, 1.3


class Known:
    """Read at once, of one static part in bf16 and what serves it: records in either 16-bit dtype."""

    def __init__(self, gpu: Gpu, static: Static, roots=None):
        self.gpu, self.static = gpu, static
        self._roots = tuple(view.search_path() if roots is None else roots)
        self.covers: list[Cover] = []
        complaints = []
        for root in self._roots:
            found = covers.read(covers.file_of(root, gpu.name, static))
            if isinstance(found, str):
                complaints.append(found)
            elif found is not None and found.gpu == GpuKey.of(gpu):
                self.covers.append(found)
        timed = {problem.text for cover in self.covers for problem in cover.problems}
        self._view = view.open_view(gpu, static.op, self._roots, static, timed)
        self.records: tuple[Record, ...] = self._view.records  # whose problems no cover has: what those have is known better
        self.complaints = (*complaints, *self._view.complaints)

    @property
    def nvrtc(self) -> str:
        return self.covers[0].nvrtc if self.covers else ""

    def exact(self, problem: Problem) -> Record | None:
        """The record of the bucket that `problem` stands for: measured before predicted, its own before another's."""
        records = self.records
        if any(problem.stands_for(covered) for cover in self.covers for covered in cover.problems):
            records = view.open_view(self.gpu, self.static.op, self._roots, self.static).records
        found = [record for record in records
                 if record.problem.static == problem.static and problem.stands_for(record.problem)
                 and not KERNELS[record.config.kernel].reject(problem, self.gpu)
                 and not KERNELS[record.config.kernel].illegal(problem.static, record.config, self.gpu)]
        return min(found, key=lambda record: (record.evidence != "measured", record.problem != problem, record.problem.text),
                   default=None)

    @cached_property
    def points(self) -> list[Point]:
        """What speaks for configs: the covers, or where there is none, records. Beside a cover a record serves its own bucket
        only, so that no other problem is served worse for it."""
        return [point for cover in self.covers for point in points_of(cover, self.gpu)] or _points(self.records, self.gpu)

    @cached_property
    def configs(self) -> list[tuple[Config, object]]:
        """Every config that may serve, with the record or the digits of the source that speak for it. Measured ones first."""
        return _listed(self.covers) or _configs(self.records)

    @cached_property
    def _foreign_covers(self) -> list[tuple[Cover, Gpu]]:
        found = covers.of_static(self._roots, self.static)
        return [(cover, gpu) for cover in found if cover.gpu.arch == self.gpu.arch and (gpu := view.gpu_of(cover.gpu))]

    @cached_property
    def foreign_points(self) -> list[Point]:
        """The same of other GPUs of this arch."""
        return [point for cover, gpu in self._foreign_covers for point in points_of(cover, gpu)] or \
            [point for record in self._view.same_arch if (gpu := view.gpu_of(record.gpu)) for point in _points([record], gpu)]

    @cached_property
    def foreign_configs(self) -> list[tuple[Config, object]]:
        return _listed(cover for cover, _ in self._foreign_covers) or _configs(self._view.same_arch)


def points_of(cover: Cover, gpu: Gpu) -> list[Point]:
    families = [KERNELS[config.kernel].family(config) for config in cover.configs]
    return [Point(problem, gpu, {family: time for family, time in zip(families, row) if time})
            for problem, row in zip(cover.problems, cover.times)]


def _points(records, gpu: Gpu) -> list[Point]:
    """Of each measured record its winner, its ties and the default that it beat."""
    found = []
    for record in records:
        if record.evidence != "measured":
            continue
        pairs = [(record.default_config, record.default_time_us)] if record.default_config else []
        pairs += [*record.ties, (record.config, record.time_us)]
        found.append(Point(record.problem, gpu, {KERNELS[config.kernel].family(config): time for config, time in pairs}))
    return found


def _listed(found: Iterable[Cover]) -> list[tuple[Config, object]]:
    return [(config, source) for cover in found for config, source in zip(cover.configs, cover.sources)]


def _configs(records) -> list[tuple[Config, object]]:
    ordered = sorted(records, key=lambda record: (record.evidence != "measured", record.problem.text))
    return [(record.config, record) for record in ordered]


def loss_to_expect(known: Known, found: Sequence[Expectation]) -> tuple[float, float]:
    """(slowdown to expect, its bound) of the first of `found`."""
    return loss_of(found) if known.covers else OF_RECORDS


def left_out(cover: Cover, gpu: Gpu) -> tuple[float, ...]:
    """For each problem of `cover`: the time of what is chosen for it from the times of the other problems, over the best time."""
    points, losses = points_of(cover, gpu), []
    for n, point in enumerate(points):
        found = expectations(point.problem, gpu, points[:n] + points[n + 1:], [(config, None) for config in cover.configs])
        timed = (point.times.get(KERNELS[e.config.kernel].family(e.config)) for e in found)
        losses.append(next((time for time in timed if time), math.inf) / min(point.times.values()))
    return tuple(losses)
