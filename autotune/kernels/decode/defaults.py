"""Where `decode_mma` starts from: the shape of a block and its launch for problems that no search has been through.

What each problem gains was measured on an H200 (docs/log.md, decode_mma 18); a block's shape is (block_n, num_warps, num_stages,
min_blocks_per_sm).
"""

from __future__ import annotations

from ...core.gpu import Gpu
from ...core.problem import Problem
from ..base import WARP_SIZE

# Defaults by block_n, num_warps, num_stages and min_blocks_per_sm: the first that is legal. Where 16 rows leave registers for
# them, 32 keys a tile are as fast as 16 or faster: 34.1 against 36.8 us (D64, batch 1, 64k), but not in pages (132 against 129,
# batch 32). Two heads side by side leave no registers for 32 keys. With D256 4 warps that fill an SM take 124 us, 2 warps 146
# (batch 8, 8k).
NARROW = ((16, 4, 2, 2), (16, 4, 2, 1), (16, 2, 3, 2), (16, 2, 2, 1), (16, 1, 2, 1))
WIDE = ((32, 4, 2, 2), (32, 4, 2, 1), *NARROW)
ALONE, ALONE_BYTES = ((32, 8, 2, 1), (16, 8, 4, 1)), 512 * 1024
# All keys of a window of 128 and a few more: each warp has a tile or two, so beginnings and merges are what takes time. 8 warps
# need no merge (3.0 against 4.1 us: D64, batch 4); where blocks are many, small ones begin sooner (7.4 against 11.8 us, in
# pages 9.2 against 18.5: batch 64).
TINY, TINY_CROWD, TINY_KEYS = ((16, 8, 2, 1), *NARROW), ((16, 2, 2, 1), *NARROW), 256
SHORT_KEYS = 512  # of a block, by which 16-bit caches gain from Q in shared memory: 7.4 against 9.5 us (D128, batch 2, 2k)


def stands_alone(problem: Problem, unsplit: int, gpu: Gpu) -> bool:
    """Whether blocks should fill an SM's shared memory. One that has an SM for itself stands as evenly as the kernel before it
    did; where several find room, those of one round come to stand unevenly in some graphs (33.7 us, or 36 to 40: D64, batch 1,
    64k), which costs more than it gains from 512 KB a block on."""
    return gpu.arch >= 90 and unsplit <= gpu.sms and problem.cache_bytes >= ALONE_BYTES * gpu.sms


def may_guess(problem: Problem) -> bool:
    """Whether `speculative_start` guesses anything: of no more sequences than a warp has lanes, without queries of their own."""
    return problem.batch <= WARP_SIZE and not problem.packed


def speculates(problem: Problem, unsplit: int, gpu: Gpu) -> bool:
    """Whether blocks over pages begin before they know what stands there: where sequences are few enough to be cut, so that a
    step is short (3.6 against 4.6 us: a window of 128, batch 1; 9.4 against 10.8: 8k; 20.2 against 21.1: batch 8, 2k). Where the
    SMs are full until the end, blocks come too late for it (129 against 127 us: batch 32, 8k)."""
    return problem.kv == "paged" and unsplit <= gpu.sms and may_guess(problem)


def visible(problem: Problem) -> int:
    """Keys of a sequence that its queries see."""
    return problem.bounds.visible_keys(problem.seqlen_q, problem.seqlen_k)


def is_short(problem: Problem, unsplit: int, gpu: Gpu) -> bool:
    """Whether blocks, one for each SM, have few keys, but more than a tile or two for each warp."""
    return TINY_KEYS < visible(problem) and visible(problem) * unsplit <= SHORT_KEYS * gpu.sms and unsplit <= gpu.sms and \
        problem.kv_dtype == problem.dtype


def pieces(problem: Problem, unsplit: int, gpu: Gpu) -> float:
    """One for each SM, which was best on an H200 for batches of 1 to 8 and 4k to 32k keys, and where there is little to split.
    Where unsplit pieces alone are more, half as many again, so that sequences of one length stay whole and longer ones are split;
    but no more than 4 for each SM, as blocks that turn out to have no piece take time too (4160 in place of 2560: 383 against
    315 us, 2048 pieces of 1k keys)."""
    return gpu.sms if unsplit <= gpu.sms or visible(problem) <= TINY_KEYS else min(1.5 * unsplit, 4 * gpu.sms)


def skeletons(problem: Problem, unsplit: int, narrow: bool, gpu: Gpu) -> tuple[tuple[int, int, int, int], ...]:
    """Those of a default, in order of preference. `narrow`: 32 keys a tile do not fit."""
    if visible(problem) <= TINY_KEYS:
        return TINY if unsplit <= gpu.sms else TINY_CROWD
    alone = stands_alone(problem, unsplit, gpu)
    if narrow or is_short(problem, unsplit, gpu) or problem.kv == "paged" and not alone:
        return (*(ALONE[1:] if alone else ()), *NARROW)
    return (*(ALONE if alone else ()), *WIDE)


def early_tiles(problem: Problem, unsplit: int, block_n: int, gpu: Gpu) -> tuple[int, int]:
    """(prefetch_tiles, trigger_tiles) of a default with dependent launch. The next kernel may come at once where there are few
    keys, soon where all blocks end together, as HBM would be idle meanwhile, and late over pages (123 against 134 us, batch 64),
    where only the first blocks have reason to prefetch (258 against 315 us: 2048 pieces of 1k keys); but soon if it can begin
    before it knows what stands there (20.3 against 23.5 us: batch 8, 2k)."""
    one_round = unsplit <= 2 * gpu.sms
    if visible(problem) <= TINY_KEYS:
        return 0, 8
    if is_short(problem, unsplit, gpu):
        return 1, 2
    if problem.kv == "paged" and not stands_alone(problem, unsplit, gpu):
        return (2, 1) if speculates(problem, unsplit, gpu) else (int(one_round), 0)
    early = 64 // block_n if one_round else 1
    return early, early
