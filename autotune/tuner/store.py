"""The store of trials: what was tried for a problem on a GPU, how it ended, and what was under way when a tuner died.

An Optuna storage: one journal file for each GPU and problem, or a database that many hosts share. One study for each kernel;
`optuna-dashboard FILE` shows it. Each trial keeps its whole `Measurement`. Before a kernel is launched its trial is written as
"launching" with the process that launches it, so that a launch which takes the whole process or machine down is found and blamed
when the store is opened again. Any number of processes may write; one that may be alive is never blamed.
A trial counts for as long as its config still renders to the same source; a winner is a query on the store.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from ..core.config import Config, ConfigError
from ..core.gpu import Gpu
from ..core.measurement import Measurement
from ..core.problem import Problem
from ..kernels import KERNELS
from ..kernels.base import Kernel
from . import owner
from .storages import StoreError, open_journal, open_storage, quiet_optuna, trials_root

__all__ = ["Store", "StoreError", "Trial", "read_trials", "trials_root"]

RUNNING, COMPILED, INTERRUPTED = "launching", "compiled", "interrupted"
FACTS = "facts"  # the attribute of a trial in a database that has what is known when it begins
LOST_LAUNCHES = 2  # processes that vanished, unseen, while they launched a config: it is not launched a third time


@dataclass(frozen=True)
class Trial:
    """One config that was tried. `source` is the hash of what it rendered to, `cubin` of the binary ("" if none)."""

    config: Config
    source: str
    cubin: str
    measurement: Measurement


class Store:
    """The trials of one problem on one GPU: in `storage` if it is given (a URL or a folder), else in a journal under `root`.

    Raises `StoreError` where the storage cannot be reached, read or written.
    """

    def __init__(self, problem: Problem, gpu: Gpu, root: Path | None = None, storage: str | None = None):
        self.name = _named(problem.text, gpu)
        self._storage = open_storage(storage, f"{gpu.name}/{problem.text}", root)
        self._studies: dict[str, int] = {}
        self._pending: dict[int, tuple[Kernel, dict]] = {}  # what was begun here
        self._end_what_died()

    @property
    def path(self) -> Path | None:
        """The journal file, or None for a database."""
        return self._storage.path

    def trials(self, kernel: Kernel) -> list[Trial]:
        """Every trial of `kernel` that ended, oldest first. Configs that are no longer legal values are left out."""
        return list(_ended(self._all(), kernel, self.name + kernel.name))

    def begin(self, kernel: Kernel, config: Config, source: str, cubin: str) -> int:
        """Writes that `config` is about to be launched. Returns the handle for `finish` or `forget`."""
        return self._create(kernel, config, source, cubin, RUNNING)

    def finish(self, handle: int, measurement: Measurement) -> None:
        """Writes how the launch ended. From the first of the two writes on it counts, whatever happens then."""
        ok = measurement.outcome == "ok"
        kernel, facts = self._pending.pop(handle)
        try:
            self._storage.set_trial_user_attr(handle, "measurement", measurement.as_dict())
            self._storage.set_trial_state_values(handle, TrialState.COMPLETE if ok else TrialState.FAIL,
                                                 [measurement.time_us] if ok else None)
        except (UpdateFinishedTrialError, KeyError):  # somebody gave this process up, or the first line is lost
            if facts["uid"] not in self._measured():
                self._end(self._write(kernel, {**facts, "phase": COMPILED}), measurement)

    def forget(self, handle: int) -> None:
        """Ends a trial that the user interrupted: nobody is to blame, and the config may be tried again."""
        self._pending.pop(handle, None)
        try:
            self._storage.set_trial_user_attr(handle, "phase", INTERRUPTED)
            self._storage.set_trial_state_values(handle, TrialState.FAIL, None)
        except (UpdateFinishedTrialError, KeyError):
            pass  # its measurement was written, or somebody else ended it

    def add(self, kernel: Kernel, config: Config, source: str, cubin: str, measurement: Measurement) -> None:
        """Writes a trial that never launched: it did not compile, spilled, or is the same binary as another."""
        self.finish(self._create(kernel, config, source, cubin, COMPILED), measurement)

    def doubtful(self, kernel: Kernel) -> set[Config]:
        """Configs whose launch `LOST_LAUNCHES` processes did not come back from, though nobody could see how they ended."""
        lost: dict[Config, set[str]] = {}
        for trial in self._all():
            attributes = _facts(trial)
            if attributes.get("phase") == RUNNING and "measurement" not in attributes and attributes.get("by") != owner.me():
                if config := _config(attributes, kernel):
                    lost.setdefault(config, set()).add(repr(attributes.get("by")))
        return {config for config, owners in lost.items() if len(owners) >= LOST_LAUNCHES}

    def _study(self, kernel: str) -> int:
        name = self.name + kernel
        if kernel not in self._studies:
            self._studies[kernel] = study_of(self._storage, name)
        return self._studies[kernel]

    def _create(self, kernel: Kernel, config: Config, source: str, cubin: str, phase: str) -> int:
        facts = {"phase": phase, "study": self.name + kernel.name, "config": config.as_dict(), "source": source, "cubin": cubin,
                 "by": owner.me(), "uid": uuid.uuid4().hex}
        handle = self._write(kernel, facts)
        self._pending[handle] = kernel, facts
        return handle

    def _write(self, kernel: Kernel, facts: dict) -> int:
        parameters = [p for p in kernel.parameters if not p.derived and self.path]  # in a database each costs three queries,
        attributes = facts if self.path else {FACTS: facts}  # and each attribute two
        trial = create_trial(state=TrialState.RUNNING, params={p.name: facts["config"][p.name] for p in parameters},
                             distributions={p.name: CategoricalDistribution(p.values) for p in parameters}, user_attrs=attributes)
        return self._storage.create_new_trial(self._study(kernel.name), template_trial=trial)

    def _all(self) -> Iterator[FrozenTrial]:
        """Every trial of this problem and GPU, also of a journal's study whose first line is lost: each says where it belongs."""
        for study, name in self._own_studies():
            for trial in self._storage.get_all_trials(study, deepcopy=False):
                if _facts(trial).get("study", name).startswith(self.name):
                    yield trial

    def _own_studies(self) -> Iterator[tuple[int, str]]:
        """(id, name) of studies that may hold trials of this problem. A database has thousands of others."""
        if self.path:
            for study in self._storage.get_all_studies():
                if study.study_name.startswith((self.name, "lost-")):
                    yield study._study_id, study.study_name
            return
        for kernel in KERNELS:
            if (study := self._studies.get(kernel) or known_study(self._storage, self.name + kernel)) is not None:
                self._studies[kernel] = study
                yield study, self.name + kernel

    def _measured(self) -> set[str]:
        """The uids of all trials that have a measurement."""
        return {_facts(trial).get("uid", "") for trial in self._all() if "measurement" in trial.user_attrs}

    def _end_what_died(self) -> None:
        """Ends what processes that are certainly dead left: with its measurement if there is one, else as a crash."""
        ended = self._measured()
        for trial in list(self._all()):
            attributes = _facts(trial)
            if trial.state != TrialState.RUNNING or not owner.certainly_dead(attributes.get("by")):
                continue
            measurement = _measurement(attributes)
            if measurement is None and attributes.get("phase") == RUNNING and attributes.get("uid") not in ended:
                message = f"the tuner died while this kernel was running ({owner.shown(attributes['by'])})"
                measurement = Measurement(outcome="crashed", message=message)
            self._end(trial._trial_id, measurement)

    def _end(self, handle: int, measurement: Measurement | None) -> None:
        try:
            if measurement is None:
                self.forget(handle)
                return
            self._storage.set_trial_user_attr(handle, "measurement", measurement.as_dict())
            self._storage.set_trial_state_values(handle, TrialState.COMPLETE if measurement.ok else TrialState.FAIL,
                                                 [measurement.time_us] if measurement.ok else None)
        except (UpdateFinishedTrialError, KeyError):
            pass  # another tuner that opened the store at the same time did it


