"""CUDA source in, `Binary` out: a cubin and what it takes. No GPU and no driver is needed.

NVRTC is called through CuPy's binding, with our own -arch (CuPy's compile path cannot say sm_90a). A cache folder holds one
directory per binary, with source, cubin and log: what was compiled is there to be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from . import elf, forbid, prebuilt
from ..core.config import Config
from ..core.gpu import Gpu
from ..kernels import kernel_of
from ..core.problem import Static

OPTIONS = ("-std=c++17", "-default-device", "-ftz=false", "-fmad=true", "--ptxas-options=-v")
FORMAT = "cubin"
CACHE_VERSION = 2
UNKNOWN_COPY = 0xDAE  # LDGSTS [R + UR] as ptxas 13.0 writes it for sm_90; the other forms are 0xFAE

# ptxas remarks that mean a silently slow kernel.
ADVISORIES = {"(C7508)": "setmaxnreg was ignored",
              "wgmma.mma_async instructions are serialized": "wgmma instructions are serialized"}


class CompileError(Exception):
    """NVRTC or ptxas refused the source. `log` is their full output."""

    def __init__(self, message: str, log: str):
        super().__init__(message)
        self.log = log


class CompilerMissing(Exception):
    """CuPy or NVRTC is not installed, or cannot be loaded."""


class CacheError(OSError):
    """The cache folder cannot be written."""

    @classmethod
    def of(cls, folder: Path, error: OSError) -> CacheError:
        return cls(f"the cache folder {folder} cannot be written ({error.strerror or error}); free some space, or set "
                   "AUTOTUNE_CACHE to a folder that can be written")


@dataclass(frozen=True)
class Resources:
    """What an entry takes, for each thread."""

    registers: int
    spill_bytes: int  # the stack frame: kernels index no local array at run time, so only spills can be in it


@dataclass(frozen=True)
class Binary:
    """A compiled source. `sha256` is that of `image`; `nvrtc` is the version that made it."""

    source: str
    target: str
    format: str
    image: bytes
    sha256: str
    nvrtc: str
    entries: dict[str, Resources]
    advisories: tuple[str, ...]
    log: str

    @cached_property
    def source_sha256(self) -> str:
        return sha256_of(self.source)


def sha256_of(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def build(static: Static, config: Config, gpu: Gpu) -> Binary:
    """The binary of `config` for `gpu`, from the cache folder or compiled. Raises `CompileError`, `CompilerMissing`."""
    from .render import render

    target = kernel_of(config).target(gpu)
    return cached(render(static, config, target), target)


def cached(source: str, target: str) -> Binary:
    """The binary of `source`, from the cache folder if an intact one is there, else compiled and put there."""
    found = prebuilt.find(cache_dir(), prebuilt.key_of(source, target, OPTIONS))
    if found:
        return _of_image(source, target, *found)
    folder = cache_dir() / _key(source, target)
    binary = _read(folder, source, target)
    if binary is None:
        binary = compile_source(source, target)
        _write(folder, binary)
    return binary


def flaw(binary: Binary) -> tuple[str, str] | None:
    """(outcome, message) if the binary must not be used: it spills, holds an instruction that the GPU does not know, or ptxas
    gave up an optimisation it depends on."""
    for entry, resources in binary.entries.items():
        if resources.spill_bytes:
            return "spilled", f"{entry} spills {resources.spill_bytes} bytes at {resources.registers} registers"
    if copies := elf.count(binary.image, UNKNOWN_COPY) if binary.target.startswith("sm_90") else 0:
        return "miscompiled", (f"ptxas of NVRTC {binary.nvrtc} made {copies} asynchronous copies to the sum of a uniform and "
                               "another register, an instruction that stops the GPU")
    return ("advisory", "; ".join(binary.advisories)) if binary.advisories else None


def _of_image(source: str, target: str, image: bytes, facts: dict) -> Binary:
    """The binary of a cubin that was compiled ahead."""
    entries = {name: Resources(*of_entry) for name, of_entry in elf.entry_resources(image).items()}
    return Binary(source, target, FORMAT, image, facts["sha256"], facts["nvrtc"], entries, _parse_advisories(facts["log"]),
                  facts["log"])


def store(binary: Binary, folder: Path) -> None:
    """Puts `binary` where those look who have no compiler and whose cache folder is `folder`. Raises OSError."""
    facts = {"target": binary.target, "nvrtc": binary.nvrtc, "sha256": binary.sha256, "log": binary.log}
    prebuilt.put(folder, prebuilt.key_of(binary.source, binary.target, OPTIONS), binary.image, facts)


def compile_source(source: str, target: str) -> Binary:
    """Compiles with NVRTC, in this thread and without the GIL, for an -arch such as ``sm_90``."""
    forbid.check(target)
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"-arch={target}"))
        except nvrtc.NVRTCError:
            log = nvrtc.getProgramLog(program)
            raise CompileError(f"NVRTC {nvrtc_version()} refused the source for {target}: {_first_error(log)}", log) from None
        log = nvrtc.getProgramLog(program)
        image = elf.whole(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)
    entries = {name: Resources(*facts) for name, facts in elf.entry_resources(image).items()}
    return Binary(source, target, FORMAT, image, hashlib.sha256(image).hexdigest(), nvrtc_version(), entries,
                  _parse_advisories(log), log)


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """For example ``13.0.88``: the wheel's version where NVRTC comes from a wheel, else what the library itself says."""
    from importlib import metadata

    major, minor = _nvrtc().getVersion()
    for package in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if version.startswith(f"{major}.{minor}."):
            return version
    return f"{major}.{minor}"


