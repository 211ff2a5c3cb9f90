import pytest
from tuner_fakes import FAKE, H200, PROBLEM, SPACE, fails, synthetic_us

from autotune.core.measurement import Measurement
from autotune.core.problem import Problem
from autotune.tuner.explore import Budget
from autotune.tuner.replay import replay
from autotune.tuner.spread import EVEN, FEWEST, MOST, Share, expected_us, spread, text

BUDGET = Budget(trials=80, seconds=40.0, worth=0.005)
PROBLEMS = [Problem.parse(f"forward-bf16-b{n}-h4x4-q512-k512-d128-causal") for n in (1, 2, 4)]


def test_time_times_calls_decides_and_the_sum_stays_an_even_budgets():
    shares = spread(dict(zip(PROBLEMS, (10.0, 20.0, 40.0))), {PROBLEMS[0]: 400.0})
    assert shares[PROBLEMS[0]].weight > 60 * shares[PROBLEMS[2]].weight
    assert shares[PROBLEMS[0]].trials > shares[PROBLEMS[2]].trials >= shares[PROBLEMS[1]].trials
    assert sum(share.trials for share in shares.values()) == pytest.approx(3, rel=0.01)
    assert sum(share.weight for share in shares.values()) == pytest.approx(3, rel=0.01)
    assert text(shares).index(PROBLEMS[0].text) < text(shares).index(PROBLEMS[2].text) and "99%" in text(shares)


def test_one_problem_and_equal_ones_get_what_they_would_alone():
    assert spread({PROBLEM: 123.0}, {PROBLEM: 5.0}) == {PROBLEM: EVEN} and spread({}, {}) == {}
    assert set(spread(dict.fromkeys(PROBLEMS, 7.0), {}).values()) == {EVEN} and EVEN.of(BUDGET) == BUDGET
    assert set(spread(dict.fromkeys(PROBLEMS, 0.0), {}).values()) == {EVEN}


def test_what_weighs_more_is_searched_for_smaller_gains_within_bounds():
    assert Share(2.0, 1.2).of(BUDGET) == Budget(96, 48.0, 0.0025)
    assert Share(1e9, MOST).of(BUDGET).worth == BUDGET.worth / MOST
    assert Share(1e-9, FEWEST).of(BUDGET).worth == BUDGET.worth / FEWEST
    assert Share(2.0, 1.2).of(Budget(0, 0.0, 0.0)).trials == 0  # instant stays instant


def test_what_is_expected_of_a_problem_grows_with_it():
    small, large = (Problem.parse(f"forward-bf16-b1-h32x8-q{n}-k{n}-d128-causal") for n in (1024, 8192))
    assert 0 < expected_us(small, H200) < expected_us(large, H200) / 10


def test_a_workload_gains_more_by_a_spread_budget_than_by_an_even_one():
    """Two problems, of which one takes 20 times as long as the other: the time left after as many configs in all is less."""
    best = min(synthetic_us(config) for config in SPACE if not fails(config))
    calls = {PROBLEMS[0]: 20.0, PROBLEMS[1]: 1.0}
    shares = spread(dict.fromkeys(PROBLEMS[:2], 10.0), calls)
    space = [config for config in SPACE if config["carveout"] == -1 and config["order"] == "forward"][::2]

    def measured(config):
        return Measurement("spilled", message="x") if fails(config) else Measurement("ok", time_us=synthetic_us(config))

    def left(trials_of):
        return sum(calls[problem] * (1 + replay(FAKE, space, measured, best, [], trials=trials_of(problem), seed=seed).regret)
                   for problem in calls for seed in range(2))

    even = left(lambda problem: 20)
    assert left(lambda problem: shares[problem].of(Budget(20, 60.0, 0.0)).trials) < even
