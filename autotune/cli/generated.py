"""Writes ``generated/``: for each kind of problem in a database the source that serves it, with a header for its readers.

One file for each kernel and kind of problem (`Static.kind`), ``<gpu>/<kernel>-<kind>.cu``: the winner of the largest problem. Its
header names the winners of the others; their sources differ in head dims and in what their configs say, and `autotune source
PROBLEM` prints them. The folder is a function of templates/ and the database: `check` says where it is not. Needs
NVRTC, for the resources in the headers, and no GPU.
"""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..cuda import compile
from ..database import view
from ..core.config import Config
from ..database.view import DatabaseError
from ..kernels import kernel_of
from ..kernels.base import Kernel
from ..database.record import Record

MARK = "written by `autotune build`"  # in the first line of what this module may replace or remove
WIDTH = 117  # of a header line, without "// "


def write(folder: Path, root: Path) -> list[Path]:
    """Makes `folder` (generated/) what the database at `root` asks for; returns the files that were written or removed.

    Raises `DatabaseError` if the database has parts that cannot be used or `folder` cannot be written, `CompileError` if a
    record's source does not compile, `CompilerMissing` without NVRTC.
    """
    changed = []
    wanted = sources(root)
    try:
        for path, text in wanted.items():
            path = folder / path
            if _text(path) != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                beside = path.with_suffix(f".{os.getpid()}.new")
                beside.write_bytes(text.encode())
                os.replace(beside, path)
                changed.append(path)
        for path in _left_over(folder, wanted):
            path.unlink()
            changed.append(path)
    except OSError as error:
        raise DatabaseError(f"{folder} was not written: {error.strerror or error}") from error
    return changed


def check(folder: Path, root: Path) -> list[str]:
    """One sentence for each file of `folder` that is not what `write` would make it. Raises what `sources` raises."""
    wanted = sources(root)
    findings = []
    for path, text in wanted.items():
        found = _text(folder / path)
        if found is None:
            findings.append(f"{folder / path}: missing")
        elif found != text:
            number, line = next((n, a) for n, (a, b) in enumerate(_aligned(found, text), 1) if a != b)
            findings.append(f"{folder / path}: differs from what templates/ and {root.name}/ give, first in line {number}: "
                            f"{line.strip()[:80]}")
    return findings + [f"{path}: no record asks for it" for path in _left_over(folder, wanted)]


def sources(root: Path) -> dict[Path, str]:
    """Path in generated/ -> text, for every record of the database at `root`, sorted.

    Raises `DatabaseError` if any part of the database cannot be used: what is missing there must not vanish from generated/.
    """
    files = view.paths(root)
    if findings := view.check(files, compiled=False):
        raise DatabaseError(f"generated/ cannot be made from {root}: {len(findings)} part(s) of it cannot be used, "
                            f"the first: {findings[0]}")
    groups: dict[Path, list[Record]] = defaultdict(list)
    for file in map(view.read, files):
        for record in file.records:
            groups[Path(file.path.parent.name) / file_name(record)].append(record)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without the GIL
        return dict(zip(sorted(groups), pool.map(lambda path: _source(groups[path]), sorted(groups))))


def file_name(record: Record) -> str:
    """``forward_mma-forward-bf16-causal.cu``"""
    return f"{record.config.kernel}-{record.problem.static.kind}.cu"


def _source(records: list[Record]) -> str:
    """The file of `records`, which share a kernel, a kind of problem and a GPU."""
    records = sorted(records, key=lambda record: (-record.problem.flops, record.problem.text))
    first = records[0]
    kernel, gpu = kernel_of(first.config), view.gpu_of(first.gpu)
    if gpu is None:
        raise DatabaseError(f"{first.gpu.name} has arch {first.gpu.arch}, which gpus.yaml does not know; add the arch there")
    binary = compile.build(first.problem.static, first.config, gpu)
    lines = [f"{kernel.name} for {first.problem.static.text} on {first.gpu.name}; {MARK} from templates/ and tuning_db/",
             "",
             *_wrapped("config     ", _line(_of_kind(kernel, first.config, "compile"))),
             *(f"resources  {line}" for line in _resources(kernel, first, binary)),
             f"compiler   NVRTC {binary.nvrtc}, -arch={binary.target}; options {' '.join(compile.OPTIONS)}",
             f"again      autotune source {first.problem} --gpu {gpu.name} --config '{first.config}'",
             "", "serves"]
    mine = [record for record in records if record.problem.static == first.problem.static
            and kernel.compile_key(record.config) == kernel.compile_key(first.config)]
    for record in mine:
        lines += [f"  {record.problem}", *(f"      {line}" for line in _served(kernel, record))]
    others = [record for record in records if record not in mine]
    if others:
        lines += ["", "other winners, whose sources `autotune source PROBLEM` prints"]
    for record in others:
        changed = {name: value for name, value in kernel.compile_key(record.config) if value != first.config[name]}
        lines += [f"  {record.problem}", *_wrapped("      with ", _line(changed)),
                  *(f"      {line}" for line in _served(kernel, record))]
    header = "".join(f"// {line}".rstrip() + "\n" for line in lines)
    return f"{header}\n{binary.source}"


def _resources(kernel: Kernel, record: Record, binary: compile.Binary) -> list[str]:
    steps = {step.entry: step for step in kernel.plan(record.problem, record.config)}
    lines = []
    for entry, used in binary.entries.items():
        step = steps.get(entry)
        launched = f", {step.block} threads, {step.smem_bytes} bytes of shared memory" if step else ""
        lines.append(f"{entry}: {used.registers} registers, {used.spill_bytes} bytes spilled{launched}")
    return lines


def _served(kernel: Kernel, record: Record) -> list[str]:
    launch = _line(_of_kind(kernel, record.config, "launch"))
    rate = f"{record.problem.flops / record.time_us * 1e-6:.0f} TFLOP/s"
    result = f"{record.time_us:.6g} us {record.evidence} ({rate})"
    if record.speedup:
        result += f", {record.speedup:.3f} x as fast as the default"
    trials = f"the best of {record.trials}, {len(record.ties)} within noise of it, {record.date}"
    return [*([f"launched with {launch}"] if launch else []), result, trials]


def _of_kind(kernel: Kernel, config: Config, kind: str) -> dict:
    return {parameter.name: config[parameter.name] for parameter in kernel.parameters if parameter.kind == kind}


def _line(values: dict) -> str:
    return Config.of("", values).text.strip()


def _wrapped(title: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=title, subsequent_indent=" " * len(title), break_on_hyphens=False)


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def _left_over(folder: Path, wanted: dict[Path, str]) -> list[Path]:
    """Files of ours that nothing asks for. Whatever lacks the mark was put there by somebody and is left alone."""
    return [path for path in sorted(folder.glob("*/*.cu"))
            if path.relative_to(folder) not in wanted and MARK in (_text(path) or "").partition("\n")[0]]


def _aligned(a: str, b: str) -> list[tuple[str, str]]:
    one, two = a.splitlines(keepends=True), b.splitlines(keepends=True)
    length = max(len(one), len(two))
    return list(zip(one + [""] * (length - len(one)), two + [""] * (length - len(two))))