_first_use = threading.Lock()


def _nvrtc():
    with _first_use:  # NVRTC's first compile loads libnvrtc-builtins, and fails when two threads do that at once
        return _load_nvrtc()


@lru_cache(maxsize=1)
def _load_nvrtc():
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise CompilerMissing(f"CuPy is not installed ({error}); pip install 'cupy-cuda13x[ctk]' (driver 580 or "
                              "newer) or 'cupy-cuda12x[ctk]' brings CuPy and NVRTC") from None
    try:
        program = nvrtc.createProgram("", "empty.cu", (), ())
        nvrtc.compileProgram(program, ())
        nvrtc.destroyProgram(program)
    except Exception as error:  # the loader raises RuntimeError or OSError by platform
        raise CompilerMissing(f"CuPy cannot load NVRTC ({error}); pip install 'nvidia-cuda-nvrtc==13.0.*' for CUDA 13 "
                              "or 'nvidia-cuda-nvrtc-cu12==12.9.*' for CUDA 12") from None
    return nvrtc


def cache_dir() -> Path:
    """The folder of compiled binaries: $AUTOTUNE_CACHE, or the user's cache folder."""
    override = os.environ.get("AUTOTUNE_CACHE")
    if override:
        return Path(os.path.expanduser(override))
    from platformdirs import user_cache_path

    return user_cache_path("autotune")


def _key(source: str, target: str) -> str:
    parts = "\0".join((str(CACHE_VERSION), nvrtc_version(), target, *OPTIONS, source))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _write(folder: Path, binary: Binary) -> None:
    """Writes beside, then renames: a reader sees a whole entry or none, and whoever renames first wins."""
    facts = asdict(binary)
    for name in ("source", "image", "log"):
        del facts[name]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    except OSError as error:
        raise CacheError.of(folder.parent, error) from None
    try:
        (scratch / "kernel.cu").write_text(binary.source)
        (scratch / "kernel.cubin").write_bytes(binary.image)
        (scratch / "log.txt").write_text(binary.log)
        (scratch / "binary.json").write_text(json.dumps(facts, indent=1))
        if folder.exists():  # damaged, or written by somebody else since we looked
            shutil.rmtree(folder, ignore_errors=True)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    except OSError as error:
        raise CacheError.of(folder.parent, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read(folder: Path, source: str, target: str) -> Binary | None:
    """The entry, or None if it is absent, damaged or not what its name says."""
    try:
        facts = json.loads((folder / "binary.json").read_text())
        image = (folder / "kernel.cubin").read_bytes()
        if (folder / "kernel.cu").read_text() != source or hashlib.sha256(image).hexdigest() != facts["sha256"]:
            return None
        entries = {name: Resources(**resources) for name, resources in facts["entries"].items()}
        return Binary(source, target, FORMAT, image, facts["sha256"], facts["nvrtc"], entries, tuple(facts["advisories"]),
                      (folder / "log.txt").read_text())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _first_error(log: str) -> str:
    """The line that says most: ptxas numbers its reasons ("(C7602)") and ends with "aborted due to errors"."""
    lines = [line.strip() for line in log.splitlines()]
    telling = [line for line in lines if "error" in line and "aborted due to" not in line or "(C7" in line]
    return next(iter(telling), log.strip()[:200] or "no log")


def _parse_advisories(log: str) -> tuple[str, ...]:
    return tuple(meaning for sign, meaning in ADVISORIES.items() if sign in log)
