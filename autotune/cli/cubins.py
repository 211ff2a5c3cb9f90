"""Compiles what the shipped records need into a cache folder for machines without a compiler (`cuda.prebuilt`)."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..cuda import compile
from ..cuda.render import render
from ..database import view
from ..kernels import kernel_of


def write(folder: Path, root: Path, names: tuple[str, ...] = ()) -> int:
    """Puts a cubin of every record of the database at `root` into the cache folder `folder`, those of the
    GPUs called `names` if there are any. Returns how many there are. Needs NVRTC and no GPU. Raises `CompileError`,
    `CompilerMissing`, `DatabaseError`."""
    sources = {}
    for _, record in view.all_records((root,)):
        gpu = view.gpu_of(record.gpu)
        if gpu is not None and (not names or gpu.name in names):
            target = kernel_of(record.config).target(gpu)
            sources[render(record.problem.static, record.config, target), target] = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without the GIL
            for binary in pool.map(lambda one: compile.cached(*one), sources):
                compile.store(binary, folder)
    except OSError as error:
        raise view.DatabaseError(f"{folder} cannot be written: {error.strerror or error}") from error
    return len(sources)
