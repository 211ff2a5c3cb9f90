import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tuner_fakes import FAKE, H200, PROBLEM, SlowKernel
from tuner_fakes import SPACE as WHOLE
from tuner_fakes import fails, hash_of, synthetic_us

from autotune.tuner.points import diverse
from autotune.tuner.search import POOL, Search
from autotune.tuner.seeds import PREDICTED, estimates, predicted, seeds, worthwhile
from autotune.tuner.surrogate import Likeness, Surrogate

DEFAULT = FAKE.default(PROBLEM, H200)
SPACE = tuple(dict.fromkeys((*WHOLE[::16], DEFAULT)))  # of the whole each proposal takes some 10 ms


def asked(search, count, result=lambda config: None if fails(config) else synthetic_us(config)):
    configs = []
    for _ in range(count):
        config = search.ask()
        if config is None:
            break
        configs.append(config)
        search.tell(config, result(config))
    return configs


def test_proposals_are_legal_and_never_repeat():
    configs = asked(Search(FAKE, SPACE, [DEFAULT]), 60)
    assert len(set(configs)) == 60 and set(configs) <= set(SPACE)


@settings(max_examples=4, deadline=None)
@given(window=st.integers(1, 24), seed=st.integers(0, 99))
def test_proposals_do_not_repeat_while_others_are_under_way(window, seed):
    search, running, seen = Search(FAKE, SPACE, [DEFAULT], seed=seed), [], set()
    for _ in range(40):
        config = search.ask()
        assert config not in seen
        seen.add(config)
        running.append(config)
        if len(running) == window:
            done = running.pop(hash_of(config) % window)
            search.tell(done, None if fails(done) else synthetic_us(done))


def test_seeds_come_first_each_once_and_foreign_ones_are_dropped():
    seeds = [SPACE[50], DEFAULT, SPACE[50], SPACE[7]]
    search = Search(FAKE, SPACE, [WHOLE[5], *seeds])
    assert search.has_seeds
    assert asked(search, 3) == [SPACE[50], DEFAULT, SPACE[7]]
    assert not search.has_seeds


def test_a_search_begins_with_the_best_by_estimate_of_kernels_that_are_not_hopeless():
    (kernel, predictions), = worthwhile([FAKE, SlowKernel()], PROBLEM, H200).items()
    assert kernel is FAKE and predictions == predicted(FAKE, PROBLEM, H200, WHOLE, PREDICTED) and len(predictions) == PREDICTED
    estimate = estimates(FAKE, PROBLEM, H200)
    usual = [config for config in WHOLE if config["carveout"] == DEFAULT["carveout"]]
    assert predictions[0] == min(usual, key=lambda config: (round(estimate(config), 3), config.text))
    assert all(estimate(config) == FAKE.account_us(PROBLEM, config, H200) for config in WHOLE[::101])
    assert seeds(FAKE, PROBLEM, H200, [], predictions) == [DEFAULT, *predictions]


def test_a_small_space_is_exhausted_and_then_nothing_is_left():
    space = [c for c in WHOLE if c["block_m"] == 64 and c["block_n"] == 64 and c["order"] == "forward"]
    search = Search(FAKE, space)
    configs = asked(search, len(space) + 10)
    assert sorted(c.text for c in configs) == sorted(c.text for c in space)
    assert search.ask() is None and search.remaining == 0
    assert Search(FAKE, []).ask() is None


def test_neighbours_of_the_best_are_compared_also_in_a_large_space():
    search = Search(FAKE, WHOLE, [DEFAULT])
    assert len(WHOLE) > 2 * POOL and len(search._pool) <= POOL
    known = next(config for i, config in enumerate(WHOLE) if i not in search._pool and not fails(config))
    search.tell(known, 1.0)
    offered = {WHOLE[i] for i in search._candidates()}
    near = {c for c in WHOLE if c != known and sum(c[p.name] != known[p.name] for p in FAKE.parameters if not p.derived) == 1
            and c["carveout"] != known["carveout"]}
    assert near and near <= offered


def test_the_estimate_is_a_prior_and_measurements_overrule_it():
    """Told that wide tiles are fast, it tries them first; told by times that they are not, it leaves them."""
    search = Search(FAKE, SPACE, [], lambda config: 1000.0 / config["block_n"])
    search.tell(SPACE[0], 900.0)
    first = search.ask()
    assert first["block_n"] == 128
    search.tell(first, 7200.0)
    assert {config["block_n"] for config in asked(search, 8, lambda config: 900.0 * config["block_n"] / 16)} <= {16, 32}


def test_what_lies_near_failures_is_doubted():
    """Points on a line of 10 values: those from 5 on fail."""
    likeness = Likeness([10], [True])
    points = likeness.vectors(np.arange(10)[:, None])
    times = np.where(np.arange(10) < 5, 10.0, np.nan)
    some = [0, 2, 4, 5, 7, 9]
    works = Surrogate(likeness, points[some], times[some], np.zeros(len(some))).works(points)
    assert min(works[:4]) > 0.7 > 0.6 > max(works[7:])
    gains = Surrogate(likeness, points[some], times[some], np.zeros(len(some))).gains(points, np.zeros(10), 10.0)
    assert gains[1] > gains[8] > 0


def test_it_finds_the_optimum_region_in_few_configs():
    best = min(synthetic_us(c) for c in SPACE if not fails(c))
    assert synthetic_us(DEFAULT) > 1.1 * best
    for seed in range(3):
        search = Search(FAKE, SPACE, [DEFAULT], seed=seed)
        asked(search, 60)
        assert search.best[1] < 1.04 * best


def test_same_seed_same_proposals():
    assert asked(Search(FAKE, SPACE, [DEFAULT], seed=5), 40) == asked(Search(FAKE, SPACE, [DEFAULT], seed=5), 40)
    assert asked(Search(FAKE, SPACE, [DEFAULT], seed=5), 40) != asked(Search(FAKE, SPACE, [DEFAULT], seed=6), 40)


def test_known_results_are_not_proposed_and_guide_the_search():
    search = Search(FAKE, SPACE, [DEFAULT])
    known = {c: synthetic_us(c) for c in SPACE[::17]}
    for config, time in known.items():
        search.tell(config, time)
    assert search.best[1] == min(known.values())
    assert not set(asked(search, 30)) & set(known)
    search.tell(FAKE.config(PROBLEM.static, {**DEFAULT.values, "block_m": 256, "stages": 4, "block_n": 128}), 1.0)
    assert search.best[1] != 1.0  # not legal, so not in the space


def test_failures_are_never_best():
    search = Search(FAKE, SPACE)
    asked(search, 20, result=lambda config: None)
    assert search.best is None and len(search.results) == 20


def test_diverse_keeps_order_and_distance():
    chosen = diverse(SPACE, 8, FAKE.parameters, steps=3)
    assert chosen[0] == SPACE[0] and len(chosen) == 8
    assert [SPACE.index(c) for c in chosen] == sorted(SPACE.index(c) for c in chosen)
    for i, a in enumerate(chosen):
        for b in chosen[:i]:
            assert sum(a[n] != b[n] for n in a.values) >= 1
    near = diverse([DEFAULT, FAKE.config(PROBLEM.static, {**DEFAULT.values, "carveout": 50})], 5, FAKE.parameters)
    assert near == [DEFAULT]


def test_ties_break_by_canonical_order():
    search = Search(FAKE, SPACE)
    for config in reversed(SPACE[:5]):
        search.tell(config, 7.0)
    assert search.best == (SPACE[0], 7.0)
