"""Tuning on the GPU at hand: `Session`, which keeps one worker and all binaries over many problems."""

from __future__ import annotations

import math
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Sequence

from ..core.config import Config
from ..core.gpu import Gpu
from ..kernels import candidates, default_config, kernel_of
from ..core.measurement import Measurement
from ..core.problem import Problem
from ..database.expect import Expectation
from ..database.lookup import ranking
from ..database.record import Record
from . import builder
from .builder import Builder, Built
from .explore import COMPILE_ONLY, Budget, explore
from .finalists import choose, decide, measured_record
from .progress import Progress
from .search import Search
from .seeds import estimates, seeds, worthwhile
from .spread import EVEN, Share
from .store import Store, Trial
from .worker import Reply, Worker, WorkerError

OPEN_SECONDS = 240.0  # inputs and references; the first time on a machine CuPy compiles some hundred small kernels
CALL_SECONDS = 10.0  # for one config, besides its launches
FIRST_CALL_SECONDS = 60.0  # more, until one has worked: CuPy compiles what checking and timing need, and keeps it on disk
CALL_LAUNCHES = 60  # the worker launches a config at most so often: inputs of every kind, warm-up, samples
AHEAD = 4  # configs under way beyond one for each compile thread
FINAL_ATTEMPTS = 3
TRY_AGAIN = ("wrong", "launch_failed")  # on resume: cheap to find out, and the check or the driver may have changed


class ProblemFailed(RuntimeError):
    """A problem that cannot be tuned, with the reason; others may still be."""


@dataclass(frozen=True)
class Effort:
    """How much to spend on one problem."""

    budget: Budget
    finalists: int  # besides the default
    final_seconds: float

    @property
    def seconds(self) -> float:
        """A guess of the wall time of one problem, start-up included."""
        return self.budget.seconds + self.final_seconds + 5


EFFORTS = {
    "instant": Effort(Budget(trials=0, seconds=0.0, worth=0.0), finalists=5, final_seconds=0.2),
    "quick": Effort(Budget(trials=80, seconds=40.0, worth=0.002), finalists=8, final_seconds=4.0),
    "full": Effort(Budget(trials=800, seconds=900.0, worth=0.0005), finalists=16, final_seconds=20.0),
}


class Session:
    """Tunes problems one after another on one GPU. The caller holds the GPU's lock and closes `worker`. Trials go to `storage`
    (a URL or a folder) if it is given, else below `store_root`; `threads` compile (None: as many as cores allow)."""

    def __init__(self, gpu: Gpu, effort: Effort, worker: Worker, make: Builder, progress: Progress,
                 store_root: Path | None = None, storage: str | None = None, threads: int | None = None):
        self.gpu, self.effort, self.worker, self.make = gpu, effort, worker, make
        self.progress, self.store_root, self.storage = progress, store_root, storage
        self.threads = threads or builder.threads()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="write")  # of results, while the GPU goes on

    def tune(self, problem: Problem, known: Sequence[Record], share: Share = EVEN) -> Record:
        """The record of the best config for `problem`, seeded with `known` records, for its `share` of the effort. Raises
        `ProblemFailed`, `WorkerError`, `StoreError`, `CompilerMissing`, `CacheError`."""
        started = time.monotonic()
        desk = _Desk(self, problem)
        if not self.effort.budget.trials:
            return self._instant(problem, desk)
        searches = []
        for kernel, predictions in worthwhile(candidates(problem, self.gpu), problem, self.gpu).items():
            searches.append(Search(kernel, kernel.space(problem, self.gpu), seeds(kernel, problem, self.gpu, known, predictions),
                                   estimates(kernel, problem, self.gpu)))
        resumed = [trial for search in searches for trial in desk.restore(search)]
        budget = share.of(self.effort.budget)
        spent = sum(1 if trial.cubin else COMPILE_ONLY for trial in resumed)
        left = Budget(max(0, math.ceil(budget.trials - spent)), budget.seconds, budget.worth)
        self.progress.problem(problem.text)
        self.progress.known(len(resumed))
        with builder.pool(self.threads) as pool:
            try:
                stop = explore(searches, lambda config: self.make.build(problem.static, config), desk.evaluate, left, pool,
                               self.threads + AHEAD, desk.observe)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                desk.settle()
        order = [config for search in searches for config in sorted(search.results, key=search.space.place)]
        reason = stop.reason if left.trials else "enough configs were measured before"
        self.progress.say(f"  {reason}" + (f" ({share})" if share != EVEN else ""))
        record = desk.final(default_config(problem, self.gpu), order, reason)
        search = {**record.conditions.get("search", {}), "seconds": round(time.monotonic() - started, 1)}
        if math.isfinite(stop.outlook):
            search["outlook"] = float(f"{stop.outlook:.2g}")
        if share != EVEN:
            search["share"] = str(share)
        return replace(record, conditions={**record.conditions, "search": search})

    def _instant(self, problem: Problem, desk: _Desk) -> Record:
        """The record of a final between the configs that a lookup expects to be fastest, without a search."""
        self.progress.problem(problem.text)
        expected = ranking(problem, self.gpu)[:self.effort.finalists]
        with builder.pool() as pool:  # the final finds them compiled
            list(pool.map(lambda entry: self.make.build(problem.static, entry.config), expected))
        desk.expect(expected)
        return desk.final(default_config(problem, self.gpu), [entry.config for entry in expected],
                          "instant: only what was expected to be fastest was timed")


