"""The store of trials: what was tried for a problem on a GPU, how it ended, and what was under way when a tuner died.

One Optuna journal file for each GPU and problem, one study in it for each kernel; `optuna-dashboard FILE` shows it.
Each trial keeps its whole `Measurement`. Before a kernel is launched its trial is written as "launching", so that a
launch which takes the whole process or machine down is found and blamed when the store is opened again.
A trial counts for as long as its config still renders to the same source; a winner is a query on the store.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState, create_trial

from ..core.config import Config, ConfigError
from ..database.view import user_root
from ..core.gpu import Gpu
from ..kernels.base import Kernel
from ..core.measurement import Measurement
from ..core.problem import Problem
from .search import quiet_optuna

RUNNING, DONE = "launching", "done"


class StoreError(OSError):
    """The store cannot be read or written, with a sentence that says which file and what to do."""


@dataclass(frozen=True)
class Trial:
    """One config that was tried. `source` is the hash of what it rendered to, `cubin` of the binary ("" if none)."""

    config: Config
    source: str
    cubin: str
    measurement: Measurement


def trials_root() -> Path:
    """The folder of all journals: ``trials`` in the user's database folder."""
    return user_root() / "trials"


class Store:
    """The trials of one problem on one GPU. One process writes at a time (the tuner's lock on the GPU sees to it)."""

    def __init__(self, problem: Problem, gpu: Gpu, root: Path | None = None):
        self.path = (trials_root() if root is None else root) / gpu.name / f"{problem.text}.journal"
        self._prefix = f"{problem.text} sm{'-'.join(map(str, gpu.identity))} "
        self._studies: dict[str, int] = {}
        self._storage = _open(self.path)
        self._attribute_crashes()

    def trials(self, kernel: Kernel) -> list[Trial]:
        """Every trial of `kernel` that ended, oldest first. Configs that are no longer legal values are left out."""
        return list(_ended(self._storage, self._study(kernel.name), kernel))

    def begin(self, kernel: Kernel, config: Config, source: str, cubin: str) -> int:
        """Writes that `config` is about to be launched. Returns the handle for `finish` or `forget`."""
        return self._create(kernel, config, source, cubin, TrialState.RUNNING)

    def finish(self, handle: int, measurement: Measurement) -> None:
        """Writes how the launch ended."""
        with _writing(self.path):
            self._storage.set_trial_user_attr(handle, "measurement", measurement.as_dict())
            self._storage.set_trial_user_attr(handle, "phase", DONE)
            ok = measurement.outcome == "ok"
            self._storage.set_trial_state_values(handle, TrialState.COMPLETE if ok else TrialState.FAIL,
                                                 [measurement.time_us] if ok else None)

    def forget(self, handle: int) -> None:
        """Ends a trial that the user interrupted: nobody is to blame, and the config may be tried again."""
        with _writing(self.path):
            self._storage.set_trial_user_attr(handle, "phase", "interrupted")
            self._storage.set_trial_state_values(handle, TrialState.FAIL, None)

    def add(self, kernel: Kernel, config: Config, source: str, cubin: str, measurement: Measurement) -> None:
        """Writes a trial that never launched: it did not compile, spilled, or is the same binary as another."""
        self.finish(self._create(kernel, config, source, cubin, TrialState.RUNNING, phase="compiled"), measurement)

    def _study(self, kernel: str) -> int:
        if kernel not in self._studies:
            name = self._prefix + kernel
            with _writing(self.path), quiet_optuna():
                known = {study.study_name: study._study_id for study in self._storage.get_all_studies()}
                self._studies[kernel] = known[name] if name in known else self._storage.create_new_study(
                    [optuna.study.StudyDirection.MINIMIZE], name)
        return self._studies[kernel]

    def _create(self, kernel: Kernel, config: Config, source: str, cubin: str, state: TrialState, phase: str = RUNNING) -> int:
        parameters = [p for p in kernel.parameters if not p.derived]
        trial = create_trial(state=state, params={p.name: config[p.name] for p in parameters},
                             distributions={p.name: CategoricalDistribution(p.values) for p in parameters},
                             user_attrs={"phase": phase, "config": config.as_dict(), "source": source, "cubin": cubin})
        with _writing(self.path):
            return self._storage.create_new_trial(self._study(kernel.name), template_trial=trial)

    def _attribute_crashes(self) -> None:
        for study in self._storage.get_all_studies():
            for trial in self._storage.get_all_trials(study._study_id, deepcopy=False, states=(TrialState.RUNNING,)):
                if trial.user_attrs.get("phase") == RUNNING and "measurement" not in trial.user_attrs:
                    message = "the tuner died while this kernel was running"
                    self.finish(trial._trial_id, Measurement(outcome="crashed", message=message))
                else:
                    self.forget(trial._trial_id)


def read_trials(path: Path, kernel: Kernel) -> list[Trial]:
    """Every ended trial of `kernel` in a journal file, which is only read. Raises `StoreError`."""
    if not path.is_file():
        raise StoreError(f"{path} is not there; `autotune tune` writes such files under {trials_root()}")
    try:
        storage = JournalStorage(JournalFileBackend(str(path)))
        return [trial for study in storage.get_all_studies() if study.study_name.endswith(f" {kernel.name}")
                for trial in _ended(storage, study._study_id, kernel)]
    except Exception as error:  # whatever a damaged journal makes Optuna raise
        raise StoreError(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def _ended(storage: JournalStorage, study: int, kernel: Kernel) -> Iterator[Trial]:
    for trial in storage.get_all_trials(study, deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL)):
        attributes = trial.user_attrs
        if attributes.get("phase") != DONE:
            continue
        try:
            raw = {name: value for name, value in attributes["config"].items() if name != "kernel"}
            yield Trial(kernel.typed_config(raw, "a stored trial"), attributes["source"], attributes["cubin"],
                        Measurement.from_dict(attributes["measurement"]))
        except (ConfigError, ValueError, KeyError):
            continue  # a parameter or a field changed since: the trial says nothing about today's kernels


def _open(path: Path) -> JournalStorage:
    """The journal at `path`. A torn last line is cut off; a file that cannot be understood is moved aside."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
    try:
        return _journal(path)
    except OSError as error:
        raise StoreError(_sentence(path, error)) from None
    except Exception:  # whatever a damaged journal makes Optuna raise
        with _writing(path):
            aside = path.with_suffix(".journal.damaged")
            os.replace(path, aside)
        return _journal(path)


def _journal(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))


def _cut_torn_line(path: Path) -> None:
    """A writer that was killed leaves half a line, after which Optuna cannot append."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
    lock = Path(f"{path}.lock")
    lock.unlink(missing_ok=True)  # left by the same killed writer; the GPU's lock says that no other lives


@contextmanager
def _writing(path: Path):
    """Turns an OSError into a `StoreError` that names the file and the way out."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(_sentence(path, error)) from None


def _sentence(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror or error}); set AUTOTUNE_DB to a folder that can, with free space"
