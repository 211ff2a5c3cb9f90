"""Knowing more never makes another problem slower: covers that ship, replayed. Half of a grid is known, the other half is the truth;
one after another each problem of that half is tuned, and what serves the others may not become slower than chance."""

from pathlib import Path

import pytest

from autotune.core.gpu import by_name
from autotune.database import cover as covers
from autotune.database import view
from autotune.database.expect import Point, expectations
from autotune.database.known import loss_to_expect, points_of
from autotune.kernels import KERNELS

H200 = by_name("nvidia-h200")
FILES = sorted((view.shipped_root() / "nvidia-h200" / covers.FOLDER).glob("*.yaml"))
NOISE = 1.03  # of single short measurements


def served_us(point: Point, known, configs) -> float:
    """What the config that is chosen from `known` takes on `point`, in the cover's times."""
    found = expectations(point.problem, H200, known, [(config, None) for config in configs], None)
    families = (KERNELS[e.config.kernel].family(e.config) for e in found)
    return next(point.times[family] for family in families if family in point.times)


@pytest.mark.parametrize("path", FILES[::8], ids=lambda path: path.stem)
def test_a_record_makes_no_other_problem_slower(path: Path):
    cover = covers.read(path)
    points = points_of(cover, H200)
    new = {KERNELS[config.kernel].family(config) for config in cover.configs[-1:]}  # which the cover of the replay did not time
    known = [Point(p.problem, p.gpu, {f: time for f, time in p.times.items() if f not in new}, True) for p in points[::2]]
    hidden = points[1::2]
    before = [served_us(point, known, cover.configs) for point in hidden]
    worse = []
    for tuned in hidden:
        winner = min(tuned.times, key=tuned.times.get)
        record = Point(tuned.problem, H200, {winner: tuned.times[winner]}, False)
        for point, was in zip(hidden, before):
            if point is not tuned and (now := served_us(point, [*known, record], cover.configs)) > NOISE * was:
                worse.append((str(tuned.problem), str(point.problem), round(now / was, 3)))
    assert not worse


def test_more_of_a_grid_serves_better():
    """Over all covers: with all other problems known the loss is smaller than with every second one."""
    import math

    def loss(points, known, cover):
        return [math.log(served_us(point, known(point), cover.configs) / min(point.times.values())) for point in points]

    few, many = [], []
    for path in FILES[::6]:
        cover = covers.read(path)
        points = points_of(cover, H200)
        few += loss(points[1::2], lambda point: points[::2], cover)
        many += loss(points[1::2], lambda point: [other for other in points if other is not point], cover)
    assert sum(many) < sum(few)


def test_19_problems_of_20_stay_under_the_bound_that_the_others_give():
    from dataclasses import replace
    from types import SimpleNamespace

    held = []
    for path in FILES[::4]:
        cover = covers.read(path)
        for n, (problem, loss) in enumerate(zip(cover.problems, cover.losses)):
            others = replace(cover, problems=cover.problems[:n] + cover.problems[n + 1:], losses=cover.losses[:n] + cover.losses[n + 1:])
            expected, bound = loss_to_expect(SimpleNamespace(covers=[others], gpu=H200), problem)
            assert 1 <= expected < bound
            held.append(loss <= bound)
    assert sum(held) >= 0.95 * len(held)
