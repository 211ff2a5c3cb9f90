"""What many workers share: `Plan`, the problems to tune on one GPU model, who is at which, and what came out.

It lies in the same storage as the trials, as one Optuna study a GPU model, so GPU models never mix. Leaders add lists of
problems; a worker takes a problem by writing a trial for it, and the first such trial wins. While it works it beats: a number
in its trial goes up. Who looks judges by how long the number stood still on its own clock, so clocks of hosts may differ by
any amount.
"""

from __future__ import annotations

import math
import random
import threading
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Callable, Iterable, Iterator

from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from ..core.gpu import Gpu
from . import owner
from .storages import StoreError, open_storage
from .store import study_of

BEAT_SECONDS = 5.0
LEASE_SECONDS = 45.0  # without a beat, while somebody looks; a worker's longest pause is a database that is away
MOST_DEATHS = 3  # workers that vanish over one problem before it is given up
SPREAD = 4  # a worker takes one of the first few free problems, so that many who look at once rarely meet


@dataclass(frozen=True)
class Item:
    """A problem to tune: its text, how hard to try, and the source hash of its default config, which says whose kernels. `share`
    is its weight in a workload and how much of the effort it gets (`spread.Share`); the first leader that wants a problem says
    it."""

    problem: str
    effort: str
    source: str
    share: tuple[float, float] = field(default=(1.0, 1.0), compare=False)


@dataclass(frozen=True)
class Status:
    """Where an item stands: free, running, done (`record` is its YAML entry) or failed (`message` says why)."""

    state: str
    message: str = ""
    record: dict | None = None
    by: dict | None = None


class Plan:
    """The plan for GPUs like `gpu` in the storage at `where`. Many processes may use it, and many threads one.

    Raises `StoreError`.
    """

    def __init__(self, where: str, gpu: Gpu, clock: Callable[[], float] = time.monotonic, lease: float = LEASE_SECONDS):
        identity = "-".join(map(str, gpu.identity))
        self._storage = open_storage(where, f"{gpu.name}/plan")
        self._study = study_of(self._storage, f"plan sm{identity}")
        self._clock, self._lease = clock, lease
        self._seen: dict[int, tuple[object, float]] = {}  # trial -> its last beat, for how long it stood still while we looked
        self._looked = clock()
        self._me = {**owner.me(), "uid": uuid.uuid4().hex}  # two claims of one process are told apart, too

    def put(self, items: Iterable[Item]) -> None:
        """Adds a list of problems, wanted in this order. Items that are there already are not done twice."""
        listed = [[item.problem, item.effort, item.source, *item.share] for item in items]
        self._storage.set_study_user_attr(self._study, f"list {time.time():.6f} {uuid.uuid4().hex}", listed)

    def statuses(self) -> dict[Item, Status]:
        """Where every item stands, in the order of the lists. Ends the claims of workers that are gone."""
        attempts: dict[Item, list[FrozenTrial]] = {}
        for trial in self._trials():
            attempts.setdefault(_item(trial), []).append(trial)
        return {item: _status(attempts.get(item, [])) for item in self._items()}

    def claim(self, able: Callable[[Item], bool] = lambda item: True) -> Claim | None:
        """A free item that `able` accepts, now this process's, or None if there is none at the moment."""
        free = [item for item, status in self.statuses().items() if status.state == "free" and able(item)]
        while free:
            item = free.pop(random.randrange(min(SPREAD, len(free))))
            facts = {"item": [item.problem, item.effort, item.source], "by": self._me}
            handle = self._storage.create_new_trial(self._study, create_trial(state=TrialState.RUNNING, user_attrs=facts))
            mine = [trial for trial in self._trials() if _item(trial) == item and _stands(trial)]
            if mine and min(mine, key=lambda trial: trial.number)._trial_id == handle:
                return Claim(self, item, handle)
            self._end(handle, "late")
        return None

    def _items(self) -> list[Item]:
        attributes = self._storage.get_study_user_attrs(self._study)
        lists = [attributes[name] for name in sorted(attributes) if name.startswith("list ")]
        found = (_listed(entry) for entries in lists if isinstance(entries, list) for entry in entries)
        return list(dict.fromkeys(item for item in found if item))

    def _trials(self) -> list[FrozenTrial]:
        """All claims, after those whose worker is gone were ended."""
        trials = self._storage.get_all_trials(self._study, deepcopy=False)
        now = self._clock()
        passed, self._looked = min(now - self._looked, self._lease / 3), now  # what nobody watched does not count against anyone
        ended = [trial for trial in trials if trial.state == TrialState.RUNNING and self._is_gone(trial, passed)]
        for trial in ended:
            self._end(trial._trial_id, "gone")
        return self._storage.get_all_trials(self._study, deepcopy=False) if ended else trials

    def _is_gone(self, trial: FrozenTrial, passed: float) -> bool:
        beat, by = trial.user_attrs.get("beat"), trial.user_attrs.get("by")
        if by == self._me:
            return False
        last, still = self._seen.get(trial._trial_id, (beat, 0.0))
        still = still + passed if last == beat else 0.0
        self._seen[trial._trial_id] = beat, still
        return owner.certainly_dead(by) or still > self._lease

    def _end(self, handle: int, how: str) -> None:
        try:
            self._storage.set_trial_user_attr(handle, "ended", how)
            self._storage.set_trial_state_values(handle, TrialState.FAIL, None)
        except (UpdateFinishedTrialError, KeyError):
            pass  # it came to an end by itself, or another ended it


