"""A problem small enough to simulate that takes a kernel through the same code as the one it stands for."""

from __future__ import annotations

from dataclasses import fields, replace

from ..core.config import Config
from ..kernels import kernel_of
from ..kernels.backward.base import BackwardKernel
from ..kernels.decode.base import DecodeKernel
from ..core.problem import Problem

KEYS_OF_A_TILE = 32  # of kernels that have no parameter for it: a key for each lane

# Fields that are numbers of something. All others say which features a problem has: they stay.
KEPT = ("head_dim", "head_dim_v", "page_size")
SIZES = {field.name for field in fields(Problem) if field.type.startswith("int")} - {*KEPT}


def tile_of(config: Config) -> tuple[int, int]:
    """(rows of a block, keys of a tile). Rows are queries, or for decode kernels queries of all heads of a group."""
    kernel = kernel_of(config)
    if isinstance(kernel, BackwardKernel):
        return kernel.block_rows(config)
    if isinstance(kernel, DecodeKernel):
        return kernel.block_rows(config), kernel.tile_keys(config)
    return kernel.block_queries(config), config.values.get("block_n", KEYS_OF_A_TILE)


def shrunk(problem: Problem, config: Config) -> Problem:
    """`problem` with at most 2 key/value heads, 2 blocks of rows and 4 tiles of keys (of a backward 2
    blocks), the last ones ragged; with one batch entry, or 3 sequences if each has its own length.

    What is compiled in stays, and so do page size, sinks and queries of a decode step. What the mask hides shrinks with the
    lengths, so that each bound still hides or shows keys that it did.
    """
    rows, keys = tile_of(config)
    decode, backward = problem.op == "decode", problem.op == "backward"
    sizes = {"batch": min(problem.batch, 3 if decode or problem.packed else 1), "heads_kv": min(problem.heads_kv, 2)}
    sizes["heads_q"] = sizes["heads_kv"] * (problem.group if decode else min(problem.group, 2 if backward else 3))
    sizes["seqlen_q"] = problem.seqlen_q if decode else min(problem.seqlen_q, rows + rows // 2 + 5)
    sizes["seqlen_k"] = min(problem.seqlen_k, (12 if decode else 1 if backward else 3) * keys + keys // 2 + 3)
    bounds = problem.bounds.shrunk(keys, (problem.seqlen_q, problem.seqlen_k), (sizes["seqlen_q"], sizes["seqlen_k"]))
    sizes |= bounds._asdict()
    assert sizes.keys() == SIZES, f"no rule says how {', '.join(sizes.keys() ^ SIZES)} shrinks"
    return replace(problem, **sizes)
