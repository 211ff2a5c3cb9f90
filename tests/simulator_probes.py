"""Small kernels for the tests of the simulator and of its twins: a body, arrays in, arrays out."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np

from autotune import simulator
from autotune.kernels.base import Step
from autotune.cuda import render
from autotune.cuda.render import HOST_TWINS, TEMPLATES
from autotune.simulator.job import launch
from autotune.simulator.memory import Memory

FIRST = ("math.cuh", "fp16.cuh", "fragment.cuh", "mma.cuh", "split.cuh")  # other twins build on these
PARAMS = """
struct Params { u32* in; u32* out; int n; int zero; };
extern "C" __global__ void __launch_bounds__(%d) probe(const __grid_constant__ Params p) {
%s
}
"""


def headers(folder: Path, *more: str, **values: object) -> str:
    """base.cuh, all headers of lib/ptx/ and `more` as text, of the twins or of the templates."""
    names = sorted(path.name for path in (folder / "lib" / "ptx").glob("*.cuh"))
    names = [*FIRST, *(name for name in names if name not in FIRST)]
    return render.headers("lib/base.cuh", *(f"lib/ptx/{name}" for name in names), *more,
                          ptx="host" if folder == HOST_TWINS else "cuda", **values)


def source(body: str, threads: int = 32, twins: bool = True) -> str:
    """A kernel `probe` with this body, for the simulator or for the GPU."""
    return headers(HOST_TWINS if twins else TEMPLATES) + PARAMS % (threads, body)


def run(body: str, threads: int = 32, smem_bytes: int = 4096, data=None, out_words: int = 64, seed: int = 0, grid: int = 1,
        timeout_s: float = 20, dependent: bool = False, cluster: int = 1) -> tuple[np.ndarray, simulator.Simulation]:
    """(out, simulation) of a kernel with p.in = `data` (uint32) and p.out = `out_words` words of 0xffffffff."""
    data = np.arange(64, dtype=np.uint32) if data is None else np.ascontiguousarray(data).view(np.uint32)
    out = np.full(out_words, 0xFFFFFFFF, np.uint32)
    memory = Memory(at_end=bool(seed & 1))
    memory.add("in", data, writable=False)
    memory.add("out", out, writable=True)
    params = struct.pack("QQii", memory.address["in"], memory.address["out"], data.size, 0)
    step = Step("probe", grid, threads, smem_bytes, dependent=dependent, cluster=cluster)
    return out, launch(source(body, threads), [step], memory, params, seed, timeout_s)


def finding(body: str, **options) -> simulator.Finding:
    """The first thing that is wrong with it."""
    _, simulation = run(body, **options)
    assert simulation.findings, "nothing was found"
    return simulation.findings[0]


def wrappers(folder: Path) -> dict[str, set[str]]:
    """File -> the functions of lib/ptx/ that templates may call."""
    definition = re.compile(r"^(?:template <[^\n]*>\s*)?DEVICE [\w:<>* ]*?\b(\w+)(?:<\w+>)?\(", re.M)
    return {path.name: set(definition.findall(path.read_text())) for path in sorted((folder / "lib" / "ptx").iterdir())}
