"""Where `forward_wgmma` starts from, for problems that no search has been through.

What each problem gains was measured on an H200 (docs/log.md, forward_wgmma 29), beside the tiles of FlashAttention-3 and -4 for
Hopper (hopper/tile_size.h, flash_attn/cute/interface.py: 192 x 128 for D to 64, 128 x 128 to 128, 128 x 112 to 192, 128 x 80).
"""

from __future__ import annotations

import math

from ...core.config import Value
from ...core.gpu import Gpu
from ...core.problem import Problem

GROUP_ROWS = 64  # query rows that a warpgroup owns: M of wgmma
FEW_KEYS, MANY_KEYS = 1024, 2048  # that a query sees
PLAIN = dict(num_warpgroups=2, block_heads=1, block_n=64, num_stages=2, q_stages=1, overlap=True, ping_pong=False,
             rescale_slack=8, integer_max=False, min_blocks_per_sm=1, longest_first=True, head_group=4, persistent=False)
# Blocks go round, load the next queries early, and the heads of a group share them.
ROUND = dict(PLAIN, q_stages=2, persistent=True, head_group=8)


def values(problem: Problem, gpu: Gpu) -> dict[str, Value]:
    """Of the parameters, but for those of split keys.

    Where a query sees few keys, beginnings and ends of blocks count, and small blocks of which an SM has several win; with more,
    three groups and narrow tiles (D to 128: 1.03 to 1.18 times as fast as 128 x 128), and in between two groups and wide tiles.
    """
    head_dim = max(problem.head_dim, problem.head_dim_v)
    lengths = problem.sequences or ((0, 0),)
    pairs, queries = sum(problem.bounds.visible_pairs(*each) for each in lengths), sum(each[0] for each in lengths)
    queries_of_all = queries * problem.batch / len(problem.sequences or (0,))
    filling = queries_of_all * problem.heads_q / (GROUP_ROWS * gpu.sms)  # groups of a block that leave a block for each SM
    if problem.page_size:
        chosen = over_pages(problem, head_dim, pairs < FEW_KEYS * queries)
    elif pairs < FEW_KEYS * queries:
        chosen = few(problem, head_dim, max(1, int(filling)))
    else:
        chosen = many(problem, head_dim, filling, pairs < MANY_KEYS * queries)
    if problem.packed:
        chosen.update(persistent=True)
        if head_dim > 192:  # what more would be live spills
            chosen.update(block_heads=1, overlap=False)
        if chosen["num_warpgroups"] == 3:
            most = 112 if not problem.softcap else 96 if head_dim <= 64 else 64
            chosen.update(block_n=min(chosen["block_n"], most))
    return chosen


def many(problem: Problem, head_dim: int, filling: float, wide: bool) -> dict[str, Value]:
    if head_dim <= 64:  # 128 keys and tanh spill
        return dict(PLAIN, num_warpgroups=3, block_n=112 if problem.softcap else 128, ping_pong=True)
    if head_dim > 128:
        return dict(PLAIN, block_n=96 if head_dim <= 192 else 64)
    if filling < 3:
        return dict(PLAIN, block_n=128, num_stages=3, ping_pong=True)
    if wide and problem.mask != "window":
        return wide_tiles(problem)
    return dict(ROUND, num_warpgroups=3, block_heads=shared_heads(problem), block_n=96 if head_dim <= 96 else 80,
                ping_pong=head_dim <= 96)


def few(problem: Problem, head_dim: int, most_groups: int) -> dict[str, Value]:
    heads = shared_heads(problem)
    groups = min(most_groups, max(1, math.ceil(problem.seqlen_q * heads / GROUP_ROWS)))
    if head_dim <= 64:  # with 4 blocks, whatever is more would be live spills
        plain_window = problem.mask == "window" and not (problem.packed or problem.softcap or problem.alibi)
        return dict(ROUND, num_warpgroups=1, block_heads=heads, block_n=48, min_blocks_per_sm=4 if plain_window else 3)
    if head_dim <= 96 and problem.mask != "window" and groups > 1:
        return wide_tiles(problem)
    if head_dim <= 128:
        return dict(ROUND, num_warpgroups=min(groups, 3), block_heads=heads, block_n=80, num_stages=3)
    if head_dim <= 192:
        return dict(ROUND, num_warpgroups=min(groups, 2), block_heads=heads, num_stages=3 if problem.head_dim_v <= 128 else 2)
    return dict(ROUND, num_warpgroups=1, block_heads=heads)


def over_pages(problem: Problem, head_dim: int, few_keys: bool) -> dict[str, Value]:
    """Tiles of 128 keys where registers allow it: one instruction copies what a page and a tile have in common, and with 80 keys
    pages of 64 come in parts of 16 (383 us against 310: D128, chunks of 1k of 8k)."""
    chosen = dict(PLAIN, block_heads=shared_heads(problem), overlap=not few_keys, ping_pong=not few_keys and head_dim <= 128,
                  q_stages=2 if few_keys and head_dim <= 128 else 1,
                  block_n=128 if head_dim <= 128 else 96 if head_dim <= 192 else 64)
    if few_keys and problem.mask == "window":
        chosen.update(num_warpgroups=3 if head_dim <= 64 else 2, block_n=80 if head_dim <= 128 else 64)
    elif not few_keys and head_dim <= 64:
        chosen.update(num_warpgroups=3)
    elif not few_keys and head_dim <= 128:
        chosen.update(num_stages=3)
    return chosen


def wide_tiles(problem: Problem) -> dict[str, Value]:
    return dict(ROUND, block_heads=shared_heads(problem), block_n=128, ping_pong=True, integer_max=True, head_group=16)


def shared_heads(problem: Problem) -> int:
    """Query heads of a block."""
    return next(heads for heads in (4, 2, 1) if problem.group % heads == 0)
