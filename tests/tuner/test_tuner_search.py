import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tuner_fakes import FAKE, H200, PROBLEM, SPACE, fails, hash_of, synthetic_us

from autotune.kernels import KERNELS
from autotune.tuner.search import FEW, LATE_STAGE_ONE, Search, diverse

DEFAULT = FAKE.default(PROBLEM, H200)


def asked(search, count, result=lambda config: None if fails(config) else synthetic_us(config), late=False):
    configs = []
    for _ in range(count):
        config = search.ask(late)
        if config is None:
            break
        configs.append(config)
        search.tell(config, result(config))
    return configs


def test_proposals_are_legal_and_never_repeat():
    configs = asked(Search(FAKE, SPACE, [DEFAULT]), 150)
    assert len(set(configs)) == 150 and set(configs) <= set(SPACE)


@settings(max_examples=10, deadline=None)
@given(window=st.integers(1, 24), seed=st.integers(0, 99))
def test_proposals_do_not_repeat_while_others_are_under_way(window, seed):
    search, running, seen = Search(FAKE, SPACE, [DEFAULT], seed), [], set()
    for _ in range(60):
        config = search.ask()
        assert config not in seen
        seen.add(config)
        running.append(config)
        if len(running) == window:
            done = running.pop(hash_of(config) % window)
            search.tell(done, None if fails(done) else synthetic_us(done))


def test_seeds_come_first_each_once_and_foreign_ones_are_dropped():
    seeds = [SPACE[500], DEFAULT, SPACE[500], SPACE[7]]
    search = Search(FAKE, SPACE[:3000] + (DEFAULT,), [SPACE[-1], *seeds])
    assert search.has_seeds
    assert asked(search, 3) == [SPACE[500], DEFAULT, SPACE[7]]
    assert not search.has_seeds


def test_a_small_space_is_exhausted_and_then_nothing_is_left():
    space = [c for c in SPACE if c["block_m"] == 64 and c["block_n"] == 64 and c["order"] == "forward"]
    search = Search(FAKE, space)
    configs = asked(search, len(space) + 10)
    assert sorted(c.text for c in configs) == sorted(c.text for c in space)
    assert search.ask() is None and search.ask(late=True) is None and search.remaining == 0
    assert Search(FAKE, []).ask() is None


def test_launch_parameters_wait_for_the_second_stage():
    search = Search(FAKE, SPACE, [DEFAULT])
    first = asked(search, 40)
    assert {c["carveout"] for c in first} == {DEFAULT["carveout"]}
    best = sorted((c for c in first if not fails(c)), key=synthetic_us)[:FEW]
    late = [c for c in asked(search, 3 * FEW, late=True) if c["carveout"] != -1]
    assert 2 * FEW <= len(late) + 1 and FAKE.compile_key(late[0]) == FAKE.compile_key(best[0])
    assert {c["carveout"] for c in late[:2]} == {50, 100}
    assert any(c["carveout"] == -1 for c in asked(search, 2 * LATE_STAGE_ONE, late=True))


def test_the_second_stage_changes_one_launch_parameter_at_a_time_of_the_best_first():
    kernel = KERNELS["forward_mma"]
    space, default = kernel.space(PROBLEM, H200), kernel.default(PROBLEM, H200)
    search = Search(kernel, space, [default])
    search.tell(search.ask(), 10.0)
    key = kernel.compile_key(default)
    variants = [c for c in asked(search, 12, lambda config: 11.0, late=True) if kernel.compile_key(c) == key]
    launch = [p.name for p in kernel.parameters if p.kind == "launch"]
    assert [sum(c[name] != default[name] for name in launch) for c in variants[:8]] == [1] * 8


def test_it_finds_the_optimum_region_in_few_configs():
    best = min(synthetic_us(c) for c in SPACE if not fails(c))
    assert synthetic_us(DEFAULT) > 1.15 * best
    for seed in range(3):
        search = Search(FAKE, SPACE, [DEFAULT], seed)
        asked(search, 100)
        assert search.best[1] < 1.04 * best


def test_same_seed_same_proposals():
    assert asked(Search(FAKE, SPACE, [DEFAULT], 5), 40) == asked(Search(FAKE, SPACE, [DEFAULT], 5), 40)
    assert asked(Search(FAKE, SPACE, [DEFAULT], 5), 40) != asked(Search(FAKE, SPACE, [DEFAULT], 6), 40)


def test_known_results_are_not_proposed_and_guide_the_search():
    search = Search(FAKE, SPACE, [DEFAULT])
    known = {c: synthetic_us(c) for c in SPACE[::97]}
    for config, time in known.items():
        search.tell(config, time)
    assert search.best[1] == min(known.values())
    assert not set(asked(search, 60)) & set(known)
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


@pytest.mark.parametrize("late", [False, True])
def test_ties_break_by_canonical_order(late):
    search = Search(FAKE, SPACE)
    for config in reversed(SPACE[:5]):
        search.tell(config, 7.0)
    assert search.best == (SPACE[0], 7.0)
