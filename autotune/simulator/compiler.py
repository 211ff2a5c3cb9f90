"""Compiles a rendered kernel and the runtime into one program, with whatever C++ compiler there is."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from ..cuda.compile import CacheError, CompileError, CompilerMissing, cache_dir

RUNTIME = Path(__file__).parent / "runtime"
# The runtime is compiled once; the kernel once for each config, so there compile time counts for more than speed. Undefined
# behaviour of the kernel (an index beyond a register tile, a shift by too much) ends the run; -g1 names the line.
RUNTIME_FLAGS = ("-std=c++17", "-O3", "-fPIE", "-Wall", "-Wextra")
KERNEL_FLAGS = ("-std=c++17", "-O1", "-fPIE", "-g1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-Wall",
                "-Wno-unused-variable", "-Wno-unused-but-set-variable", "-Wno-unused-function", "-Wno-unused-const-variable",
                "-Wno-psabi")
COMPILE_TIMEOUT_S = 600
SUMS = "sums.json"  # of a folder's other files: what is damaged is made again


@lru_cache(maxsize=1)
def compiler() -> tuple[str, ...]:
    """The command of a C++ compiler: g++, clang++, or zig's from the ziglang package. Raises `CompilerMissing`."""
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return sys.executable, "-m", "ziglang", "c++"
    raise CompilerMissing("the simulator needs a C++ compiler and found none; install g++ or clang++, or `pip install ziglang`")


def program(source: str, entries: tuple[str, ...]) -> Path:
    """The executable that simulates a kernel, from the cache folder or compiled.

    `source` is rendered with ptx="host"; `entries` are its kernels, each of one Params. Raises `CompileError`,
    `CompilerMissing`, and `CacheError` if the cache folder cannot be written.
    """
    text = _prepare(source, entries)
    key = _key(*KERNEL_FLAGS, _runtime_key(), text)
    folder = cache_dir() / "simulator" / key
    if not _intact(folder):
        try:
            objects = _runtime_objects()
            _make(folder, lambda scratch: _compile_kernel(scratch, text, objects))
        except OSError as error:
            if cache_dir() not in (place := Path(error.filename or "/"), *place.parents):
                raise
            raise CacheError.of(cache_dir(), error) from None
    return folder / "kernel"


def _prepare(source: str, entries: tuple[str, ...]) -> str:
    """`source` without unrolling (it would only cost compile time), with its entries registered. Lines keep their numbers."""
    lines = re.sub(r"^[ \t]*#pragma unroll.*$", "", source, flags=re.MULTILINE)
    register = [f'static sim::Entry sim_entry_{entry}("{entry}", '
                f"[](const void* params) {{ {entry}(*static_cast<const Params*>(params)); }});" for entry in entries]
    return "\n".join([lines, *register, ""])


def _compile_kernel(scratch: Path, text: str, objects: list[Path]) -> None:
    (scratch / "kernel.cpp").write_text(text)
    _run([*compiler(), *KERNEL_FLAGS, f"-I{RUNTIME}", "-c", "kernel.cpp", "-o", "kernel.o"], scratch)
    _run([*compiler(), "-pie", "kernel.o", *map(str, objects), "-o", "kernel"], scratch)
    (scratch / "kernel.o").unlink()


def _runtime_objects() -> list[Path]:
    folder = cache_dir() / "simulator" / f"runtime-{_runtime_key()}"
    sources = sorted(RUNTIME.glob("*.cpp"))
    if not _intact(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # it takes seconds: whoever comes second waits
            if not _intact(folder):
                _make(folder, lambda scratch: _compile_runtime(scratch, sources))
    return [folder / f"{source.stem}.o" for source in sources]


def _compile_runtime(scratch: Path, sources: list[Path]) -> None:
    def compile_one(source: Path) -> None:
        _run([*compiler(), *RUNTIME_FLAGS, "-c", str(source), "-o", f"{source.stem}.o"], scratch)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, sources))


@lru_cache(maxsize=1)
def _runtime_key() -> str:
    return _key(*RUNTIME_FLAGS, *compiler(), *(path.read_text() for path in sorted(RUNTIME.iterdir()) if path.is_file()))


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _make(folder: Path, fill) -> None:
    """Fills a new folder and gives it its name when it is complete; whoever is first wins. A damaged one makes way."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        fill(scratch)
        sums = {file.name: _sum(file) for file in sorted(scratch.iterdir())}
        (scratch / SUMS).write_text(json.dumps(sums))
        if folder.exists() and not _intact(folder):
            shutil.rmtree(folder)
        try:
            scratch.rename(folder)
        except OSError:
            if not _intact(folder):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _intact(folder: Path) -> bool:
    """Whether the folder is there with all that was put into it."""
    try:
        sums = json.loads((folder / SUMS).read_text())
        return bool(sums) and all(_sum(folder / name) == wanted for name, wanted in sums.items())
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _sum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S,
                          env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        first = errors[0] if errors else done.stderr.strip()[:200]
        raise CompileError(f"{Path(command[0]).name} refused the simulated kernel: {first}", done.stderr)
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def line_of(executable: Path, address: int) -> int:
    """The line of kernel.cpp that holds the instruction at this address of the program, 0 if it cannot be told."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if not tool:
        return 0
    done = subprocess.run([tool, "-e", str(executable), hex(address)], capture_output=True, text=True)
    file, _, line = done.stdout.strip().partition(":")
    number = re.match(r"\d+", line)
    return int(number.group()) if number and file.endswith("kernel.cpp") else 0
