"""One simulated launch: arrays into a file, a job to the compiled program, findings and outputs back."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Sequence

import numpy as np

from ..core.config import Config
from ..check.inputs import Inputs
from ..kernels.base import Step
from ..core.problem import Problem
from ..core.reading import shown
from ..cuda.render import render
from .arguments import arguments
from .compiler import HostFault, line_of, program
from .memory import Memory

TIMEOUT_S = 120
TARGET = "host"
MACHINE = "machine"  # the kind of a finding that is none of the kernel's
# Signals that no kernel can raise: somebody, a limit or a machine out of memory has stopped the process.
STOPPED = frozenset((signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGXCPU, signal.SIGXFSZ,
                     signal.SIGPIPE))


@dataclass(frozen=True)
class Finding:
    """What is wrong. `line` is of `Simulation.source`, 0 if it has no place; `text` is that line."""

    kind: str
    line: int
    text: str
    message: str

    def __str__(self) -> str:
        where = f" at line {self.line} `{self.text}`" if self.line else ""
        return f"{self.kind}{where}: {self.message}"


@dataclass(frozen=True)
class Simulation:
    """What came of a simulated launch. `source` is the file that was compiled, `log` what it wrote to standard error."""

    findings: tuple[Finding, ...]
    source: Path
    seconds: float
    log: str

    @property
    def ok(self) -> bool:
        return not self.findings


def host_source(problem: Problem, config: Config) -> str:
    """What is compiled for the simulator: the kernel's body on the host twins."""
    return render(problem.static, config, TARGET, ptx="host")


def simulate(problem: Problem, config: Config, inputs: Inputs, out: np.ndarray, lse: np.ndarray | None, seed: int = 0,
             timeout_s: float = TIMEOUT_S, source: str | None = None, contract: bool = False) -> Simulation:
    """Launches `config`'s plan on the CPU; `out` (B, Sq, Hq, Dv) and `lse` (B, Hq, Sq) receive what it wrote.

    `seed` decides the order of blocks and warps and when asynchronous copies land: 0, 1, 2, ... take the extremes in turn.
    `source` stands for what `host_source` gives; with `contract` products are fused into sums as ptxas does it. Raises
    `CompileError`, `CompilerMissing`, `HostFault`.
    """
    memory = Memory(at_end=bool(seed & 1))
    steps, params = arguments(problem, config, inputs, out, lse, memory)
    simulation = launch(host_source(problem, config) if source is None else source, steps, memory, params, seed, timeout_s,
                        contract)
    if simulation.ok and "tickets" in memory.arrays and memory.arrays["tickets"].any():
        left = Finding("tickets", 0, "", "a launch must leave its tickets at 0, for the next one")
        simulation = replace(simulation, findings=(left,))
    return simulation


def launch(source: str, steps: Sequence[Step], memory: Memory, params: bytes, seed: int = 0,
           timeout_s: float = TIMEOUT_S, contract: bool = False) -> Simulation:
    """Runs the steps of any host source, all with the same `params`, the bytes of its struct Params.

    Writable arrays of `memory` receive what it wrote. Raises `CompileError`, `CompilerMissing`,
    `HostFault`.
    """
    executable = program(source, tuple(dict.fromkeys(step.entry for step in steps)), contract)
    params_at = memory.add_bytes(params)
    with memory.file() as (arrays, lines):
        job = [*lines, f"seed {seed}", *(_launch(step, params_at) for step in steps), ""]
        started = time.perf_counter()
        findings, log = _run(executable, arrays, "\n".join(job), timeout_s)
        seconds = time.perf_counter() - started
    return Simulation(findings, executable.with_name("kernel.cpp"), seconds, log)


def _launch(step: Step, params_at: int) -> str:
    return f"step {step.entry} {step.grid} {step.block} {step.smem_bytes} {int(step.dependent)} {step.cluster} {params_at}"


def _run(executable: Path, arrays: Path, job: str, timeout_s: float) -> tuple[tuple[Finding, ...], str]:
    """(findings, standard error). What the kernel makes of the process is a finding; what the machine does, a `HostFault`."""
    try:
        done = subprocess.run([executable, arrays], input=job, capture_output=True, text=True, errors="replace",
                              timeout=timeout_s)
    except subprocess.TimeoutExpired as expired:
        late = Finding("timeout", 0, "", f"the simulation was not done after {timeout_s:g} s")
        return (*_findings(executable, _text(expired.stdout)), late), _text(expired.stderr)
    except (OSError, RuntimeError) as error:  # no room for a process, a descriptor, a thread
        raise HostFault(f"the simulator cannot start {shown(executable)}: {getattr(error, 'strerror', None) or error}") from None
    findings = _findings(executable, done.stdout)
    ready, whole = done.stdout.startswith("ready\n"), done.returncode == 0 and done.stdout.endswith("done\n")
    if reason := next((f.message.partition(": ")[2] for f in findings if f.kind == MACHINE or not ready), ""):
        raise HostFault(f"the simulation could not be run: {reason}")
    if not whole:
        ending = _ending(done.returncode)
        if -done.returncode in STOPPED or not ready:
            raise HostFault(f"the simulation could not be run: its process {ending}: {shown(done.stderr[-300:].strip(), 300)}")
        findings = *findings, Finding("crash", 0, "", f"the simulation {ending}: {done.stderr[-300:]}")
    return findings, done.stderr


def _lines(source: Path) -> list[str]:
    try:
        return source.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _ending(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")


def _findings(executable: Path, output: str) -> tuple[Finding, ...]:
    found = [line.split("\t", 3) for line in output.splitlines() if line.count("\t") >= 3]
    source = _lines(executable.with_name("kernel.cpp")) if found else []
    findings = []
    for kind, called, address, message in found:
        line = line_of(executable, int(address)) if address != "0" else 0
        line = line or int(called)
        findings.append(Finding(kind, line, source[line - 1].strip() if 0 < line <= len(source) else "", message))
    return tuple(findings)
