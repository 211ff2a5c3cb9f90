"""CUDA source in, `Binary` out: a cubin and what it takes. No GPU and no driver is needed.

NVRTC is called through CuPy's binding, with our own -arch (CuPy's compile path cannot say sm_90a). The cache folder (`cache`)
holds one directory per binary, with source, cubin and log: what was compiled is there to be read.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from . import cache, elf, forbid, prebuilt
from .code import code_of, sha256_of
from ..core.config import Config
from ..core.imports import CupyMissing, cupy_part, interrupts_held
from ..core.gpu import Gpu
from ..kernels import kernel_of
from ..core.problem import Static

OPTIONS = ("-std=c++17", "-default-device", "-ftz=false", "-fmad=true", "--ptxas-options=-v")
FORMAT = "cubin"
CACHE_VERSION = 3
FILES = ("kernel.cu", "kernel.cubin", "log.txt", "binary.json")  # of an entry; the last is for people
UNKNOWN_COPY = 0xDAE  # LDGSTS [R + UR] as ptxas 13.0 writes it for sm_90; the other forms are 0xFAE

# ptxas remarks that mean a silently slow kernel.
ADVISORIES = {"(C7508)": "setmaxnreg was ignored",
              "wgmma.mma_async instructions are serialized": "wgmma instructions are serialized"}


class CompileError(Exception):
    """NVRTC or ptxas refused the source. `log` is their full output."""

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log

    def __reduce__(self):  # it crosses the borders of process pools
        return type(self), (str(self), self.log)


class CompilerMissing(Exception):
    """CuPy or NVRTC is not installed, or cannot be loaded."""


@dataclass(frozen=True)
class Resources:
    """What an entry takes, for each thread."""

    registers: int
    spill_bytes: int  # the stack frame: kernels index no local array at run time, so only spills can be in it


@dataclass(frozen=True)
class Binary:
    """A compiled source. `sha256` is that of `image`, `source_sha256` of what of `source` is code; `nvrtc` is the version that
    made it."""

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


def source_sha256(static: Static, config: Config, gpu: Gpu) -> str:
    """The hash of today's source of `config` for `gpu`. Compiles nothing."""
    from .render import render

    return sha256_of(render(static, config, kernel_of(config).target(gpu)))


def build(static: Static, config: Config, gpu: Gpu) -> Binary:
    """The binary of `config` for `gpu`, from the cache folder or compiled. Raises `CompileError`, `CompilerMissing`."""
    from .render import render

    target = kernel_of(config).target(gpu)
    return cached(render(static, config, target), target)


def cached(source: str, target: str) -> Binary:
    """The binary of `source`: one that was compiled ahead, one from the cache folder, or compiled and put there if that can be.

    What the cache folder is like is never an error: what was compiled is served. Raises `CompileError`, `CompilerMissing`.
    """
    try:
        root = cache.cache_dir()
    except cache.CacheError as error:  # no home folder
        cache.tell(Path(), "home", f"{error}; until then each process compiles again")
        root = None
    trust = cache.Trust.of(root)
    if found := prebuilt.find(root, prebuilt.key_of(code_of(source), target, OPTIONS), trust):
        return _of_image(source, target, *found)
    if root is None:
        return compile_source(source, target)
    folder = root / _key(source, target)
    binary = _read(folder, source, target, trust)
    if binary is None:
        binary = compile_source(source, target)
        cache.keep(folder, _files(binary), trust)
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
    prebuilt.put(folder, prebuilt.key_of(code_of(binary.source), binary.target, OPTIONS), binary.image, facts)


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
            reason = _unknown_target(target) or f"refused the source for {target}: {_first_error(log)}"
            raise CompileError(f"NVRTC {nvrtc_version()} {reason}", log) from None
        log = nvrtc.getProgramLog(program)
        image = elf.whole(nvrtc.getCUBIN(program))
    finally:
        nvrtc.destroyProgram(program)
    return _binary(source, target, image, log)


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


