"""Measures every config of a sub-space on the GPU at hand: what `tuning_efficiency.py` replays searches on.

    python benchmarks/subspaces.py OUT_FOLDER SECONDS [EARLIER_FOLDER]

A sub-space keeps every parameter free with some of its values, the default's among them, until `LIMIT` legal configs are left.
One gzipped file a space, a line of JSON a config in the order of the space: the parameters' values, then the time in us or the
outcome. The same command with the folder of an earlier run goes on from there, also after it was killed.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Mapping, Sequence

import numpy as np

from autotune.core.config import Config
from autotune.core.gpu import Gpu, detect
from autotune.core.measurement import Measurement
from autotune.core.problem import Problem
from autotune.kernels import KERNELS
from autotune.kernels.base import Kernel
from autotune.tuner import EVALUATOR, builder
from autotune.tuner.builder import Builder
from autotune.tuner.worker import Worker

LIMIT = 1000  # configs; six spaces of them take about 8 minutes on an H200's host with 16 cores
SPACES = (
    ("decode_mma", "decode-bf16-b1-h32x8-q1-k8192-d128-causal"),
    ("forward_wgmma", "forward-bf16-b1-h32x8-q2048-k2048-d128-causal"),
    ("forward_mma", "forward-bf16-b2-h16x16-q1024-k1024-d64"),
    ("decode_mma", "decode-bf16-b16-h32x8-q1-k2048-d128-causal-page16"),
    ("forward_wgmma", "forward-bf16-b1-h16x8-q2048-k2048-d256-causal"),
    ("forward_wgmma", "forward-bf16-b4-h8x8-q512-k512-d64"),
)
FLAG = 3.5  # values that a flag counts as when one has to go
SAVE_SECONDS = 20.0  # of measuring that a kill may cost


def subspace(kernel: Kernel, problem: Problem, gpu: Gpu, limit: int = LIMIT) -> list[Config]:
    """Legal configs, at most `limit` of them, in the order of the whole space.

    The parameter with the most values left gives one up, again and again: by turns the one farthest from the default's and one
    next to it, so that what is left reaches far and lies near. A flag counts as `FLAG` values, so numbers keep three and some
    flags two.
    """
    space, default = kernel.space(problem, gpu), kernel.default(problem, gpu)
    parameters = [p for p in kernel.parameters if not p.derived]
    points = np.array([[p.values.index(config[p.name]) for p in parameters] for config in space], dtype=np.int16)
    places, left = [p.values.index(default[p.name]) for p in parameters], np.arange(len(space))
    while len(left) > limit:
        here = [np.unique(column) for column in points[left].T]
        weights = [0 if len(found) == 1 else FLAG if type(p.values[0]) is bool else len(found)
                   for p, found in zip(parameters, here)]
        n = max(range(len(parameters)), key=lambda n: (weights[n], -n))
        others = sorted((value for value in here[n] if value != places[n]), key=lambda value: (abs(value - places[n]), value))
        gone = others[0] if len(others) % 2 else others[-1]
        left = left[points[left, n] != gone]
    return [space[i] for i in left]


def file_name(kernel: str, problem: str) -> str:
    return f"{kernel}.{problem}.jsonl.gz"


def read(path: Path) -> dict[tuple, float | str]:
    """Parameter values -> time in us, or the outcome of a config that has none."""
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {tuple(row[0]): row[1] for row in rows}


def write(path: Path, kernel: Kernel, space: Sequence[Config], found: Mapping[tuple, float | str]) -> None:
    """Puts what is known of `space` into the file at `path`, whole or not at all; the same results give the same bytes."""
    rows = [[key, found[key]] for key in (values(config, kernel) for config in space) if key in found]
    text = "".join(json.dumps([list(key), result], separators=(",", ":")) + "\n" for key, result in rows)
    beside = path.with_suffix(".new")
    beside.write_bytes(gzip.compress(text.encode(), mtime=0))
    beside.replace(path)


def values(config: Config, kernel: Kernel) -> tuple:
    return tuple(config[p.name] for p in kernel.parameters if not p.derived)


class Recording:
    """One sub-space being measured with `worker`. `found` has what is known."""

    def __init__(self, kernel: Kernel, problem: Problem, gpu: Gpu, worker: Worker, found: dict[tuple, float | str]):
        self.kernel, self.problem, self.worker, self.found = kernel, problem, worker, found
        self.space = subspace(kernel, problem, gpu)
        self.missing = deque(config for config in self.space if values(config, kernel) not in found)
        self._make = Builder(gpu)
        self._opened = 0
        self.best_us = min((time for time in found.values() if not isinstance(time, str)), default=None)

    def run(self, deadline: float, save) -> None:
        """Measures until `deadline` and calls `save` now and then. The worker's process goes only with what may have broken
        it."""
        threads, running, saved = builder.threads(), deque(), time.monotonic()
        with builder.pool(threads) as pool:
            while (self.missing or running) and time.monotonic() < deadline:
                while self.missing and len(running) < 3 * threads:
                    config = self.missing.popleft()
                    running.append((config, pool.submit(self._make.build, self.problem.static, config)))
                config, future = running.popleft()
                built = future.result()
                measured = built if isinstance(built, Measurement) else self._measured(config, built)
                self.found[values(config, self.kernel)] = measured.time_us if measured.ok else measured.outcome
                if measured.ok:
                    self.best_us = min(measured.time_us, self.best_us or measured.time_us)
                if time.monotonic() - saved > SAVE_SECONDS:
                    save()
                    saved = time.monotonic()
            for config, future in running:
                future.cancel()
                self.missing.append(config)

    def _measured(self, config: Config, built) -> Measurement:
        if self.worker.pid is None or self._opened != self.worker.starts:
            self.worker.call("open", self.problem, timeout=240)
            self._opened = self.worker.starts
        reply = self.worker.call("evaluate", self.problem, config, built.binary, self.best_us, timeout=30)
        if reply.status == "done":
            if reply.value.outcome == "launch_failed":
                self.worker.kill()
            return reply.value
        if reply.status == "raised":
            raise SystemExit(f"{self.problem}: {config}: {reply.message}")
        return Measurement(reply.status, message=reply.message)


def main(out: str, seconds: str, earlier: str | None = None) -> None:
    deadline, gpu = time.monotonic() + float(seconds), detect(0)
    Path(out).mkdir(parents=True, exist_ok=True)
    with Worker(EVALUATOR, {"device": 0}) as worker:
        worker.start()
        for name, text in SPACES:
            path, began = Path(out) / file_name(name, text), time.monotonic()
            known = next((read(file) for file in (path, Path(earlier or out) / path.name) if file.is_file()), {})
            count = len(known)
            recording = Recording(KERNELS[name], Problem.parse(text), gpu, worker, known)

            def save(path=path, recording=recording):
                write(path, recording.kernel, recording.space, recording.found)

            recording.run(deadline, save)
            save()
            worker.kill()  # the next problem's inputs are others; its memory is freed by the process's end
            outcomes = Counter(result if isinstance(result, str) else "ok" for result in recording.found.values())
            print(f"{path.name}: {len(recording.space)} configs, {count} known, {len(recording.found) - count} measured in "
                  f"{time.monotonic() - began:.0f} s, {len(recording.missing)} left; {dict(outcomes)}; {path.stat().st_size} "
                  "bytes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
