import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tuner_fakes import FAKE, H200, PROBLEM
from tuner_fakes import SPACE as WHOLE
from tuner_fakes import SlowKernel, fails, hash_of, synthetic_us

from autotune.core.measurement import Measurement
from autotune.tuner.explore import COMPILE_ONLY, Budget, explore
from autotune.tuner.replay import Trace, replay
from autotune.tuner.search import Search

DEFAULT = FAKE.default(PROBLEM, H200)
SPACE = tuple(dict.fromkeys((*WHOLE[::16], DEFAULT)))  # of the whole each proposal takes some 10 ms
PLENTY = Budget(trials=40, seconds=60.0, worth=0.0)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def measured(config):
    if fails(config):
        return Measurement(outcome="spilled", message="spills 8 bytes")
    return Measurement(outcome="ok", time_us=synthetic_us(config), samples_us=(synthetic_us(config),))


def run(pool, budget=PLENTY, searches=None, build=lambda config: "binary", evaluate=lambda c, b, best: measured(c), window=8):
    searches = searches or [Search(FAKE, SPACE, [DEFAULT])]
    seen = []
    reason, _ = explore(searches, build, evaluate, budget, pool, window, lambda config, m: seen.append((config, m)))
    return reason, seen, searches


def test_it_stops_at_the_number_of_trials(pool):
    reason, seen, searches = run(pool)
    assert reason == "40 configs were measured" and len(seen) == 40 and len({c for c, _ in seen}) == 40
    assert seen[0][0] == DEFAULT
    assert searches[0].best[1] == min(m.time_us for _, m in seen if m.outcome == "ok")


@pytest.mark.slow
def test_it_stops_when_more_is_not_expected_to_pay(pool):
    """Times that are all alike leave nothing to gain; of times that differ by a hair, more may be had than of nothing."""
    budget = Budget(200, 60.0, 0.005)
    reason, seen, _ = run(pool, budget, evaluate=lambda c, b, best: Measurement("ok", time_us=5.0))
    assert re.fullmatch(r"8 more configs are expected to gain at most 0\.\d\d%, less than 0\.50%", reason) and len(seen) < 60
    reason, rugged, _ = run(pool, budget, evaluate=lambda c, b, best: Measurement("ok", time_us=5.0 * (1 + hash_of(c) % 97 / 97)))
    assert len(rugged) > 2 * len(seen)


def test_it_does_not_stop_while_much_is_to_be_gained(pool):
    """A slope that leads away from all seeds: each config tells that the next will be better."""
    def evaluate(config, built, best):
        return Measurement("ok", time_us=1000.0 / (1 + config["block_m"] * config["block_n"] / 1000 + config["stages"]))

    reason, seen, searches = run(pool, Budget(200, 60.0, 0.005), [Search(FAKE, SPACE, [SPACE[0]])], evaluate=evaluate)
    best = min(evaluate(config, None, None).time_us for config in SPACE)
    assert "expected to gain" in reason and searches[0].best[1] == best and len(seen) < 150


def test_a_higher_worth_stops_no_later(pool):
    counts = [len(run(pool, Budget(150, 60.0, worth), window=1)[1]) for worth in (0.5, 0.02, 0.001)]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_it_stops_in_time(pool):
    def slowly(config, built, best):
        time.sleep(0.05)
        return measured(config)

    began = time.monotonic()
    reason, seen, _ = run(pool, Budget(1000, 0.5, 0.0), evaluate=slowly)
    assert reason == "time is up" and 0.4 < time.monotonic() - began < 1.5 and seen


def test_it_ends_when_every_config_was_tried(pool):
    space = SPACE[:30]
    reason, seen, _ = run(pool, Budget(1000, 60.0, 0.0), [Search(FAKE, space)])
    assert reason == "every promising config was tried" and {c for c, _ in seen} == set(space)


