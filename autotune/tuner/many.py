"""One tune on several GPUs of this machine: a worker process each, after a test that they are equally fast."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from statistics import median_low
from typing import Callable, Iterator, Mapping, Sequence

from ..core.gpu import Gpu, GpuError, detect
from ..core.problem import Problem
from ..kernels import default_config
from . import EVALUATOR, TuneError, builder
from .builder import Builder, Built
from .gpulock import gpu_lock
from .session import CALL_SECONDS, FIRST_CALL_SECONDS, OPEN_SECONDS
from .worker import Worker, WorkerError

AGREE = 0.02  # times of one kernel on GPUs that share results
TESTS = 3  # times a kernel is timed on each; the fastest counts, because a GPU that was idle has to clock up first
STOP_SECONDS = 20.0  # for a worker to end what it is at


def devices_of(wanted: str, gpu: Gpu | None, count: int) -> tuple[Gpu, list[int], list[str]]:
    """(GPU model, CUDA indices, a sentence for each device left out) for ``all`` or ``0,2``. Raises `TuneError`, `GpuError`.

    `gpu` None: the model of the first device. Devices of other models are left out: their results are not each other's.
    """
    if wanted == "all":
        listed = list(range(count))
    else:
        try:
            listed = list(dict.fromkeys(int(part) for part in wanted.split(",")))
        except ValueError:
            raise TuneError(f"--gpus is {wanted!r}; it must be all, or indices such as 0,1") from None
    if bad := [index for index in listed if not 0 <= index < count]:
        raise TuneError(f"--gpus names device {bad[0]}; this machine has {count}, counted from 0")
    if not listed:
        raise GpuError("no GPU is here; `nvidia-smi` shows whether a driver is loaded")
    gpu = gpu or detect(listed[0])
    there = {index: detect(index) for index in listed}
    mine = [index for index, other in there.items() if other.identity == gpu.identity]
    if not mine:
        raise TuneError(f"none of the devices {wanted} is of the model {gpu.name}")
    others = [f"device {i} is left out: it is of another model ({there[i].title})" for i in listed if i not in mine]
    return gpu, mine, others


def agreeing(devices: Sequence[int], gpu: Gpu, problem: Problem, make: Builder, say: Callable[[str], None]) -> list[int]:
    """Those of `devices` that take the same time for the default config of `problem`, within `AGREE`. Names the others."""
    if len(devices) == 1:
        return list(devices)
    built = make.build(problem.static, default_config(problem, gpu))
    if not isinstance(built, Built):
        raise TuneError(f"the default config of {problem} cannot be used to compare GPUs: {built.message}")
    times, faults = _times(devices, problem, built, say)
    faults.update(outliers(times))
    for device, reason in sorted(faults.items()):
        say(f"device {device} is left out: {reason}")
    kept = [device for device in devices if device not in faults]
    if not kept:
        raise TuneError("no GPU passed the test before the tune; `autotune doctor` says more")
    return kept


def outliers(times_us: Mapping[int, float]) -> dict[int, str]:
    """Device -> why its times cannot stand beside the others'. The lower median is the measure: of two, the faster one."""
    if not times_us:
        return {}
    usual = median_low(times_us.values())
    return {device: f"the reference kernel takes {time:.1f} us on it and {usual:.1f} us on the others"
            for device, time in times_us.items() if abs(time / usual - 1) > AGREE}


def _times(devices: Sequence[int], problem: Problem, built: Built, say) -> tuple[dict[int, float], dict[int, str]]:
    times: dict[int, float] = {}
    faults: dict[int, str] = {}
    with ExitStack() as stack:
        workers = {}
        for device in devices:  # all start at once, then each is timed alone
            stack.enter_context(gpu_lock(device, say))
            workers[device] = stack.enter_context(Worker(EVALUATOR, {"device": device}))
            workers[device].submit("open", problem)
        for device, worker in workers.items():
            try:
                reply = worker.result(OPEN_SECONDS)
                measured = []
                for _ in range(TESTS if reply.status == "done" else 0):
                    reply = worker.call("evaluate", problem, built.config, built.binary, None,
                                        timeout=CALL_SECONDS + FIRST_CALL_SECONDS)
                    if reply.status != "done" or not reply.value.ok:
                        break
                    measured.append(reply.value.time_us)
                if len(measured) == TESTS:
                    times[device] = min(measured)
                else:
                    faults[device] = f"the reference kernel fails on it: {reply.message or reply.value.message}"
            except WorkerError as error:
                faults[device] = str(error)
    return times, faults


def command(device: int, where: str, threads: int) -> list[str]:
    """What starts a worker of this process on `device`."""
    return [sys.executable, "-m", "autotune", "worker", "--storage", where, "--device", str(device), "--threads", str(threads),
            "--linger", "3", "--parent", str(os.getpid())]


@contextmanager
def workers(devices: Sequence[int], where: str) -> Iterator[Callable[[], bool]]:
    """One `autotune worker` a device, all ended at the end. Gives a function that says whether any still runs."""
    threads = max(1, builder.threads(spare=len(devices)) // len(devices))
    children, logs = {}, {}
    told: set[int] = set()

    def alive() -> bool:
        for device, child in children.items():
            if child.poll() and device not in told:
                told.add(device)
                logs[device].seek(0)
                tail = logs[device].read().decode(errors="replace").strip().splitlines()[-1:]
                print(f"the worker of device {device} ended with exit code {child.returncode}: {' '.join(tail)}", file=sys.stderr)
        return any(child.poll() is None for child in children.values())

    try:
        for device in devices:
            logs[device] = tempfile.TemporaryFile()
            children[device] = subprocess.Popen(command(device, where, threads), stdin=subprocess.DEVNULL, stdout=logs[device],
                                                stderr=logs[device], start_new_session=True)
        yield alive
    finally:
        for child in children.values():
            child.terminate()
        for device, child in children.items():
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            logs[device].close()
