import pytest
from tuner_fakes import H200

from autotune.core.gpu import by_name
from autotune.tuner import owner
from autotune.tuner.plan import MOST_DEATHS, Item, Plan

ITEMS = [Item(f"forward-bf16-b{n}-h4x4-q512-k512-d128", "quick", "source") for n in range(1, 7)]


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def elsewhere(monkeypatch):
    """Plans of other hosts: processes that nobody here can see."""
    def make(where, host, clock=None, gpu=H200):
        with monkeypatch.context() as patch:
            seen = owner.me()
            patch.setattr(owner, "me", lambda: {**seen, "host": host, "boot": host})
            return Plan(where, gpu, clock or Clock(), lease=30)

    return make


def test_each_item_is_claimed_once_and_its_record_comes_back(tmp_path):
    one, other = Plan(str(tmp_path), H200), Plan(str(tmp_path), H200)
    one.put(ITEMS)
    claims = [plan.claim() for plan in (one, other) * 3]
    assert {claim.item for claim in claims} == set(ITEMS) and one.claim() is None and other.claim() is None
    claims[0].done({"entry": 1}, 2.5)
    claims[1].failed("does not fit")
    claims[2].give_back()
    states = other.statuses()
    assert states[claims[0].item].record == {"entry": 1} and states[claims[1].item].message == "does not fit"
    assert states[claims[2].item].state == "free" and one.claim().item == claims[2].item


def test_two_leaders_add_to_one_plan_and_nothing_is_done_twice(tmp_path):
    one, other = Plan(str(tmp_path), H200), Plan(str(tmp_path), H200)
    one.put(ITEMS[:4])
    other.put(ITEMS[2:])
    assert set(one.statuses()) == set(ITEMS)
    taken = []
    while claim := one.claim():
        claim.done({}, 1.0)
        taken.append(claim.item)
    assert sorted(taken, key=ITEMS.index) == ITEMS


def test_gpu_models_never_mix(tmp_path):
    Plan(str(tmp_path), H200).put(ITEMS)
    assert Plan(str(tmp_path), by_name("nvidia-a100-sxm-80gb")).claim() is None


def test_a_lease_returns_the_problem_of_a_worker_that_fell_silent(tmp_path, elsewhere):
    clock = Clock()
    dead, looking = elsewhere(str(tmp_path), "dead"), Plan(str(tmp_path), H200, clock, lease=30)
    dead.put(ITEMS[:1])
    silent = dead.claim()
    for _ in range(4):
        assert looking.claim() is None
        clock.now += 9
    clock.now += 9
    assert looking.claim().item == ITEMS[0]
    silent.done({"late": True}, 3.0)  # it was only slow: what it found counts
    assert looking.statuses()[ITEMS[0]].record == {"late": True}


def test_a_worker_that_beats_keeps_its_problem_whatever_its_clock_says(tmp_path, elsewhere):
    """Time passes on the looker's clock only; a minute of difference between hosts, or a year, is the same."""
    clock = Clock()
    alive, looking = elsewhere(str(tmp_path), "alive"), Plan(str(tmp_path), H200, clock, lease=30)
    alive.put(ITEMS[:1])
    claim = alive.claim()
    for beat in range(1, 20):
        claim._plan._storage.set_trial_user_attr(claim._handle, "beat", beat)
        clock.now += 20
        assert looking.claim() is None


def test_time_in_which_nobody_looked_counts_against_nobody(tmp_path, elsewhere):
    """A database that was away, or a looker that was busy itself, for an hour."""
    clock = Clock()
    alive, looking = elsewhere(str(tmp_path), "alive"), Plan(str(tmp_path), H200, clock, lease=30)
    alive.put(ITEMS[:1])
    alive.claim()
    assert looking.claim() is None
    clock.now += 3600
    assert looking.claim() is None


def test_a_problem_that_workers_die_of_is_given_up_and_they_are_named(tmp_path, elsewhere):
    clock = Clock()
    looking = Plan(str(tmp_path), H200, clock, lease=30)
    looking.put(ITEMS[:1])
    for n in range(MOST_DEATHS):
        assert elsewhere(str(tmp_path), f"node{n}").claim() is not None
        for _ in range(6):
            looking.statuses()
            clock.now += 9
    status = looking.statuses()[ITEMS[0]]
    assert status.state == "failed" and "node0" in status.message and looking.claim() is None


def test_a_share_travels_with_its_problem_and_makes_no_second_one(tmp_path):
    one, other = Plan(str(tmp_path), H200), Plan(str(tmp_path), H200)
    shared = Item(ITEMS[0].problem, "quick", "source", (3.0, 1.5))
    one.put([shared])
    other.put(ITEMS[:1])
    assert list(one.statuses()) == [shared] and other.claim().item.share == (3.0, 1.5) and one.claim() is None