def known_study(storage, name: str) -> int | None:
    """The id of the study called `name`, or None if there is none."""
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        return None


def study_of(storage, name: str) -> int:
    """The id of the study called `name`, which is made if there is none."""
    if (known := known_study(storage, name)) is not None:
        return known
    try:
        with quiet_optuna():
            return storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], name)
    except DuplicatedStudyError:  # of another tuner, just now
        return storage.get_study_id_from_name(name)


def read_trials(path: Path, kernel: Kernel) -> list[Trial]:
    """Every ended trial of `kernel` in a journal file, which is only read. Raises `StoreError`."""
    if not path.is_file():
        raise StoreError(f"{path} is not there; `autotune tune` writes such files under {trials_root()}")
    storage = open_journal(path)
    return [trial for study in storage.get_all_studies() if study.study_name.endswith(f" {kernel.name}")
            for trial in _ended(storage.get_all_trials(study._study_id, deepcopy=False), kernel, study.study_name)]


def database_trials(where: str, problem: Problem, gpu: Gpu, kernel: Kernel) -> list[Trial]:
    """Every ended trial of `kernel` for `problem` on `gpu` in the database at the URL `where`, which is only read. Raises
    `StoreError`."""
    storage, name = open_storage(where, ""), _named(problem.text, gpu) + kernel.name
    study = known_study(storage, name)
    return [] if study is None else list(_ended(storage.get_all_trials(study, deepcopy=False), kernel, name))


def database_problems(where: str, gpu: Gpu) -> list[str]:
    """The texts of problems that have a study for `gpu` in the database at `where`, sorted. Raises `StoreError`."""
    names = [study.study_name.partition(" ") for study in open_storage(where, "").get_all_studies()]
    return sorted({text for text, _, rest in names if f"{text} {rest}".startswith(_named(text, gpu))})


def _named(problem: str, gpu: Gpu) -> str:
    """What the names of a problem's studies begin with."""
    return f"{problem} sm{'-'.join(map(str, gpu.identity))} "


def _ended(trials: Iterator[FrozenTrial], kernel: Kernel, study: str) -> Iterator[Trial]:
    for trial in trials:
        attributes = _facts(trial)
        if attributes.get("study", study) != study or not attributes.get("config"):
            continue
        config, measurement = _config(attributes, kernel), _measurement(attributes)
        if config and measurement and isinstance(attributes.get("source"), str) and isinstance(attributes.get("cubin"), str):
            yield Trial(config, attributes["source"], attributes["cubin"], measurement)


def _facts(trial: FrozenTrial) -> dict:
    """The attributes of a trial; those of its beginning stand together in a database."""
    facts = trial.user_attrs.get(FACTS)
    return {**facts, **trial.user_attrs} if isinstance(facts, dict) else trial.user_attrs


def _config(attributes: dict, kernel: Kernel) -> Config | None:
    """The config of a trial; None if it is none of `kernel`, or none any more: a parameter changed since."""
    raw = attributes.get("config")
    if not isinstance(raw, dict) or raw.get("kernel", kernel.name) != kernel.name:
        return None
    try:
        return kernel.typed_config({name: value for name, value in raw.items() if name != "kernel"}, "a stored trial")
    except (ConfigError, ValueError, KeyError, TypeError):
        return None


def _measurement(attributes: dict) -> Measurement | None:
    try:
        return Measurement.from_dict(attributes.get("measurement"))
    except (ValueError, TypeError):
        return None