class _Desk:
    """One problem's dealings with worker, store and duplicates."""

    def __init__(self, session: Session, problem: Problem):
        self._session, self._problem = session, problem
        self._worker, self._make = session.worker, session.make
        self._store = Store(problem, session.gpu, session.store_root, session.storage)
        self._results: dict[Config, Measurement] = {}
        self._same: dict[tuple, Config] = {}  # what is launched -> the config that it was measured as
        self._warm = False  # whether a config of this problem has worked
        self._writing: Future | None = None
        self._submit_open()  # goes on while the first configs compile

    def _write(self, write: Callable, *arguments: object) -> None:
        """Writes a result to the store while the GPU goes on with the next config: over a network that takes 30 ms. What went
        wrong with the one before comes out here."""
        self.settle()
        self._writing = self._session.writer.submit(write, *arguments)

    def settle(self) -> None:
        """Until the last result is in the store."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def expect(self, expected: Sequence[Expectation]) -> None:
        """Takes what is expected for what was measured: for a final without a search."""
        self._results = {entry.config: Measurement("ok", time_us=entry.time_us) for entry in expected}

    def restore(self, search: Search) -> list[Trial]:
        """Tells `search` what earlier runs found out about today's kernels, and returns that."""
        latest = {trial.config: trial for trial in self._store.trials(search.kernel)}
        told = []
        for config in self._store.doubtful(search.kernel):
            search.tell(config, None)
        for config, trial in latest.items():
            if not search.has(config) or trial.measurement.outcome in TRY_AGAIN:
                continue
            if trial.source == self._make.source_sha256(self._problem.static, config):
                self._results[config] = trial.measurement
                search.tell(config, trial.measurement.time_us)
                told.append(trial)
        return told

    def observe(self, config: Config, measurement: Measurement) -> None:
        if config not in self._results:  # it did not build, or it is a duplicate: nothing was launched
            self._results[config] = measurement
            source = self._make.source_sha256(self._problem.static, config)
            self._write(self._store.add, kernel_of(config), config, source, "", measurement)
        self._session.progress.trial(config, measurement)

    def evaluate(self, config: Config, built: Built, best_us: float | None) -> Measurement:
        """Checks and times one config in the worker, unless the very same launch was measured before."""
        kernel = kernel_of(config)
        launch_values = (config[p.name] for p in kernel.parameters if p.kind == "launch")
        launch = (built.binary.sha256, *kernel.plan(self._problem, config), *launch_values)
        first = self._same.setdefault(launch, config)
        if first != config and first in self._results:
            return self._results[first]
        self._open()
        handle = self._store.begin(kernel, config, built.source_sha256, built.binary.sha256)
        try:
            measurement = self._measure(config, built, best_us)
            self._write(self._store.finish, handle, measurement)
        except BaseException:
            self._store.forget(handle)
            self._worker.kill()
            raise
        self._results[config] = measurement
        return measurement

    def final(self, default: Config, order: Sequence[Config], reason: str) -> Record:
        """Times the best again, interleaved and with every check, and makes the record. Raises `ProblemFailed`."""
        outcomes = Counter(measurement.outcome for measurement in self._results.values())
        for _ in range(FINAL_ATTEMPTS):
            built, timed = self._timed_again(default)
            if any(measurement.outcome == "ok" for measurement in timed.values()):
                winner, ties = decide(timed, default, order)
                record = measured_record(self._problem, self._session.gpu, built[winner], timed, ties, default, outcomes, reason)
                self._session.progress.finished(_summary(record))
                return record
        counts = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
        example = next((f"; for example {config}: {m.message}" for config, m in self._results.items() if not m.ok), "")
        raise ProblemFailed(f"{self._problem}: no config works ({counts}){example}")

    def _timed_again(self, default: Config) -> tuple[dict[Config, Built], dict[Config, Measurement]]:
        times = {config: m.time_us for config, m in self._results.items() if m.outcome == "ok"}
        built = {}
        for config in choose(times, default, self._session.effort.finalists, kernel_of):
            binary = self._make.build(self._problem.static, config)
            if isinstance(binary, Built) and (config in times or config not in self._results):
                built[config] = binary
        self._open()
        slowest_us = max((times[config] for config in built if config in times), default=0.0)
        seconds = self._session.effort.final_seconds
        entries = [(config, entry.binary) for config, entry in built.items()]
        reply = self._call("final", self._problem, entries, seconds,
                           timeout=CALL_SECONDS + 3 * seconds + CALL_LAUNCHES * len(built) * 1e-6 * slowest_us)
        if reply.status == "done":
            timed = dict(zip(built, reply.value))
        else:  # one of them took the worker down: each alone shows which
            timed = {}
            for config, entry in built.items():
                self._open()
                timed[config] = self._measure(config, entry, None)
        for config, measurement in timed.items():
            if measurement.outcome != "ok":  # passed the search's quick check and fails the full one
                self._results[config] = measurement
                entry = built[config]
                self._store.add(kernel_of(config), config, entry.source_sha256, entry.binary.sha256, measurement)
        return built, timed

    def _measure(self, config: Config, built: Built, best_us: float | None) -> Measurement:
        guess = best_us or kernel_of(config).account_us(self._problem, config, self._session.gpu)
        reply = self._call("evaluate", self._problem, config, built.binary, best_us,
                           timeout=CALL_SECONDS + CALL_LAUNCHES * 1e-6 * guess)
        return _measurement(reply)

    def _call(self, method: str, *arguments: object, timeout: float) -> Reply:
        reply = self._worker.call(method, *arguments, timeout=timeout + (0 if self._warm else FIRST_CALL_SECONDS))
        if reply.status == "raised":  # CUDA's errors are outcomes; this is ours, and every config would meet it
            self._worker.kill()
            raise WorkerError(f"{self._problem}: {method} failed in the process that measures kernels: {reply.message}")
        outcomes = _outcomes(reply.value)
        if "launch_failed" in outcomes and self._worker.call("healthy", timeout=CALL_SECONDS).value is not True:
            self._worker.kill()  # an illegal access stays with the CUDA context; a refused launch does not
        elif "ok" in outcomes:
            self._warm = True
        return reply

    def _submit_open(self) -> None:
        self._worker.submit("open", self._problem)
        self._start, self._opened = self._worker.starts, False

    def _open(self) -> None:
        """Makes sure that the worker, perhaps a new one, has this problem's inputs. Raises `ProblemFailed`."""
        if self._worker.pid is None or self._start != self._worker.starts:
            self._submit_open()
        if not self._opened:
            reply = self._worker.result(OPEN_SECONDS)
            if reply.status != "done":
                self._worker.kill()
                raise ProblemFailed(f"{self._problem}: its inputs cannot be prepared on the GPU: {reply.message}")
            self._opened = True


def _measurement(reply: Reply) -> Measurement:
    return reply.value if reply.status == "done" else Measurement(outcome=reply.status, message=reply.message)


def _outcomes(value: object) -> set[str]:
    """The outcomes in what the worker returned: a measurement, a list of them, or nothing."""
    return {m.outcome for m in (value if isinstance(value, list) else [value]) if isinstance(m, Measurement)}


def _summary(record: Record) -> str:
    gain = f", {record.speedup:.2f} x as fast as the default" if record.speedup else ""
    ties = f", {len(record.ties)} ties" if record.ties else ""
    tflops = record.problem.flops / record.time_us * 1e-6
    return f"{record.time_us:.1f} us ({tflops:.0f} TFLOP/s{gain}{ties}): {record.config}"
