"""Keys of a block of queries dealt out to several blocks: to how many it is worth it, and what combining them takes."""

from __future__ import annotations

from functools import lru_cache

from ...core.config import Config, Value
from ...core.gpu import Gpu
from ...core.problem import Problem
from ..base import Field
from ..space import Binary, Items, Launches, Space
from .base import ForwardKernel

NUM_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NUM_SPLITS_FIELD = Field("int", "num_splits", "blocks that share the keys of a block of queries")
WORKSPACE_FIELD = Field("float*", "workspace", "(num_splits, rows, head_dim_v): O of each split, where rows are (batch, heads_q, "
                        "seqlen_q); then (num_splits, rows, 2): maximum and sum")

LEAST_TILES, DEFAULT_TILES = 2, 4  # of a split, on average: to be worth trying, and in a default
ROUNDS = 3  # of blocks round the GPU that splits worth trying make at the most
HEAD_GROUP = 4  # in the few rounds that blocks with splits make, their order matters little: one is searched

COMBINE_THREADS, COMBINE_COLUMNS = 128, 8  # of a block that puts splits together, and of each of its threads
COMBINE_US = 3.0  # to begin while blocks end, and two waits for L2: an estimate
L2_BYTES_PER_US = 4e6


def worthwhile(kernel: ForwardKernel, problem: Problem, config: Config, gpu: Gpu, least_tiles: int) -> list[int]:
    """Numbers of splits, above 1, that leave each at least so many tiles and the GPU not more than `ROUNDS` rounds of blocks. Of
    `config` the tile counts."""
    blocks = kernel.blocks(problem, config)
    tiles = kernel.tiles(problem, config) / max(blocks, 1)
    return [n for n in NUM_SPLITS[1:] if n * least_tiles <= tiles and n * blocks <= ROUNDS * gpu.sms]


def filling(kernel: ForwardKernel, problem: Problem, config: Config, gpu: Gpu) -> int:
    """As many splits as one round of blocks has room for where blocks of queries leave a third of the SMs idle, else 1."""
    blocks = kernel.blocks(problem, config)
    if problem.packed or 3 * blocks > 2 * gpu.sms:
        return 1
    return max((n for n in worthwhile(kernel, problem, config, gpu, DEFAULT_TILES) if n * blocks <= gpu.sms), default=1)


@lru_cache(maxsize=4)
def space(kernel: ForwardKernel, problem: Problem, gpu: Gpu) -> Space:
    """Every config with keys split that is worth trying, for a kernel all of whose rules but for packed problems allow what they
    allow without."""
    if problem.packed:
        return Space(kernel, ())
    whole = ForwardKernel.space(kernel, problem, gpu).launching({"longest_first": True, "head_group": HEAD_GROUP})
    split: dict[tuple[int, int, int], Launches] = {}  # one choice of launches for each shape: those of `whole` are all the same
    binaries = []
    for compiled, launches in whole.binaries:
        config = Config(kernel.name, compiled)
        shape = kernel.block_queries(config), kernel.block_heads(config), config["block_n"]
        if shape not in split:
            counts = worthwhile(kernel, problem, config, gpu, LEAST_TILES)
            split[shape] = Launches(_replaced(launch, "num_splits", n) for launch in launches for n in counts)
        binaries.append(Binary(_replaced(compiled, "split_keys", True), split[shape]))
    return Space(kernel, binaries)


def _replaced(items: Items, name: str, value: Value) -> Items:
    return Config.of("", {**dict(items), name: value}).items


def combine_us(workspace_bytes: int) -> float:
    """Time beyond that of the blocks: the workspace is written to L2 and read from there."""
    return COMBINE_US + 2 * workspace_bytes / L2_BYTES_PER_US
