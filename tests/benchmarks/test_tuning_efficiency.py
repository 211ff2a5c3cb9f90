"""The chain of recording and replaying a sub-space, on one that nobody measured."""

import many_gpus
import pytest
import stability
import tuning_efficiency
from subspaces import file_name, read, subspace, values, write
from synthetic_spaces import synthetic
from tuner_fakes import FAKE, H200, PROBLEM

from autotune.kernels import KERNELS, candidates


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.setitem(KERNELS, FAKE.name, FAKE)
    configs = subspace(FAKE, PROBLEM, H200, 150)
    path = tmp_path / file_name(FAKE.name, PROBLEM.text)
    write(path, FAKE, configs, synthetic(FAKE, PROBLEM, H200, configs, 1))
    return tuning_efficiency.Space(path, H200)


def test_a_subspace_keeps_the_default_and_most_parameters_free():
    configs = subspace(FAKE, PROBLEM, H200, 150)
    names = [p.name for p in FAKE.parameters if not p.derived]
    assert 40 < len(configs) <= 150 and FAKE.default(PROBLEM, H200) in configs
    assert sum(len({config[name] for config in configs}) > 1 for name in names) >= 5


def test_what_was_recorded_is_read_and_a_second_run_goes_on(space, tmp_path):
    path = tmp_path / file_name(FAKE.name, PROBLEM.text)
    before, found = path.read_bytes(), read(path)
    assert list(found) == [values(config, FAKE) for config in space.configs]
    write(path, FAKE, space.configs, found)
    assert path.read_bytes() == before
    assert any(result == "spilled" for result in found.values()) and space.best_us == min(t for t in found.values()
                                                                                          if t != "spilled")


@pytest.mark.slow
def test_searches_are_counted_until_they_are_near_the_best(space):
    found = tuning_efficiency.tried(space, 2, None)
    assert all(1 <= count <= len(space.configs) for counts in found.values() for count in counts)
    assert found["random"] == [tuning_efficiency.by_chance(space, seed) for seed in range(2)] and len(set(found["random"])) == 2
    assert sum(found["autotune"]) < sum(found["random"])
    summary = tuning_efficiency.summary({name: [(len(space.configs), counts)] for name, counts in found.items()})
    assert 0 < summary["median_share"] <= summary["p95_share"] <= 1 and "vs_kernel_tuner" not in summary
    stops = tuning_efficiency.stopped(space, 1)
    assert 0 <= stops["loss"] < 0.2 and 5 < stops["tried"] <= 80


def test_what_never_comes_near_counts_as_the_whole_space(space):
    assert space.until_near([None, 10 * space.best_us]) == len(space.configs)
    assert space.until_near([None, space.best_us]) == 2


def test_problems_of_the_runs_on_a_gpu_are_ones_that_can_be_tuned():
    for problem in (*stability.PROBLEMS, *many_gpus.PROBLEMS):
        assert problem == problem.simplified() and candidates(problem, H200), problem
    assert len(set(stability.PROBLEMS)) == 20 and len(set(many_gpus.PROBLEMS)) == 24
