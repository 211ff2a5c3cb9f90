"""Compiles a rendered kernel and the runtime into one program, with whatever C++ compiler there is."""

from __future__ import annotations

import atexit
import errno
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Iterator

from filelock import FileLock

from ..core.reading import shown
from ..cuda import cache
from ..cuda.compile import CompileError, CompilerMissing

RUNTIME = Path(__file__).parent / "runtime"
# The runtime is compiled once; the kernel once for each config, so there compile time counts for more than speed. Undefined
# behaviour of the kernel (an index beyond a register tile, a shift by too much) ends the run; -g1 names the line.
RUNTIME_FLAGS = ("-std=c++17", "-O3", "-fPIE", "-Wall", "-Wextra")
KERNEL_FLAGS = ("-std=c++17", "-O1", "-fPIE", "-g1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-Wall",
                "-Wno-unused-variable", "-Wno-unused-but-set-variable", "-Wno-unused-function", "-Wno-unused-const-variable",
                "-Wno-psabi")
# Products and sums become fused multiply-adds, as ptxas makes them: what is rounded once there must be right here, too.
CONTRACTING = ("-ffp-contract=fast", "-fexpensive-optimizations")
COMPILE_TIMEOUT_S = 600
KERNEL_FILES = ("kernel", "kernel.cpp")
FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG))


@lru_cache(maxsize=1)
def compiler() -> tuple[str, ...]:
    """The command of a C++ compiler: g++, clang++, or zig's from the ziglang package. Raises `CompilerMissing`."""
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return (path,)
    if importlib.util.find_spec("ziglang"):
        return sys.executable, "-m", "ziglang", "c++"
    raise CompilerMissing("the simulator needs a C++ compiler and found none; install g++ or clang++, or `pip install ziglang`")


class HostFault(RuntimeError):
    """The machine cannot simulate now: a full disk, a compiler that fails, a limit. It says nothing about the kernel."""

    @classmethod
    def of(cls, what: str, folder: Path | str, error: OSError) -> HostFault:
        return cls(f"there is no place for the {what} in {shown(folder)} ({error.strerror or error}); free some space, or set "
                   f"TMPDIR "
                   "to a folder that can be written")


class NoPlace(HostFault):
    """A folder in which no program can be made or executed; another one may do."""


