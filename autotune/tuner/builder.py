"""Compiling candidates: `Builder`, which turns a config into a `Built` or into the `Measurement` that says why not.

Threads are enough: NVRTC releases the GIL (24 compiles on 2 cores: 6.5 s with one thread, 3.35 s with two).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ..cuda import compile
from ..cuda.code import code_of
from ..cuda.compile import Binary, CompileError
from ..core.config import Config
from ..core.gpu import Gpu
from ..kernels import kernel_of
from ..core.measurement import Measurement
from ..core.problem import Static
from ..cuda.render import render

MAX_THREADS = 16  # NVRTC holds a few hundred MB for each compile under way
MAX_KEPT = 4096  # binaries in memory, about 100 KB each at most


@dataclass(frozen=True)
class Built:
    """A config with its binary. `source_sha256` is the hash of the code that it rendered to, for its target and compiler."""

    config: Config
    binary: Binary
    source_sha256: str


class Builder:
    """Builds for one GPU; configs that share a source share a compile. Safe to call from many threads."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future] = OrderedDict()

    def source_sha256(self, static: Static, config: Config) -> str:
        """The hash by which a stored trial is known to be about today's kernel. Raises `CompilerMissing`."""
        return self._rendered(static, config)[1]

    def build(self, static: Static, config: Config) -> Built | Measurement:
        """`config` compiled, or the failed `Measurement`. Raises `CompilerMissing` and `CacheError`, which no config can fix."""
        source, digest = self._rendered(static, config)
        target = kernel_of(config).target(self.gpu)
        try:
            binary = self._once(digest, lambda: compile.cached(source, target))
        except CompileError as error:
            return Measurement(outcome="compile_failed", message=str(error))
        flaw = compile.flaw(binary)
        return Measurement(outcome=flaw[0], message=flaw[1]) if flaw else Built(config, binary, digest)

    def _rendered(self, static: Static, config: Config) -> tuple[str, str]:
        target = kernel_of(config).target(self.gpu)
        source = render(static, config, target)
        return source, hashlib.sha256("\0".join((compile.nvrtc_version(), target, code_of(source))).encode()).hexdigest()

    def _once(self, key: str, make) -> Binary:
        """`make()`, or what another thread's `make()` for the same key gives."""
        with self._lock:
            future = self._kept.get(key)
            mine = future is None
            if mine:
                future = self._kept[key] = Future()
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        if mine:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def threads(spare: int = 1) -> int:
    """Compile threads: every core but `spare`, by default the one that feeds the GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, cores - spare))


def pool(count: int | None = None) -> ThreadPoolExecutor:
    """Threads that compile: `count`, or as many as this machine has to spare beside a tune."""
    return ThreadPoolExecutor(threads() if count is None else count, thread_name_prefix="compile")
