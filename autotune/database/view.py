"""The tuning database: a search path of folders with one file for each GPU and op, ``<folder>/<gpu>/<op>.yaml``.

What a reader cannot use it leaves out and says so (`View.complaints`); what a writer cannot write is a `DatabaseError`.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from .file import DatabaseError, File, Quarantined, dump, merge_into, read
from ..core.folders import NoFolder, named_folder, user_folder
from ..core.gpu import Gpu, catalogue
from ..core.problem import OPS, Problem, ProblemError, Static
from ..kernels import kernel_of
from .record import NAME, GpuKey, Record, merge

__all__ = ["DatabaseError", "File", "Quarantined", "View", "all_records", "check", "check_writable", "dump", "gpu_of",
           "open_view", "paths", "read", "search_path", "shipped_root", "user_root", "write"]


@dataclass(frozen=True)
class View:
    """What the search path knows that may serve one GPU and op."""

    gpu: GpuKey
    op: str
    roots: tuple[Path, ...]
    records: tuple[Record, ...]  # of this GPU
    complaints: tuple[str, ...] = field(compare=False, default=())  # files and entries that were left out, and why
    static: Static | None = None  # in bf16: records are of it and its twin in fp16; None: all are there

    @cached_property
    def same_arch(self) -> tuple[Record, ...]:
        """Records of other GPUs of the same arch. Read on first use: a tuned GPU never needs them."""
        return _overlay(self.roots, self.op, lambda gpu: gpu.arch == self.gpu.arch and gpu != self.gpu, self.static)[0]


def user_root() -> Path:
    """The folder that tuning writes: ``$AUTOTUNE_DB``, or else the platform's user data folder. Raises `DatabaseError` if there
    is neither."""
    try:
        return named_folder("AUTOTUNE_DB") or user_folder("data", "AUTOTUNE_DB") / "tuning_db"
    except NoFolder as error:
        raise DatabaseError(f"there is no database of your own: {error}") from None


def shipped_root() -> Path:
    """The folder that comes with this package: in a wheel its own data, in a checkout ``tuning_db/``."""
    packaged = Path(__file__).parents[1] / "_tuning_db"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "tuning_db"


def search_path() -> tuple[Path, ...]:
    """Folders in the order in which they are believed: the user's, if there can be one, then the shipped one."""
    try:
        return user_root(), shipped_root()
    except DatabaseError:
        return (shipped_root(),)


def paths(root: Path, op: str | None = None) -> list[Path]:
    """The database files in `root`, sorted: ``<gpu>/<op>.yaml``. Copies that editors and systems leave beside them are none. A
    folder that is missing or closed has none."""
    wanted = [f"{each}.yaml" for each in (OPS if op is None else (op,))]
    try:
        folders = [item.name for item in os.scandir(root) if NAME.fullmatch(item.name)]
        return sorted(path for folder in folders for name in wanted if os.path.lexists(path := root / folder / name))
    except (OSError, ValueError):
        return []


def open_view(gpu: Gpu | GpuKey, op: str = "forward", roots: Iterable[Path] | None = None,
              static: Static | None = None, besides: Container[str] = ()) -> View:
    """What the search path knows about `gpu`. A measured record of an earlier folder hides one of a later folder. With `static`,
    a static part in bf16, only its records are parsed, and of those of this GPU only ones whose names are not in `besides`: 5 ms
    where a whole file takes 60."""
    key = gpu if isinstance(gpu, GpuKey) else GpuKey.of(gpu)
    roots = tuple(search_path() if roots is None else map(Path, roots))
    records, complaints = _overlay(roots, op, key.__eq__, static, besides)
    return View(key, op, roots, records, complaints, static)


def all_records(roots: Iterable[Path] | None = None) -> Iterator[tuple[Path, Record]]:
    """(file, record) for every usable record on the search path, hidden ones too."""
    for root in search_path() if roots is None else roots:
        for path in paths(Path(root)):
            yield from ((path, record) for record in read(path).records)


def write(records: Iterable[Record], root: Path | None = None) -> list[Path]:
    """Merges `records` into the files of `root` (the user's folder if None) and returns the files they are in.

    Raises `DatabaseError` if a file cannot be written (read-only folder, full disk, lock held); files stay as they were then.
    """
    root = user_root() if root is None else Path(root)
    groups = defaultdict(list)
    for record in records:
        groups[record.gpu, record.problem.op].append(record)
    return [merge_into(root, gpu, op, group) for (gpu, op), group in groups.items()]


def check_writable(root: Path | None = None) -> None:
    """Raises `DatabaseError` if `write` could not write to `root`, or to a file there: said before a search, not after it."""
    root = user_root() if root is None else Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise DatabaseError(f"the database folder {root} cannot be written ({error.strerror}); free some space, or set "
                            "AUTOTUNE_DB to a folder that can be written") from None
    for file in (read(path, lambda gpu: False) for path in paths(root)):  # without its entries
        if file.error and not file.replaceable:
            raise DatabaseError(f"nothing could be recorded: {file.error}")


