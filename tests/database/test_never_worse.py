"""Knowing more never makes another problem slower: covers that ship, replayed."""

import importlib
import math
from pathlib import Path

import pytest

from autotune.core.gpu import by_name
from autotune.database import cover as covers
from autotune.database import view
from autotune.database.expect import Point, expectations, loss_of
from autotune.database.known import points_of
from autotune.database.record import GpuKey, Record
from autotune.kernels import KERNELS

pytestmark = pytest.mark.slow

lookups = importlib.import_module("autotune.database.lookup")
H200 = by_name("nvidia-h200")
FILES = sorted((view.shipped_root() / "nvidia-h200" / covers.FOLDER).glob("*.yaml"))


def served(point: Point, known, configs) -> tuple[float, float]:
    """(time on `point`, in the cover's times, of the config that is chosen from `known`, in units of the best; the bound)."""
    found = expectations(point.problem, H200, known, [(config, None) for config in configs])
    return point.times[KERNELS[found[0].config.kernel].family(found[0].config)] / min(point.times.values()), loss_of(found)[1]


@pytest.fixture
def db(tmp_path, monkeypatch):
    """The folder of a database that has nothing but one cover."""
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "user"))
    monkeypatch.setattr(view, "shipped_root", lambda: tmp_path / "shipped")
    lookups.refresh()
    yield tmp_path / "shipped"
    lookups.refresh()


@pytest.mark.parametrize("path", FILES[::26], ids=lambda path: path.stem)
def test_a_record_changes_what_serves_its_own_bucket_and_nothing_else(path: Path, db):
    """The worst that can be recorded: the slowest config wins everywhere else."""
    cover = covers.read(path)
    covers.write(cover, db)
    problems = [problem.simplified().bucketed() for problem in cover.problems]
    before = {problem: lookups.lookup(problem, H200).config for problem in problems}
    for problem, row in list(zip(problems, cover.times))[::12]:
        worst = cover.configs[row.index(max(row))]
        view.write([Record(problem=problem, gpu=GpuKey.of(H200), config=KERNELS[worst.kernel].fitted(problem, worst, H200),
                           evidence="measured", time_us=min(row) / 2, date="2026-01-31 12:00:00 UTC", trials=9, nvrtc=cover.nvrtc,
                           cubin_sha256="a" * 64, autotune="0.1.0")])
        lookups.refresh()
        tuned = {problem for problem in problems if lookups.lookup(problem, H200).tier == "exact"}
        assert problem in tuned
        assert all(lookups.lookup(other, H200).config == before[other] for other in problems if other not in tuned)


def test_more_of_a_grid_serves_better():
    """Over covers: with all other problems known the loss is not larger than with every third one."""
    few, many = [], []
    for path in FILES[::4]:
        cover = covers.read(path)
        points = points_of(cover, H200)
        for n, point in enumerate(points):
            if n % 3 == 1:
                few.append(math.log(served(point, points[::3], cover.configs)[0]))
                many.append(math.log(served(point, points[:n] + points[n + 1:], cover.configs)[0]))
    assert sum(many) <= sum(few)


def test_19_problems_of_20_stay_under_the_bound_when_they_are_left_out():
    held, bounds = [], []
    for path in FILES[::4]:
        cover = covers.read(path)
        points = points_of(cover, H200)
        for n, point in enumerate(points):
            loss, bound = served(point, points[:n] + points[n + 1:], cover.configs)
            held.append(loss <= bound)
            bounds.append(math.log(bound))
    assert sum(held) >= 0.95 * len(held)
    assert math.exp(sum(bounds) / len(bounds)) < 1.13  # and bounds say something
