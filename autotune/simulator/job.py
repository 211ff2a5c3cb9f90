"""One simulated launch: arrays into a file, a job to the compiled program, findings and outputs back."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable

import numpy as np

from .. import kernels
from ..check import Verdict, check_launch
from ..config import Config
from ..inputs import KINDS, Inputs
from ..kernels.base import Map, params_format
from ..kernels.forward import TENSORS
from ..problem import Problem
from ..render import render
from .compiler import program

BASE_ADDRESS = 1 << 36  # where the program maps the arrays; low enough for 39-bit address spaces, far from everything else
PAGE = mmap.PAGESIZE
RESIDENT_BLOCKS = 2  # blocks of a launch that goes round, so that each has several turns
TIMEOUT_S = 120
SWIZZLE_BYTES = 128  # of every tensor map
TARGET = "sm_90"  # no template depends on it so far


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
    """What came of a simulated launch. `source` is the file that was compiled."""

    findings: tuple[Finding, ...]
    source: Path
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.findings


class SimulationFailed(Exception):
    """A simulation with findings. `simulation` has them."""

    def __init__(self, simulation: Simulation):
        super().__init__(f"{simulation.findings[0]} ({simulation.source})")
        self.simulation = simulation


def simulate(problem: Problem, config: Config, inputs: Inputs, out: np.ndarray, lse: np.ndarray | None, seed: int = 0,
             timeout_s: float = TIMEOUT_S) -> Simulation:
    """Launches `config`'s plan on the CPU; `out` (B, Sq, Hq, Dv) and `lse` (B, Hq, Sq) receive what it wrote.

    `seed` decides the order of blocks, warps and asynchronous copies. Raises `CompileError`, `CompilerMissing`.
    """
    kernel = kernels.kernel_of(config)
    steps = kernel.plan(problem, config)
    source = render(problem.static, config, TARGET, ptx="host")
    executable = program(source, tuple(dict.fromkeys((step.entry, "Params") for step in steps)))
    memory = _Memory(seed)
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out}
    for name, array in {**arrays, "lse": lse, "sinks": inputs.sinks}.items():
        if array is not None:
            memory.add(name, array, writable=name in ("out", "lse"))
    pointers = [memory.address.get(name, 0) for name in (*TENSORS, "lse", "sinks")]
    strides = [stride // array.itemsize for array in arrays.values() for stride in array.strides[:3]]
    maps = [_tensor_map(shape, arrays[shape.tensor], memory.address[shape.tensor]) for shape in kernel.maps(problem.static, config)]
    params = struct.pack(params_format(kernel.fields), *maps, *pointers, *strides, *kernel.arguments(problem, config, inputs.scale, 0))
    params_at = memory.add_bytes(params)
    launches = [f"step {s.entry} {min(s.grid, RESIDENT_BLOCKS) if s.blocks_per_sm else s.grid} {s.block} {s.smem_bytes} {s.cluster} "
                f"{params_at}" for s in steps]
    return memory.run(executable, seed, launches, timeout_s)


def verify(problem: Problem, config: Config, seeds: Iterable[int] = (0,), kinds: Iterable[str] = KINDS,
           timeout_s: float = TIMEOUT_S) -> Verdict:
    """Simulates `config` on each kind of inputs and judges what it wrote; a finding is a wrong result.

    Stops at the first wrong one. Raises `CompileError`, `CompilerMissing`.
    """
    worst = 0.0
    for seed in seeds:
        def run(inputs: Inputs, out, lse, seed: int = seed) -> None:
            simulation = simulate(problem, config, inputs, out, lse, seed, timeout_s)
            if not simulation.ok:
                raise SimulationFailed(simulation)

        try:
            verdict = check_launch(run, problem, kinds, seed)
        except SimulationFailed as failure:
            return Verdict(False, float("inf"), str(failure))
        if not verdict.ok:
            return verdict
        worst = max(worst, verdict.worst_ratio)
    return Verdict(True, worst)


def _tensor_map(shape: Map, array: np.ndarray, address: int) -> bytes:
    """The 128 bytes of runtime/sim.hpp's Tensor for a (batch, rows, heads, columns) array."""
    batch, rows, heads, columns = array.shape
    batch_stride, row_stride, head_stride, _ = array.strides
    return struct.pack("16Q", address, columns, rows, heads, batch, row_stride, head_stride, batch_stride,
                       shape.columns, shape.rows, shape.heads, array.itemsize, SWIZZLE_BYTES, 0, 0, 0)