@lru_cache(maxsize=1)
def contracting_flags() -> tuple[str, ...]:
    """What makes the compiler fuse products into sums. Raises `CompilerMissing` on an x86 processor without FMA."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return CONTRACTING
    try:
        features = Path("/proc/cpuinfo").read_text()
    except OSError:
        features = "fma"  # not Linux: compilers there target processors that have it
    if not re.search(r"\bfma\b", features):
        raise CompilerMissing("the contracting simulator needs a processor with fused multiply-add (FMA), and this one has none")
    return (*CONTRACTING, "-mfma")


def program(source: str, entries: tuple[str, ...], contract: bool = False) -> Path:
    """The executable that simulates a kernel, from the cache folder or compiled.

    `source` is rendered with ptx="host"; `entries` are its kernels, each of one Params. `contract` compiles it with fused
    multiply-adds wherever a sum follows a product, as ptxas does. Raises `CompileError`,
    `CompilerMissing`, and `HostFault` if it can neither be kept in the cache nor in a temporary folder.
    """
    text = _prepare(source, entries)
    flags = (*KERNEL_FLAGS, *contracting_flags()) if contract else KERNEL_FLAGS
    key = _key(*flags, _runtime_key(), text)
    try:
        return _program(_folder(), key, text, flags)
    except NoPlace as fault:
        if _folder() == _temporary():
            raise
        cache.tell(_folder(), "simulator", f"simulated kernels are compiled into a temporary folder: {fault}")
        return _program(_temporary(), key, text, flags)


def _program(folder: Path, key: str, text: str, flags: tuple[str, ...]) -> Path:
    """The executable in the folder of all executables. Raises `NoPlace` if this folder is of no use."""
    entry, trust = folder / key, cache.Trust.of(folder.parent)
    kernel = entry / "kernel"
    for _ in range(2):
        if cache.read_entry(entry, KERNEL_FILES, trust) is None:
            _make(entry, trust, partial(_compile_kernel, text, flags, _runtime_objects(folder, trust)))
        if os.access(kernel, os.X_OK):
            return kernel
        _require_executable(folder)
        cache.discard(entry)  # intact, but for its right to be executed
    raise NoPlace(f"programs in {shown(folder)} cannot be executed; set AUTOTUNE_CACHE, or TMPDIR, to a folder where they can")


def _require_executable(folder: Path) -> None:
    """Raises `NoPlace` where nothing can be executed."""
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise NoPlace(f"{shown(folder)} is mounted noexec, so programs in it cannot be executed; set AUTOTUNE_CACHE, or "
                      f"TMPDIR, to a "
                      "folder where they can")


def _folder() -> Path:
    """The folder of all executables: in the cache, or a temporary one where other users may write into the cache."""
    try:
        folder = cache.cache_dir()
    except cache.CacheError:
        return _temporary()
    trust = cache.Trust.of(folder)
    for part in (folder, folder / "simulator"):
        try:
            reason = trust.refuses(os.stat(part))
        except OSError:
            continue  # it is made, by this user
        if reason:
            cache.tell(folder, "trust", f"simulated kernels are compiled into a temporary folder, because of the cache folder "
                                        f"{shown(part)} "
                       f"{reason}; set AUTOTUNE_CACHE to a folder that is yours alone")
            return _temporary()
    return folder / "simulator"


@lru_cache(maxsize=1)
def _temporary() -> Path:
    """A folder of this process alone. Raises `HostFault`."""
    try:
        folder = tempfile.mkdtemp(prefix="autotune-simulator-")
    except OSError as error:
        raise NoPlace.of("simulated kernels", tempfile.gettempdir(), error) from None
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))  # not at a forked child's end
    return Path(folder) / "simulator"


def _prepare(source: str, entries: tuple[str, ...]) -> str:
    """`source` without unrolling (it would only cost compile time), with its entries registered. Lines keep their numbers."""
    lines = re.sub(r"^[ \t]*#pragma unroll.*$", "", source, flags=re.MULTILINE)
    register = [f'static sim::Entry sim_entry_{entry}("{entry}", '
                f"[](const void* params) {{ {entry}(*static_cast<const Params*>(params)); }});" for entry in entries]
    return "\n".join([lines, *register, ""])


def _compile_kernel(text: str, flags: tuple[str, ...], objects: list[Path], scratch: Path) -> None:
    (scratch / "kernel.cpp").write_text(text)
    _run([*compiler(), *flags, f"-I{RUNTIME}", "-c", "kernel.cpp", "-o", "kernel.o"], scratch)
    _run([*compiler(), "-pie", "kernel.o", *map(str, objects), "-o", "kernel"], scratch)
    (scratch / "kernel.o").unlink()


def _runtime_objects(simulator: Path, trust: cache.Trust) -> list[Path]:
    folder = simulator / f"runtime-{_runtime_key()}"
    sources = sorted(RUNTIME.glob("*.cpp"))
    names = [f"{source.stem}.o" for source in sources]
    with _lock(folder):  # it takes seconds: whoever comes second waits
        if cache.read_entry(folder, names, trust) is None:
            _make(folder, trust, lambda scratch: _compile_runtime(scratch, sources))
    return [folder / name for name in names]


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_suffix(".lock"))
        lock.acquire(timeout=COMPILE_TIMEOUT_S)
    except (OSError, NotImplementedError) as error:  # Timeout is an OSError
        raise NoPlace.of("simulated kernels", folder.parent, error) from None
    try:
        yield
    finally:
        lock.release()


def _compile_runtime(scratch: Path, sources: list[Path]) -> None:
    def compile_one(source: Path) -> None:
        _run([*compiler(), *RUNTIME_FLAGS, "-c", str(source), "-o", f"{source.stem}.o"], scratch)

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, sources))
    except HostFault:
        raise
    except (CompileError, RuntimeError) as error:  # another compiler's dialect; no more threads
        raise HostFault(f"the simulator's runtime cannot be compiled: {error}") from None


@lru_cache(maxsize=1)
def _runtime_key() -> str:
    """Of what every program holds. Machine and compiler are in it: a home folder may be shared by machines of several kinds."""
    sources = (path.read_text() for path in sorted(RUNTIME.iterdir()) if path.is_file())
    return _key(*RUNTIME_FLAGS, platform.system(), platform.machine(), *compiler(), compiler_version(), *sources)


@lru_cache(maxsize=1)
def compiler_version() -> str:
    """What the compiler says of itself. Raises `HostFault` if it cannot be executed."""
    return _executed([*compiler(), "--version"], None).stdout


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _make(folder: Path, trust: cache.Trust, fill: Callable[[Path], None]) -> None:
    """Fills a new folder and gives it its name when it is complete; an intact one that another process made stays."""
    try:
        with cache.scratch(folder, trust) as scratch:
            fill(scratch)
            cache.seal(scratch, folder, trust)
    except OSError as error:
        raise NoPlace.of("simulated kernels", folder.parent, error) from None


def _run(command: list[str], folder: Path) -> None:
    done = _executed(command, folder)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line]
        first = shown(errors[0] if errors else done.stderr.strip()[:200] or f"code {done.returncode}", 300)
        name = Path(command[0]).name
        if any(reason in done.stderr for reason in FULL):
            raise NoPlace(f"{name} cannot write into {shown(folder)}, or into TMPDIR: {first}; free some space, or set "
                          f"AUTOTUNE_CACHE and TMPDIR")
        if not any(": error:" in line or "undefined reference" in line for line in errors):
            raise HostFault(f"{name} failed, and not because of the simulated kernel: {first}")
        raise CompileError(f"{name} refused the simulated kernel: {first}", done.stderr)
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def _executed(command: list[str], folder: Path | None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S,
                              env={**os.environ, "LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        raise HostFault(f"{command[0]} was not done after {COMPILE_TIMEOUT_S} s") from None
    except (OSError, RuntimeError) as error:
        raise HostFault(f"the C++ compiler {command[0]} cannot be executed: "
                        f"{getattr(error, 'strerror', None) or error}") from None


def line_of(executable: Path, address: int) -> int:
    """The line of kernel.cpp that holds the instruction at this address of the program, 0 if it cannot be told."""
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if not tool:
        return 0
    try:
        done = subprocess.run([tool, "-e", str(executable), hex(address)], capture_output=True, text=True, errors="replace",
                              timeout=60)
    except (OSError, RuntimeError, subprocess.TimeoutExpired):
        return 0
    file, _, line = done.stdout.strip().partition(":")
    number = re.match(r"\d+", line)
    return int(number.group()) if number and file.endswith("kernel.cpp") else 0
