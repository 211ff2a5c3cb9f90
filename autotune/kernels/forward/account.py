"""What a forward launch takes by `forward_wgmma`'s own account: tiles in rounds of blocks, loads, and what blocks begin with.

Fitted to 7975 times of an H200 (covers of 42 static parts, `benchmarks/replayed.py`): of a problem's eight configs or so the one
with the least account takes 1.015 times the best. Times are in clocks of an SM until the end, then in us.
"""

from __future__ import annotations

import math
from typing import Mapping

from ...core.config import Value
from ...core.gpu import Gpu
from ...core.problem import Problem
from ..traits import Account, keys_seen, log2
from .mma import PANEL
from .schedule import last_end, visits
from .splits import combine_us

GROUP_ROWS = 64
# Of a tile of 64 rows: products and exp2 over what the units could do; a soft cap takes as much again, rescaling at every tile 18
# clocks a column of the output; what a group takes that has no other to take turns with: a share of both, and latencies.
MMA, SOFTMAX, SOFTCAP, RESCALE = 0.94, 1.3, 1.6, 0.29
ALONE, LATENCY = 0.57, 240
# Over pages: found for each tile, and copied in boxes of keys that a page and a tile have in common.
PAGES_LATENCY, BOX_LATENCY, BOX = 120, 28, 3.3
# Beginning and end of a block; what is seen of it where blocks go round, with the next queries loaded early or not; packed.
BLOCK, AHEAD, ROUND, PACKED = 5400, 0.41, 0.82, 750
# Spread of lengths by which rounds blur; with more rounds than so many, of the longest block what stands out at the end.
EVEN, ROUNDS, TAIL = 0.35, 8, 0.33
CLOCK_SHARE, READ_SHARE, L2_BYTES_PER_US = 0.753, 0.67, 9.6e6
LAUNCH_US = 2.3


def account(problem: Problem, v: Mapping[str, Value], blocks: int, block_queries: int, resident: int, workspace_bytes: int,
            gpu: Gpu) -> Account:
    """Of a config of values `v`: `blocks` blocks with work before keys are split, `resident` at once on an SM."""
    time_us = time_us_of(problem, v, blocks, block_queries, resident, workspace_bytes, gpu)
    blocks, seen = max(blocks, 1) * v["num_splits"], visits(problem, block_queries, v["block_n"])
    rounds, rows = blocks / (gpu.sms * resident), problem.batch * problem.heads_q * problem.seqlen_q
    return Account(time_us, (
        # Sizes.
        log2(problem.page_size) * 0.186, log2(keys_seen(problem)) * 0.134, log2(problem.group) * 0.065,
        log2(problem.seqlen_q) * 0.063, log2(min(rows, gpu.sms * 64 * 32)) * 0.083,
        # How blocks fill the GPU, and what they find to do.
        seen.spread * 1.14, log2(v["num_splits"]) * 0.53, min(rounds, 3) * 0.71, (rounds % 1 if rounds < 6 else 0.5) * 0.67,
        min(rounds, 1) * 0.1, log2(seen.most) * 0.218, math.log2(max(seen.mean / v["num_splits"], 0.5)) * 0.198,
        math.log2(time_us) * 0.072, math.log2(blocks / gpu.sms) * 0.041, resident * 0.077,
        # The config.
        v["block_n"] * 0.0109, v["persistent"] * 0.62, v["min_blocks_per_sm"] * 0.59, v["num_warpgroups"] * 0.385,
        (v["rescale_slack"] > 0) * 0.35, math.log2(v["head_group"]) * 0.079, v["integer_max"] * 0.14, v["q_stages"] * 0.12,
        math.log2(v["block_heads"]) * 0.1, v["overlap"] * 0.3, v["ping_pong"] * 0.3, v["num_stages"] * 0.2))


def time_us_of(problem: Problem, v: Mapping[str, Value], blocks: int, block_queries: int, resident: int, workspace_bytes: int,
               gpu: Gpu) -> float:
    """The time of `account` alone."""
    splits, groups, places = v["num_splits"], v["num_warpgroups"], gpu.sms * resident
    seen = visits(problem, block_queries, v["block_n"])
    blocks, mean, most = max(blocks, 1) * splits, seen.mean / splits, seen.most / splits
    rounds, longest = blocks / places, most
    if rounds > 1:  # of blocks alike whole rounds, of others as they find room
        longest = max(most, last_end(problem, block_queries, v["block_n"], blocks, places) / splits if rounds <= ROUNDS
                      else rounds * mean + TAIL * most)
        even = math.exp(-seen.spread / EVEN)
        rounds = even * math.ceil(rounds) + (1 - even) * rounds
    turns = groups * min(resident, math.ceil(blocks / gpu.sms))
    seen_of_begin = (AHEAD if v["q_stages"] > 1 else ROUND) if v["persistent"] else 1
    begin = (BLOCK + (PACKED if problem.packed else 0)) * (1 + (max(rounds, 1) - 1) * seen_of_begin)
    clocks = longest * turns * _tile_clocks(problem, v, turns, gpu) + begin
    tile_bytes = v["block_n"] * (problem.head_dim + problem.head_dim_v) * problem.static.element_bytes
    limits_us = (clocks / (CLOCK_SHARE * gpu["sm_clock_mhz"]), blocks * mean * tile_bytes / L2_BYTES_PER_US,
                 problem.compulsory_bytes / (READ_SHARE * gpu["bandwidth_gb_s"] * 1e3))
    combining_us = combine_us(workspace_bytes) if splits > 1 else 0.0
    return sum(limit**4 for limit in limits_us)**0.25 + combining_us + LAUNCH_US


def _tile_clocks(problem: Problem, v: Mapping[str, Value], turns: int, gpu: Gpu) -> float:
    """Of an SM for each tile of 64 rows, where so many groups take turns."""
    n, columns = v["block_n"], problem.head_dim + problem.head_dim_v
    products = MMA * 2 * GROUP_ROWS * n * columns / gpu["tensor_flops_per_clock_sm"]
    softmax = SOFTMAX * GROUP_ROWS * n / gpu["exp_per_clock_sm"] * (1 + SOFTCAP if problem.softcap else 1)
    if v["rescale_slack"] < 0:
        softmax += RESCALE * GROUP_ROWS * problem.head_dim_v / gpu["exp_per_clock_sm"]
    alone, loading = ALONE * (products + softmax) + LATENCY, 0.0
    if problem.page_size:
        panels = math.ceil(problem.head_dim / PANEL) + math.ceil(problem.head_dim_v / PANEL)
        boxes = n // math.gcd(n, problem.page_size) * panels
        alone += PAGES_LATENCY + BOX_LATENCY * boxes
        loading = BOX * boxes / v["num_warpgroups"]
    return math.hypot(max(products, softmax), alone / turns, loading)