def test_time_may_be_overrun_only_until_one_config_works(pool):
    def nothing_works(config, built, best):
        time.sleep(0.05)
        return Measurement(outcome="wrong", message="row 3")

    began = time.monotonic()
    reason, seen, _ = run(pool, Budget(10_000, 0.2, 0.0), evaluate=nothing_works)
    assert reason == "time is up" and 0.7 < time.monotonic() - began < 2


def test_it_gives_up_when_nothing_works(pool):
    reason, seen, _ = run(pool, Budget(10_000, 60.0, 0.0), evaluate=lambda *_: Measurement(outcome="wrong", message="row 3"))
    assert reason == "none of the configs tried works" and len(seen) < 100


def test_what_does_not_build_is_not_measured(pool):
    evaluated = []

    def build(config):
        return Measurement(outcome="compile_failed", message="x") if config["stages"] == 2 else "binary"

    def evaluate(config, built, best):
        evaluated.append(config)
        assert built == "binary"
        return measured(config)

    _, seen, searches = run(pool, build=build, evaluate=evaluate)
    assert all(config["stages"] != 2 for config in evaluated) and len(seen) > len(evaluated)
    assert len(evaluated) + COMPILE_ONLY * (len(seen) - len(evaluated)) == pytest.approx(PLENTY.trials, abs=1)
    assert searches[0].results[DEFAULT] is None


def test_measuring_happens_on_one_thread_and_knows_the_best(pool):
    threads, bests = set(), []

    def evaluate(config, built, best):
        threads.add(threading.get_ident())
        bests.append(best)
        return measured(config)

    run(pool, evaluate=evaluate)
    assert threads == {threading.get_ident()}
    known = [b for b in bests if b is not None]
    assert known == sorted(known, reverse=True)


def test_compiling_runs_ahead_of_measuring():
    building, most = [], []

    def build(config):
        building.append(config)
        time.sleep(0.2)
        building.remove(config)
        return "binary"

    def evaluate(config, built, best):
        most.append(len(building))
        time.sleep(0.005)
        return measured(config)

    with ThreadPoolExecutor(4) as pool:
        run(pool, Budget(20, 60.0, 0.0), build=build, evaluate=evaluate)
    assert max(most) >= 2


@pytest.mark.parametrize("where", ["build", "evaluate"])
def test_errors_and_interrupts_come_out(pool, where):
    def stop(*_):
        raise KeyboardInterrupt if where == "evaluate" else RuntimeError("no compiler")

    with pytest.raises(KeyboardInterrupt if where == "evaluate" else RuntimeError):
        run(pool, **{where: stop})


def test_a_kernel_that_is_far_behind_is_given_up(pool):
    slow = SlowKernel()
    space = slow.space(PROBLEM, H200)[::16]

    def evaluate(config, built, best):
        factor = 10 if config.kernel == slow.name else 1
        return Measurement(outcome="ok", time_us=factor * synthetic_us(config))

    _, seen, _ = run(pool, searches=[Search(FAKE, SPACE, [DEFAULT]), Search(slow, space, [slow.default(PROBLEM, H200)])],
                     evaluate=evaluate)
    assert 1 <= sum(config.kernel == slow.name for config, _ in seen) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 16])
def test_replay_measures_the_search(window):
    best = min(synthetic_us(c) for c in SPACE if not fails(c))
    traces = [replay(FAKE, SPACE, measured, best, [DEFAULT], trials=60, window=window, seed=seed) for seed in range(3)]
    assert traces[0] == replay(FAKE, SPACE, measured, best, [DEFAULT], trials=60, window=window, seed=0)
    for trace in traces:
        assert len(trace.times_us) == 60 and 0 <= trace.regret < 0.08
        assert trace.until_within(0.25) == 1


def test_trace():
    trace = Trace((None, 12.0, 10.4, 10.0), 10.0)
    assert [trace.until_within(share) for share in (0.25, 0.05, 0.0)] == [2, 3, 4] and trace.regret == 0
    assert Trace((None, 12.0), 10.0).until_within(0.01) is None