def gpu_of(key: GpuKey) -> Gpu | None:
    """The catalogue's `Gpu` of this identity, or one with the limits of its arch, or None if the arch is not in gpus.yaml."""
    known = list(catalogue().values())
    for gpu in known:
        if gpu.identity == key.identity:
            return gpu
    for gpu in known:
        if gpu.arch == key.arch:
            limits = MappingProxyType({**gpu.limits, "l2_bytes": key.l2_bytes, "memory_clock_mhz": key.memory_clock_mhz})
            return replace(gpu, name=key.name, title=key.name, sms=key.sms, limits=limits)
    return None


def check(files: Iterable[Path], compiled: bool = True) -> list[str]:
    """One sentence for each thing wrong with the database in `files`; [] if all is well.

    That is: files and entries that cannot be used, configs that the kernel's rules forbid, and (with `compiled`, which
    needs no GPU) records that are not current, because today's source compiles to another cubin or does not compile. Records
    of another NVRTC are not compared. Raises `CompilerMissing` if there is nothing to compile with.
    """
    findings = []
    legal: list[tuple[Path, Record]] = []
    for path in files:
        file = read(path)
        findings += [file.error] if file.error else []
        findings += [f"{path}: {bad.said}" for bad in file.quarantined]
        for record in file.records:
            if reason := _illegal(record):
                findings.append(f"{path}: {record.problem}: {reason}")
            else:
                legal.append((path, record))
    if compiled and legal:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without the GIL
            reasons = pool.map(lambda item: _outdated(item[1]), legal)
            findings += [f"{path}: {record.problem}: {reason}" for (path, record), reason in zip(legal, reasons) if reason]
    return findings


def _illegal(record: Record) -> str | None:
    gpu = gpu_of(record.gpu)
    if gpu is None:
        return None
    configs = [record.config, *(config for config, _ in record.ties)] + ([record.default_config] if record.default_config else [])
    for config in configs:
        kernel = kernel_of(config)
        if reason := kernel.reject(record.problem, gpu) or kernel.illegal(record.problem.static, config, gpu):
            return f"illegal config {config}: {reason}"
    return None


def _outdated(record: Record) -> str | None:
    from ..cuda import compile

    gpu = gpu_of(record.gpu)
    if gpu is None or record.nvrtc != compile.nvrtc_version():
        return None
    if record.source_sha256 == compile.source_sha256(record.problem.static, record.config, gpu):
        return None  # it is what the record's binary was compiled from: nothing to compile
    try:
        binary = compile.build(record.problem.static, record.config, gpu)
    except compile.CompileError as error:
        return f"does not compile: {error}; {_again(record)}"
    if flaw := compile.flaw(binary):
        return f"{flaw[0]}: {flaw[1]}; {_again(record)}"
    if not record.is_of(binary):
        return f"stale: today's source compiles to another cubin than the one {record.evidence}; {_again(record)}"
    return None


def _again(record: Record) -> str:
    return f"`autotune tune --problem {record.problem}` on {record.gpu.name} makes it current"


def _is_of(static: Static, name: str) -> bool:
    """Whether an entry called `name` may be a record of `static`; what cannot be read is for `Record` to judge."""
    head_dim = f"-d{static.head_dim}" if static.head_dim == static.head_dim_v else f"-d{static.head_dim}x{static.head_dim_v}"
    if head_dim not in name:  # sooner than parsing
        return False
    try:
        return Problem.parse(name).static.in_bf16 == static
    except ProblemError:
        return True


def _overlay(roots: Iterable[Path], op: str, wanted: Callable[[GpuKey], bool],
             static: Static | None = None, besides: Container[str] = ()) -> tuple[tuple[Record, ...], tuple[str, ...]]:
    """(records, complaints) of the files in `roots`; with `static`, of those entries only, as far as a file lets them be told."""
    of_static = (lambda name: name not in besides and _is_of(static, name)) if static else None
    chosen: dict[tuple, Record] = {}
    complaints = []
    for root in roots:
        files = [read(path, wanted, of_static) for path in paths(root, op)]
        complaints += [file.error for file in files if file.error]
        complaints += [f"{file.path}: {bad.said}" for file in files for bad in file.quarantined]
        for key, record in merge(*(file.records for file in files)).items():
            known = chosen.get(key)
            if known is None or (known.evidence, record.evidence) == ("predicted", "measured"):
                chosen[key] = record
    found = tuple(record for record in chosen.values() if static is None or record.problem.static.in_bf16 == static)
    return found, tuple(complaints)