class _Memory:
    """The file that holds the arrays. Each stands between pages that cannot be touched, against the one before it or the
    one after it as the seed decides, so that a plain pointer that leaves it on that side is caught at once."""

    def __init__(self, seed: int):
        self.address: dict[str, int] = {}
        self._parts: list[tuple[int, bytes]] = []
        self._lines: list[str] = []
        self._outputs: list[tuple[int, np.ndarray]] = []
        self._end = 0
        self._at_end = bool(seed & 1)

    def add(self, name: str, array: np.ndarray, writable: bool) -> None:
        """Copies `array` with the memory between its elements, which the kernel must not touch."""
        low, data, mask = _span(array)
        self._guard()
        size = -(-len(data) // PAGE) * PAGE
        offset = self._end + (size - len(data) if self._at_end else 0)
        self.address[name] = BASE_ADDRESS + offset + (array.ctypes.data - low)
        self._parts.append((offset, data))
        self._end += size
        self._guard()
        mask_at = self.add_bytes(mask)
        self._lines.append(f"buffer {name} {offset} {len(data)} {mask_at} {int(writable)}")
        if writable:
            self._outputs.append((offset + (array.ctypes.data - low), array))

    def add_bytes(self, data: bytes) -> int:
        """Their offset, a multiple of the page size."""
        offset = self._end
        self._parts.append((offset, data))
        self._end += -(-max(len(data), 1) // PAGE) * PAGE
        return offset

    def _guard(self) -> None:
        self._lines.append(f"guard {self._end} {16 * PAGE}")
        self._end += 16 * PAGE

    def run(self, executable: Path, seed: int, launches: list[str], timeout_s: float) -> Simulation:
        with tempfile.NamedTemporaryFile(prefix="autotune-simulation-") as file:
            os.truncate(file.fileno(), self._end)
            for offset, data in self._parts:
                os.pwrite(file.fileno(), data, offset)
            job = [f"memory {file.name} {BASE_ADDRESS} {self._end}", *self._lines, f"seed {seed}", *launches, ""]
            started = time.perf_counter()
            findings = _run_program(executable, "\n".join(job), timeout_s)
            seconds = time.perf_counter() - started
            for offset, array in self._outputs:
                raw = os.pread(file.fileno(), _extent(array), offset)
                array[...] = np.ndarray(array.shape, array.dtype, raw, strides=array.strides)
        return Simulation(findings, executable.with_name("kernel.cpp"), seconds)


def _extent(array: np.ndarray) -> int:
    """Bytes from the first to the end of the last element (strides are not negative)."""
    return sum((n - 1) * stride for n, stride in zip(array.shape, array.strides)) + array.itemsize if array.size else 0


def _span(array: np.ndarray) -> tuple[int, bytes, bytes]:
    """(address, bytes, mask) of the memory from the first to the last element; the mask is 1 where there is an element."""
    extent = _extent(array)
    low = array.ctypes.data
    raw = (np.ctypeslib.ctypes.c_ubyte * extent).from_address(low) if extent else b""
    mask = np.zeros(extent, np.uint8)
    if extent:
        view = np.lib.stride_tricks.as_strided(mask, (*array.shape, array.itemsize), (*array.strides, 1))
        view[...] = 1
    return low, bytes(raw), mask.tobytes()


def _run_program(executable: Path, job: str, timeout_s: float) -> tuple[Finding, ...]:
    try:
        done = subprocess.run([executable], input=job, capture_output=True, text=True, timeout=timeout_s)
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout.decode() if isinstance(expired.stdout, bytes) else expired.stdout or ""
        code = None
    lines = output.splitlines()
    findings = [_finding(executable, line) for line in lines if "\t" in line]
    if code is None:
        findings.append(Finding("timeout", 0, "", f"the simulation was not done after {timeout_s:g} s"))
    elif code or "done" not in lines[-1:]:
        findings.append(Finding("crash", 0, "", f"the simulation ended with code {code}: {done.stderr[-300:]}"))
    return tuple(findings)


def _finding(executable: Path, line: str) -> Finding:
    kind, number, message = line.split("\t", 2)
    source = executable.with_name("kernel.cpp").read_text().splitlines()
    text = source[int(number) - 1].strip() if 0 < int(number) <= len(source) else ""
    return Finding(kind, int(number), text, message)