def nvrtc_loaded() -> bool:
    """Whether this process has loaded NVRTC, which takes a second, so that `nvrtc_version` costs nothing."""
    return _load_nvrtc.cache_info().currsize > 0


_first_use = threading.Lock()


def _nvrtc():
    with _first_use:  # NVRTC's first compile loads libnvrtc-builtins, and fails when two threads do that at once
        return _load_nvrtc()


@lru_cache(maxsize=1)
def _load_nvrtc():
    try:
        with interrupts_held():
            nvrtc = cupy_part("cuda.nvrtc")
            _warm_up(nvrtc)
    except CupyMissing as error:
        raise CompilerMissing(str(error)) from None
    return nvrtc


def _warm_up(nvrtc) -> None:
    try:
        program = nvrtc.createProgram("", "empty.cu", (), ())
        nvrtc.compileProgram(program, ())
        nvrtc.destroyProgram(program)
    except Exception as error:  # the loader raises RuntimeError or OSError by platform
        raise CompilerMissing(f"CuPy cannot load NVRTC ({error}); pip install 'nvidia-cuda-nvrtc==13.0.*' for CUDA 13 "
                              "or 'nvidia-cuda-nvrtc-cu12==12.9.*' for CUDA 12") from None


def _key(source: str, target: str) -> str:
    parts = "\0".join((str(CACHE_VERSION), nvrtc_version(), target, *OPTIONS, code_of(source)))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _files(binary: Binary) -> dict[str, bytes]:
    """What an entry of the cache holds. binary.json is for people: all of it follows from the others."""
    facts = {"target": binary.target, "nvrtc": binary.nvrtc, "sha256": binary.sha256, "advisories": binary.advisories,
             "entries": {name: asdict(resources) for name, resources in binary.entries.items()}}
    return {"kernel.cu": binary.source.encode(), "kernel.cubin": binary.image, "log.txt": binary.log.encode(),
            "binary.json": json.dumps(facts, indent=1).encode()}


def _read(folder: Path, source: str, target: str, trust: cache.Trust) -> Binary | None:
    """The binary in an entry, or None if it is absent, damaged or not to be trusted. Its source may have other comments."""
    files = cache.read_entry(folder, FILES, trust)
    if files is None:
        return None
    try:
        if code_of(files["kernel.cu"].decode()) != code_of(source):
            return None
        return _binary(source, target, files["kernel.cubin"], files["log.txt"].decode())
    except ValueError:
        return None


def _binary(source: str, target: str, image: bytes, log: str) -> Binary:
    """Raises `ValueError` if `image` is no whole cubin."""
    entries = {name: Resources(*facts) for name, facts in elf.entry_resources(image).items()}
    return Binary(source, target, FORMAT, image, hashlib.sha256(image).hexdigest(), nvrtc_version(), entries,
                  _parse_advisories(log), log)


def _unknown_target(target: str) -> str:
    """Which NVRTC a target needs that this one does not know, "" if it does."""
    known, wanted = _nvrtc().getSupportedArchs(), int(re.match(r"sm_(\d+)", target)[1])
    if wanted in known:
        return ""
    newer = wanted > min(known)
    return (f"does not know {target} (it knows sm_{min(known)} to sm_{max(known)}); "
            + ("a newer one does: pip install --upgrade a CuPy and nvidia-cuda-nvrtc for the newest CUDA" if newer else
               "an older one does: CUDA 12's, with the extra cuda12"))


def _first_error(log: str) -> str:
    """The line that says most: ptxas numbers its reasons ("(C7602)") and ends with "aborted due to errors"."""
    lines = [line.strip() for line in log.splitlines()]
    telling = [line for line in lines if "error" in line and "aborted due to" not in line or "(C7" in line]
    return next(iter(telling), log.strip()[:200] or "no log")


def _parse_advisories(log: str) -> tuple[str, ...]:
    return tuple(meaning for sign, meaning in ADVISORIES.items() if sign in log)
