"""A tune over many GPUs on a simulated clock, over a real PostgreSQL: what `many_gpus.py --simulate` runs.

Each worker, and the leader, runs `Plan` as it is, with a connection of its own; one thread runs at a time, the one whose turn
comes first on the clock. An operation takes what the server's process spent on it (/proc/PID/schedstat), during which a core of
the database serves nobody else, plus what its client spent (that thread's CPU time), plus a round trip over a network for each
statement and a flush of the log for each commit. Writes of trials are carried out for real too, until `SAMPLES` of a kind are
measured; later ones take the time of one of these. A trial takes `TRIAL_S` of a GPU, as in a quick tune on an H200. So what grows
with the plan, collisions of claims and leases are real, and the load of the host that simulates hardly counts.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from statistics import mean, median

import postgresql
from autotune.core.gpu import by_name
from autotune.core.measurement import Measurement
from autotune.core.problem import Problem
from autotune.kernels import default_config, kernel_of
from autotune.tuner import plan as plans
from autotune.tuner import storages
from autotune.tuner.plan import BEAT_SECONDS, Item, Plan
from autotune.tuner.store import Store
from autotune.tuner.work import LOOK_SECONDS

ROUND_TRIP_S = 0.0003  # of a statement, in a cluster's network
COMMIT_S = 0.001  # of a commit: flush to an NVMe disk
CORES = 2  # of the database's host
TRIAL_S, SPILLS = 0.4, 0.2  # of a GPU's time; of the configs, written and not launched
START_S, FINAL_S = 3.0, 6.0  # of a problem: inputs, final
TRIALS = (25, 80)  # of a problem, drawn evenly
SAMPLES = 40
RESULT = {"entry": {"config": "x" * 500, "conditions": "x" * 700}}  # as large as a record is


class Clock:
    """Threads that take turns on a simulated clock: one runs at a time, that with the earliest moment."""

    def __init__(self):
        self.now, self._waiting, self._count = 0.0, [], 0
        self._cores = [0.0] * CORES  # when each is free again

    def start(self, work) -> None:
        """`work()` begins now, in a thread."""
        turn = threading.Event()
        self._push(self.now, turn)

        def run():
            turn.wait()
            try:
                work()
            finally:
                self._next()

        threading.Thread(target=run, daemon=True).start()

    def run(self) -> None:
        """Until every thread has ended."""
        self._over = threading.Event()
        self._next()
        self._over.wait()

    def sleep(self, seconds: float) -> None:
        turn = threading.Event()
        self._push(self.now + seconds, turn)
        self._next()
        turn.wait()

    def served(self, seconds: float) -> None:
        """Waits for a core of the database, and keeps it so long."""
        core = min(range(CORES), key=self._cores.__getitem__)
        ends = max(self.now, self._cores[core]) + seconds
        self._cores[core] = ends
        self.sleep(ends - self.now)

    def _push(self, moment: float, turn: threading.Event) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (moment, self._count, turn))

    def _next(self) -> None:
        if self._waiting:
            self.now, _, turn = heapq.heappop(self._waiting)
            turn.set()
        else:
            self._over.set()


class Database:
    """A storage whose operations take simulated time: one connection of one host."""

    def __init__(self, url: str, clock: Clock, costs: dict):
        from sqlalchemy import event

        self._storage, self._clock, self.costs = storages._open_database(url), clock, costs
        self.path = None
        self._statements = self._commits = 0
        engine = self._storage._storage._backend.engine
        event.listen(engine, "before_cursor_execute", lambda *_: self._count("_statements"))
        event.listen(engine, "commit", lambda *_: self._count("_commits"))
        with engine.connect() as connection:
            self._server = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        self._statements = self._commits = 0

    def _count(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)

    def __getattr__(self, method: str):
        def work(*arguments, **keywords):
            before = _ran_s(self._server), time.thread_time(), self._statements, self._commits
            try:
                return getattr(self._storage, method)(*arguments, **keywords)
            finally:
                server, client = _ran_s(self._server) - before[0], time.thread_time() - before[1]
                away = ROUND_TRIP_S * (self._statements - before[2]) + COMMIT_S * (self._commits - before[3])
                self.costs[method].append((server, client + away))
                self.spend(server, client + away)

        return work

    def spend(self, server: float, elsewhere: float) -> None:
        self._clock.served(server)
        self._clock.sleep(elsewhere)


def _ran_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) * 1e-9


class Simulation:
    """`workers` workers and a leader on `problems` problems."""

    def __init__(self, url: str, workers: int, problems: int, seed: int = 0):
        self.url, self.workers, self.clock, self.gpu = url, workers, Clock(), by_name("nvidia-h200")
        self.draw = random.Random(seed)
        self.costs: dict[str, list] = defaultdict(list)
        self.trial_costs: dict[str, list] = defaultdict(list)
        self.items = [Item(f"forward-bf16-b{1 + n % 32}-h32x8-q{512 + n}-k{512 + n}-d128-causal", "quick", "source")
                      for n in range(problems)]
        self.trials = {item: self.draw.randint(*TRIALS) for item in self.items}
        self.done: Counter = Counter()
        self.gpu_s, self.ended_s = 0.0, 0.0
        self.config = default_config(Problem.parse(self.items[0].problem), self.gpu)

    def run(self) -> None:
        database = self._database()
        Plan(self.url, self.gpu)  # makes tables and study
        storages._DATABASES.clear()
        self.clock.start(lambda: self._lead(self._plan(database)))
        for _ in range(self.workers):
            self.clock.start(partial(self._work, self._database()))
        self.clock.run()

    def _database(self) -> Database:
        return Database(self.url, self.clock, self.costs)

    def _plan(self, database: Database) -> Plan:
        plans.open_storage, before = (lambda *_: database), plans.open_storage
        try:
            return Plan(self.url, self.gpu, clock=lambda: self.clock.now)
        finally:
            plans.open_storage = before

    def _lead(self, plan: Plan) -> None:
        plan.put(self.items)
        while True:
            states = Counter(status.state for status in plan.statuses().values())
            if states["done"] == len(self.items):
                self.ended_s = self.clock.now
                return
            self.clock.sleep(1.0)

    def _work(self, database: Database) -> None:
        plan = self._plan(database)
        while not self.ended_s:
            claim = plan.claim()
            if claim is None:
                self.clock.sleep(LOOK_SECONDS)
                continue
            plan.statuses()  # what is known of others
            beating = [True]
            self.clock.start(lambda claim=claim, beating=beating: self._beat(plan, claim, beating))
            self._tune(claim.item, database)
            beating.clear()
            claim.done(RESULT, 100.0)
            self.done[claim.item] += 1

    def _beat(self, plan: Plan, claim, beating: list) -> None:
        count = 0
        while True:
            self.clock.sleep(BEAT_SECONDS)
            if not beating:
                return
            count += 1
            plan._storage.set_trial_user_attr(claim._handle, "beat", count)

    def _tune(self, item: Item, database: Database) -> None:
        self._gpu(START_S)
        writing: list = []
        kernel, source, cubin = kernel_of(self.config), "s" * 64, "c" * 64
        spilled = Measurement("spilled", message="x" * 80)
        store = self._write("open", database, lambda: self._store(item, database))
        for _ in range(self.trials[item]):
            self._write("begin", database, lambda: store.begin(kernel, self.config, source, cubin))
            self._gpu(TRIAL_S)
            self._later("finish", database, lambda: store.finish(next(iter(store._pending)), self._measured()), writing)
            if self.draw.random() < SPILLS:
                self._later("add", database, lambda: store.add(kernel, self.config, source, "", spilled), writing)
        self._settle(writing)
        self._gpu(FINAL_S)

    def _gpu(self, seconds: float) -> None:
        self.gpu_s += seconds
        self.clock.sleep(seconds)

    def _store(self, item: Item, database: Database) -> Store:
        from autotune.tuner import store as module

        module.open_storage, before = (lambda *_: database), module.open_storage
        try:
            return Store(Problem.parse(item.problem), self.gpu, storage=self.url)
        finally:
            module.open_storage = before

    def _measured(self) -> Measurement:
        return Measurement.of_samples([100.0 + self.draw.random() for _ in range(12)], policy="graph over 40 input sets",
                                      conditions={"driver": "580.159.04", "other_processes": 0})

    def _later(self, kind: str, database: Database, work, writing: list) -> None:
        """As a session does: written while the GPU goes on, one after another."""
        self._settle(writing)
        if len(self.trial_costs[kind]) < SAMPLES:
            self._write(kind, database, work)
            return
        writing.append(True)

        def write():
            database.spend(*self.draw.choice(self.trial_costs[kind]))
            writing.clear()

        self.clock.start(write)

    def _settle(self, writing: list) -> None:
        while writing:
            self.clock.sleep(0.002)

    def _write(self, kind: str, database: Database, work):
        """`work()` for real the first times of a kind; later ones only take as long."""
        known = self.trial_costs[kind]
        if len(known) < SAMPLES or kind == "open":
            mine = self.costs.copy()
            before = {name: len(entries) for name, entries in mine.items()}
            result = work()
            new = [entry for name, entries in self.costs.items() for entry in entries[before.get(name, 0):]]
            known.append((sum(server for server, _ in new), sum(elsewhere for _, elsewhere in new)))
            return result
        database.spend(*self.draw.choice(known))
        return None


def simulate(workers: int, problems: int) -> dict:
    with postgresql.server() as (url, _):
        simulation = Simulation(url, workers, problems)
        began = time.monotonic()
        simulation.run()
    repeated = sum(count - 1 for count in simulation.done.values())
    longest = max(simulation.trials.values()) * TRIAL_S + START_S + FINAL_S
    bound = max(simulation.gpu_s / workers, longest)
    costs = {name: {"calls": len(entries), "server_ms": round(1e3 * median(server for server, _ in entries), 2),
                    "elsewhere_ms": round(1e3 * median(other for _, other in entries), 2)}
             for name, entries in sorted(simulation.costs.items()) if len(entries) >= workers}
    writes = {name: {"server_ms": round(1e3 * mean(server for server, _ in entries), 2),
                     "elsewhere_ms": round(1e3 * mean(other for _, other in entries), 2)}
              for name, entries in simulation.trial_costs.items()}
    return {"workers": workers, "problems": problems, "share_of_linear": round(simulation.gpu_s / workers / simulation.ended_s,
                                                                               4),
            "ended_s": round(simulation.ended_s, 1), "gpu_s": round(simulation.gpu_s, 1), "bound_s": round(bound, 1),
            "tuned_twice": repeated, "operations": costs, "writes_of_a_trial": writes, "took_s": round(time.monotonic() - began),
            "assumed": {"database_cores": CORES, "round_trip_ms": 1e3 * ROUND_TRIP_S, "commit_ms": 1e3 * COMMIT_S,
                        "trial_s": TRIAL_S}}