class Claim:
    """An item that this process works on."""

    def __init__(self, plan: Plan, item: Item, handle: int):
        self.item = item
        self._plan, self._handle = plan, handle

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Beats from a thread until the block ends."""
        over = threading.Event()

        def beat() -> None:
            count = 0
            while not over.wait(BEAT_SECONDS):
                count += 1
                try:
                    self._plan._storage.set_trial_user_attr(self._handle, "beat", count)
                except (UpdateFinishedTrialError, KeyError, StoreError):
                    continue  # given up by the others, or the storage is away: what is measured counts all the same

        thread = threading.Thread(target=beat, daemon=True, name="beat")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(BEAT_SECONDS)

    def done(self, record: dict, time_us: float) -> None:
        """The item's result, as a record's YAML entry. It counts even if this claim was given up by the others meanwhile."""
        storage = self._plan._storage
        try:
            storage.set_trial_user_attr(self._handle, "record", record)
            storage.set_trial_state_values(self._handle, TrialState.COMPLETE, [time_us])
        except (UpdateFinishedTrialError, KeyError):
            facts = {"item": [self.item.problem, self.item.effort, self.item.source], "by": self._plan._me, "record": record}
            storage.create_new_trial(self._plan._study, create_trial(state=TrialState.COMPLETE, value=time_us, user_attrs=facts))

    def failed(self, message: str) -> None:
        """The item cannot be tuned, here or anywhere else."""
        try:
            self._plan._storage.set_trial_user_attr(self._handle, "failed", message)
        except (UpdateFinishedTrialError, KeyError):
            return
        self._plan._end(self._handle, "failed")

    def give_back(self) -> None:
        """Somebody else may take the item."""
        self._plan._end(self._handle, "given back")


def _listed(entry: object) -> Item | None:
    """The item that `put` wrote, or None if it is none."""
    if not isinstance(entry, list) or len(entry) != 5:
        return None
    numbers = all(type(number) in (int, float) and 0 < number < math.inf for number in entry[3:])
    return Item(*map(str, entry[:3]), (float(entry[3]), float(entry[4]))) if numbers else None


def _item(trial: FrozenTrial) -> Item:
    item = trial.user_attrs.get("item")
    return Item(*map(str, item)) if isinstance(item, list) and len(item) == 3 else Item("", "", "")


def _stands(trial: FrozenTrial) -> bool:
    """Whether a claim keeps others from the item."""
    return "record" in trial.user_attrs or "failed" in trial.user_attrs or trial.state == TrialState.RUNNING


def _status(attempts: list[FrozenTrial]) -> Status:
    for trial in attempts:
        if isinstance(trial.user_attrs.get("record"), dict):
            return Status("done", record=trial.user_attrs["record"], by=trial.user_attrs.get("by"))
    for trial in attempts:
        if "failed" in trial.user_attrs:
            return Status("failed", str(trial.user_attrs["failed"]), by=trial.user_attrs.get("by"))
    running = next((trial for trial in attempts if trial.state == TrialState.RUNNING), None)
    if running:
        return Status("running", by=running.user_attrs.get("by"))
    deaths = [owner.shown(trial.user_attrs.get("by")) for trial in attempts if trial.user_attrs.get("ended") == "gone"]
    if len(deaths) >= MOST_DEATHS:
        return Status("failed", f"{len(deaths)} workers died while they were at it: {', '.join(deaths)}")
    return Status("free")
