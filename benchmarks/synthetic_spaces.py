"""Sub-spaces that nobody measured, in the form that `subspaces.py` records: for trying replays where there is no GPU.

    python benchmarks/synthetic_spaces.py OUT_FOLDER [SEED]

A time is the kernel's own estimate times exp(residual). The residual's standard deviation is what covers of an H200 show between
configs of one problem (0.11 for decode_mma, 0.075 for forward_wgmma), of which main effects of parameters have half of the
variance, pairs of parameters a third, and each config alone the rest, which is what makes a landscape rugged. Where a random
direction of the compile parameters is high, configs spill. A proxy: what is true of it may not be true of a GPU.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from subspaces import SPACES, file_name, subspace, values, write

from autotune.core.config import Config
from autotune.core.gpu import Gpu, by_name
from autotune.core.problem import Problem
from autotune.kernels import KERNELS
from autotune.kernels.base import Kernel

RESIDUAL = {"decode_mma": 0.11}  # standard deviation of log(time / estimate) between configs of one problem
OTHERS = 0.075
SHARES = (0.5, 0.33, 0.17)  # of its variance: single parameters, pairs, each config alone
NOISE = 0.002  # of a measurement
SPILLS = 0.12  # of all configs


def synthetic(kernel: Kernel, problem: Problem, gpu: Gpu, space: list[Config], seed: int) -> dict[tuple, float | str]:
    """What recording `space` might have given."""
    rng = np.random.default_rng([seed, len(space)])
    parameters = [p for p in kernel.parameters if not p.derived and len({config[p.name] for config in space}) > 1]
    places = np.array([[p.values.index(config[p.name]) for p in parameters] for config in space])
    single = sum(rng.normal(size=places[:, n].max() + 1)[places[:, n]] for n in range(len(parameters)))
    pairs = sum(rng.normal(size=(places[:, a].max() + 1, places[:, b].max() + 1))[places[:, a], places[:, b]]
                for a, b in combinations(range(len(parameters)), 2))
    parts = (single, pairs, rng.normal(size=len(space)))
    residual = sum(np.sqrt(share) * (part - part.mean()) / part.std() for share, part in zip(SHARES, parts))
    residual = RESIDUAL.get(kernel.name, OTHERS) * residual + rng.normal(scale=NOISE, size=len(space))
    compiled = np.array([p.kind == "compile" for p in parameters])
    pressure = (places / places.max(axis=0) * compiled) @ rng.normal(size=len(parameters))
    limit = np.quantile(pressure, 1 - SPILLS)
    times = [kernel.account_us(problem, config, gpu) * float(np.exp(r)) for config, r in zip(space, residual)]
    return {values(config, kernel): "spilled" if high > limit else float(f"{time:.6g}")
            for config, high, time in zip(space, pressure, times)}


def main(out: str, seed: str = "0", gpu: str = "nvidia-h200") -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, text in SPACES:
        kernel, problem = KERNELS[name], Problem.parse(text)
        space = subspace(kernel, problem, by_name(gpu))
        write(Path(out) / file_name(name, text), kernel, space, synthetic(kernel, problem, by_name(gpu), space, int(seed)))


if __name__ == "__main__":
    main(*sys.argv[1:])
