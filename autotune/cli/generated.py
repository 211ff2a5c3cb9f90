"""Writes ``generated/``: what of templates/ and a database is there to be read.

``<kernel>-<kind>.cu`` is one source for each kernel and kind of problem (`winners.kind_of`) of which a record ships on any GPU:
that of the winner whose problem has most features (`winners.telling`). ``<gpu>.md`` has the winners of one GPU; their sources
have fewer features, other head dims and other values of their configs, and `autotune source PROBLEM` prints them. So a tuned GPU
adds a table, and a source only of a kernel or kind that no other GPU has. The folder is a function of templates/ and the
database: `check` says where it is not. Needs NVRTC, for the resources in the headers, and no GPU.
"""

from __future__ import annotations

import os
import textwrap
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

from . import winners
from ..cuda import compile
from ..core.config import Config
from ..core.gpu import Gpu
from ..core.problem import Problem
from ..database import view
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
            if path.parent != folder and not any(path.parent.iterdir()):
                path.parent.rmdir()
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
    """Path in generated/ -> text, for the database at `root`, sorted.

    Raises `DatabaseError` if any part of the database cannot be used: what is missing there must not vanish from generated/.
    """
    files = view.paths(root)
    if findings := view.check(files, compiled=False):
        raise DatabaseError(f"generated/ cannot be made from {root}: {len(findings)} part(s) of it cannot be used, "
                            f"the first: {findings[0]}")
    by_gpu: dict[str, list[Record]] = defaultdict(list)
    for file in map(view.read, files):
        by_gpu[file.path.parent.name] += file.records
    makers: dict[Path, Callable[[], str]] = {}
    for gpu, records in by_gpu.items():
        makers[Path(f"{gpu}.md")] = lambda gpu=gpu, records=records: winners.text_of(gpu, _gpu_of(records[0]), records, MARK)
    for name, example in _examples([record for records in by_gpu.values() for record in records]).items():
        makers[Path(name)] = lambda example=example: _source(*example)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without the GIL
        return dict(zip(sorted(makers), pool.map(lambda path: makers[path](), sorted(makers))))


def _examples(records: list[Record]) -> dict[str, tuple[Problem, Config, Gpu, str]]:
    """File name -> (problem, config, GPU, what they are), for each kernel and kind: the problem with most features."""
    shown = {f"{record.config.kernel}-{winners.kind_of(record.problem.static)}.cu": record
             for record in sorted(records, key=lambda record: (winners.telling(record.problem), record.gpu.name))}
    return {name: (record.problem, record.config, gpu := _gpu_of(record),
                   f"the winner of {record.problem} on {gpu.name}; <gpu>.md has others") for name, record in shown.items()}


def _gpu_of(record: Record) -> Gpu:
    gpu = view.gpu_of(record.gpu)
    if gpu is None:
        raise DatabaseError(f"{record.gpu.name} has arch {record.gpu.arch}, which gpus.yaml does not know; add the arch there")
    return gpu


def _source(problem: Problem, config: Config, gpu: Gpu, what: str) -> str:
    kernel = kernel_of(config)
    binary = compile.build(problem.static, config, gpu)
    lines = [f"{kernel.name} for {problem.static.text}; {MARK} from templates/ and tuning_db/",
             "",
             *_wrapped("shown      ", what),
             *_wrapped("config     ", _line(_of_kind(kernel, config, "compile"))),
             *_wrapped("launch     ", _line(_of_kind(kernel, config, "launch"))),
             *(f"resources  {line}" for line in _resources(kernel, problem, config, binary)),
             f"compiler   NVRTC {binary.nvrtc}, -arch={binary.target}; options {' '.join(compile.OPTIONS)}",
             f"again      autotune source {problem} --gpu {gpu.name}"]
    header = "".join(f"// {line}".rstrip() + "\n" for line in lines)
    return f"{header}\n{binary.source}"


def _resources(kernel: Kernel, problem: Problem, config: Config, binary: compile.Binary) -> list[str]:
    steps = {step.entry: step for step in kernel.plan(problem, config)}
    lines = []
    for entry, used in binary.entries.items():
        step = steps.get(entry)
        launched = f", {step.block} threads, {step.smem_bytes} bytes of shared memory" if step else ""
        lines.append(f"{entry}: {used.registers} registers, {used.spill_bytes} bytes spilled{launched}")
    return lines


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
    return [path for path in sorted(folder.rglob("*.*")) if path.suffix in (".cu", ".md")
            and path.relative_to(folder) not in wanted and MARK in (_text(path) or "").partition("\n")[0]]


def _aligned(a: str, b: str) -> list[tuple[str, str]]:
    one, two = a.splitlines(keepends=True), b.splitlines(keepends=True)
    length = max(len(one), len(two))
    return list(zip(one + [""] * (length - len(one)), two + [""] * (length - len(two))))
