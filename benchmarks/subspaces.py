"""Measures every config of a sub-space on the GPU at hand: what `tuning_efficiency.py` replays searches on.

    python benchmarks/subspaces.py OUT_FOLDER SECONDS [EARLIER_FOLDER]

A sub-space fixes the parameters with the fewest values to the default's until `LIMIT` legal configs are left. One file a space,
a line of JSON a config, as each is measured: the same command with the files of an earlier run goes on from there.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from collections import deque
from pathlib import Path

from autotune.core.config import Config
from autotune.core.gpu import Gpu, detect
from autotune.core.measurement import Measurement
from autotune.core.problem import Problem
from autotune.kernels import KERNELS
from autotune.kernels.base import Kernel
from autotune.tuner import EVALUATOR, builder
from autotune.tuner.builder import Builder
from autotune.tuner.worker import Worker

LIMIT = 450
SPACES = (
    ("decode_mma", "decode-bf16-b1-h32x8-q1-k8192-d128-causal"),
    ("forward_wgmma", "forward-bf16-b1-h32x8-q2048-k2048-d128-causal"),
    ("forward_mma", "forward-bf16-b2-h16x16-q1024-k1024-d64"),
    ("decode_mma", "decode-bf16-b16-h32x8-q1-k2048-d128-causal-page16"),
    ("forward_wgmma", "forward-bf16-b1-h16x8-q2048-k2048-d256-causal"),
    ("forward_wgmma", "forward-bf16-b4-h8x8-q512-k512-d64"),
)


def subspace(kernel: Kernel, problem: Problem, gpu: Gpu, limit: int = LIMIT) -> list[Config]:
    """Legal configs, at most `limit` of them, in the order of the whole space."""
    space, default = list(kernel.space(problem, gpu)), kernel.default(problem, gpu)
    names = [p.name for p in kernel.parameters if not p.derived]
    while len(space) > limit:
        free = {name: len({config[name] for config in space}) for name in names}
        smaller = {name: [config for config in space if config[name] == default[name]] for name in names if free[name] > 1}
        smaller = {name: configs for name, configs in smaller.items() if len(configs) < len(space)}
        name = min(smaller, key=lambda name: (free[name], name))
        space = smaller[name]
    return space


def read(path: Path) -> dict[tuple, float | str]:
    """Parameter values -> time in us, or the outcome of a config that has none."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return {tuple(row[0]): row[1] for row in rows if isinstance(row, list)}


def values(config: Config, kernel: Kernel) -> list:
    return [config[p.name] for p in kernel.parameters if not p.derived]


def measure(kernel: Kernel, problem: Problem, gpu: Gpu, known: dict, deadline: float, file, worker: Worker) -> tuple[int, int]:
    """Writes a line for each config of the sub-space that is not in `known`. (measured here, left when time is up)"""
    make = Builder(gpu)
    todo = deque(config for config in subspace(kernel, problem, gpu) if tuple(values(config, kernel)) not in known)
    count, running, opened = 0, deque(), 0
    with builder.pool(builder.threads()) as pool:
        while (todo or running) and time.monotonic() < deadline:
            while todo and len(running) < 3 * builder.threads():
                config = todo.popleft()
                running.append((config, pool.submit(make.build, problem.static, config)))
            config, future = running.popleft()
            built = future.result()
            if not isinstance(built, Measurement):
                if worker.pid is None or opened != worker.starts:
                    worker.call("open", problem, timeout=200)
                    opened = worker.starts
                reply = worker.call("evaluate", problem, config, built.binary, None, timeout=20)
                built = reply.value if reply.status == "done" else Measurement(reply.status if reply.status in (
                    "timeout", "crashed") else "launch_failed", message=reply.message)
                if not built.ok:
                    worker.kill()
            file.write(json.dumps([values(config, kernel), built.time_us if built.ok else built.outcome]) + "\n")
            file.flush()
            count += 1
        for _, future in running:
            future.cancel()
    return count, len(todo) + len(running)


def main(out: str, seconds: str, earlier: str | None = None) -> None:
    deadline, gpu = time.monotonic() + float(seconds), detect(0)
    with Worker(EVALUATOR, {"device": 0}) as worker:
        for name, text in SPACES:
            problem, kernel = Problem.parse(text), KERNELS[name]
            path = Path(out) / f"{name}.{text}.jsonl"
            old = Path(earlier) / path.name if earlier else path
            known = read(old) if old.is_file() else {}
            if earlier and known:
                path.write_text(old.read_text())
            with open(path, "a") as file:
                done, left = measure(kernel, problem, gpu, known, deadline, file, worker)
            print(f"{path.name}: {len(known)} known, {done} measured, {left} left", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
