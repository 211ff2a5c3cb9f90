"""What works on this machine, what does not, and the command that mends it. Reads only; writes nothing."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Iterator

from ..core.imports import CupyMissing, cupy_part

OK, NOTE, FAIL = "ok", "note", "FAIL"

REQUIRED = ("numpy", "jinja2", "pyyaml", "optuna", "filelock", "platformdirs", "ml_dtypes")
OPTIONAL = {"torch": "torch tensors and the peers of `autotune bench`",
            "nvidia-ml-py": "clocks and other processes in a time's conditions"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. `status` is OK, NOTE (works without it) or FAIL; `text` says what and what to do."""

    status: str
    subject: str
    text: str


def examine() -> Iterator[Finding]:
    """Every check in the order in which one depends on the next. Raises nothing."""
    for check in (_python, _packages, _optional_packages, _templates, _nvrtc, _compiles, _simulator, _gpu, _driver, _disassembler,
                  _database, _cache):
        try:
            yield from check()
        except Exception as error:
            yield Finding(FAIL, check.__name__.strip("_"), f"the check itself failed: {type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    ok = (3, 10) <= sys.version_info[:2] <= (3, 13)
    hint = "" if ok else "; 3.10 to 3.13 are supported"
    yield Finding(OK if ok else FAIL, "python", f"{sys.version.split()[0]} at {sys.executable}{hint}")


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        found = _version(name)
        if found is None:
            yield Finding(FAIL, name, f"missing; pip install {name}")
        elif name == "optuna" and int(found.split(".")[0]) < 5:
            yield Finding(FAIL, name, f"{found} is too old, 5 or newer is needed; pip install 'optuna>=5'")
        else:
            yield Finding(OK, name, found)


def _optional_packages() -> Iterator[Finding]:
    for name, use in OPTIONAL.items():
        found = _version(name)
        yield Finding(OK, name, found) if found else Finding(NOTE, name, f"not installed; it is for {use}")


def _templates() -> Iterator[Finding]:
    from ..kernels import KERNELS
    from ..cuda.render import TEMPLATES

    yield Finding(OK, "templates", f"{', '.join(KERNELS)} in {TEMPLATES}")


def _nvrtc() -> Iterator[Finding]:
    from ..cuda.compile import CompilerMissing, nvrtc_version

    try:
        found = nvrtc_version()
    except CompilerMissing as error:
        yield Finding(FAIL, "nvrtc", str(error))
        return
    if found.startswith("13.0"):
        yield Finding(OK, "nvrtc", found)
    else:
        yield Finding(NOTE, "nvrtc", f"{found}; shipped records were compiled with 13.0, so they count as other_toolkit here; on "
                      "a driver for CUDA 13, pip install 'nvidia-cuda-nvrtc==13.0.*' brings the same")


def _compiles() -> Iterator[Finding]:
    from ..cuda.compile import CompileError, CompilerMissing, compile_source

    try:
        compile_source('extern "C" __global__ void nothing() {}\n', "sm_90")
        yield Finding(OK, "compile", "NVRTC makes a cubin for sm_90")
    except CompilerMissing:
        pass  # said by _nvrtc
    except CompileError as error:
        yield Finding(FAIL, "compile", f"NVRTC fails on an empty kernel: {error}")


def _simulator() -> Iterator[Finding]:
    from ..cuda.compile import CompilerMissing
    from ..simulator.compiler import HostFault, compiler, compiler_version

    try:
        compiler_version()
        yield Finding(OK, "simulator", f"compiles with {' '.join(compiler())}")
    except (CompilerMissing, HostFault) as missing:
        yield Finding(NOTE, "simulator", f"{missing}; it is for kernels on the CPU")


def _gpu() -> Iterator[Finding]:
    from ..core.gpu import GpuError, detect

    try:
        gpu = detect()
        yield Finding(OK, "gpu", f"{gpu.title}: sm_{gpu.arch}, {gpu.sms} SMs, {gpu['l2_bytes'] >> 20} MB L2, known as {gpu.name}")
    except GpuError as error:
        yield Finding(NOTE, "gpu", f"{error}. Everything but running and measuring kernels works")


def _driver() -> Iterator[Finding]:
    try:
        runtime = cupy_part("cuda.runtime")
    except CupyMissing:
        return  # said by _gpu
    driver, built = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        yield Finding(NOTE, "driver", "no NVIDIA driver")
    elif driver // 1000 < built // 1000:
        yield Finding(FAIL, "driver", f"it supports CUDA {_cuda(driver)}, but this CuPy is for CUDA {_cuda(built)}; "
                      f"pip uninstall cupy-cuda{built // 1000}x, then pip install cupy-cuda{driver // 1000}x")
    else:
        yield Finding(OK, "driver", f"supports CUDA {_cuda(driver)}; CuPy is for CUDA {_cuda(built)}")


def _disassembler() -> Iterator[Finding]:
    from ..cuda.listing import find_nvdisasm

    tool = find_nvdisasm()
    yield Finding(OK, "nvdisasm", str(tool)) if tool else \
        Finding(NOTE, "nvdisasm", "not found, so `autotune source --sass` cannot work; pip install nvidia-cuda-nvdisasm")


def _database() -> Iterator[Finding]:
    from ..database import view

    for root in view.search_path():
        whose = "shipped database" if root == view.shipped_root() else "your database"
        files = [view.read(path) for path in view.paths(root)]
        broken = [file.error for file in files if file.error] + \
            [f"{file.path}: {bad.said}" for file in files for bad in file.quarantined]
        if broken:
            yield Finding(FAIL, whose, f"{len(broken)} part(s) cannot be used; `autotune db check` says which and why. The "
                          f"first: {broken[0]}")
        yield Finding(OK, whose, f"{sum(len(file.records) for file in files)} records in {root}")
    try:
        yield _writable("database folder", view.user_root(), "AUTOTUNE_DB")
    except view.DatabaseError as error:
        yield Finding(FAIL, "database folder", str(error))


def _cache() -> Iterator[Finding]:
    from ..cuda.cache import CacheError, Trust, cache_dir

    try:
        folder = cache_dir()
    except CacheError as error:
        yield Finding(FAIL, "cache folder", str(error))
        return
    yield _writable("cache folder", folder, "AUTOTUNE_CACHE")
    if folder.is_dir() and (reason := Trust.of(folder).refuses(folder.stat())):
        yield Finding(NOTE, "cache folder", f"{folder}: {reason}, so only entries of your own are used, and simulated kernels "
                                            f"are compiled "
                      "in every process; set AUTOTUNE_CACHE to a folder that is yours alone (for a team: chmod 2770)")


def _writable(subject: str, folder: Path, variable: str) -> Finding:
    """Whether `folder`, or the nearest folder above that exists, takes new files; asks the system, writes nothing."""
    nearest = next((path for path in (folder, *_parents(folder)) if os.path.lexists(path)), None)
    if nearest is not None and nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Finding(OK, subject, f"{folder} can be written")
    return Finding(FAIL, subject, f"{folder} cannot be written; set {variable} to a folder that can")


def _parents(folder: Path) -> tuple[Path, ...]:
    try:
        return tuple(folder.absolute().parents)
    except OSError:  # the current folder is gone
        return ()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        pass
    try:
        return getattr(importlib.import_module(package), "__version__", None)
    except Exception:  # a package that cannot be imported is as good as none
        return None


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
