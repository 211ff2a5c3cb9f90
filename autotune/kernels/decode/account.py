"""What a decode launch takes by `decode_mma`'s own account: bytes over bandwidth in rounds of blocks, and latencies.

Fitted to 4287 times of an H200 (covers of 35 static parts, `benchmarks/replayed.py`): of a problem's configs the one with the
least account takes 1.037 times the best. Times are in us, rates in bytes per us.
"""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple

from ...core.config import Value
from ...core.gpu import Gpu
from ...core.problem import Problem
from ..base import WARP_SIZE
from ..traits import Account, log2
from .base import Launches, row_tiles
from .defaults import may_guess, visible
from .rules import key_bytes, kv_bytes, ring_bytes

SHARPNESS = 4  # of what gives way to the slower of two limits: near both, a fifth slower than either
READ_SHARE = 0.93  # of the bandwidth, by all SMs together
SM_BYTES_PER_CLOCK = 35  # that an SM takes from L2 at the most
RING_US = 0.29  # from one load into a buffer to the next, of a block that has the SM for itself
L2_LINE_BYTES, HALF_LINES = 128, 0.87  # where a block takes 64 bytes of a key: of the bandwidth
SHARED_READS = 6  # tiles of rows of one key/value head that share what one of them reads

# A block: its beginning and end; what comes on top with pages, for each warp of page lookups, with 8 bits, with Q in registers,
# with two heads side by side, for every 4 warps to merge, for every buffer beyond two, and where it prefetches.
BLOCK_US, PAGES_US, SEQUENCES_US, E4M3_US, Q_US, PAIR_US = 1.7, 1.3, 0.29, 0.67, 0.37, 1.2
WARPS_US, STAGE_US, PREFETCH_US = 0.16, 0.27, 0.52
HIDDEN = 0.21  # power of blocks on an SM by which their beginnings hide behind each other
# A step of a warp, a tile of 16 keys and 16 rows: it takes that however much of the bandwidth is free.
STEP_US, KEYS_POWER, ROWS_SHARE, SOFTCAP_SHARE, PAGED_STEP_US = 0.56, 0.3, 0.28, 0.52, 0.14
LAUNCH_US, INDEPENDENT_US = 0.3, 1.3  # in a graph; what comes on top where the next kernel waits for this one to end
SUCCESSOR_US = 1.1  # of the next kernel, whose blocks find no room before these have ended
GUESS_US = 0.77  # gained by blocks that begin before they know what stands in the page table
EMPTY_BLOCK_US = 0.0043  # of a grid made for the worst lengths
MERGE_US, SPLIT_US, MERGE_BYTES_PER_CLOCK, MERGE_POWER = 1.4, 0.07, 37, 0.9  # by a block of 128 threads; power of threads
CLUSTER_US, CLUSTER_UNEVEN = 1.5, 1.1
CLUSTER_SHARE = 0.89  # of places that clusters can take: those of 16 blocks 7 of 8 with one place an SM
MORE_REGISTERS, MORE_REGISTERS_E4M3 = 50, 24  # than tiles take (`rules.live_registers`); for 8 bits by 16 keys of a tile


class Work(NamedTuple):
    """What one block does, and how many there are."""

    blocks: int
    places: int  # of blocks on the GPU at once
    resident: int  # on an SM
    block_bytes: float  # of keys and values
    ring_rate: float  # bytes per us of a block that nothing else holds up
    sm_rate: float  # of an SM, all of its blocks together
    rate: float  # of all SMs together
    alone_us: float  # of a block's warps, one step after another
    clusters: bool


def account(problem: Problem, v: Mapping[str, Value], launches: Launches, empty_blocks: int, unsplit: int, resident: int,
            gpu: Gpu) -> Account:
    """Of a config of values `v` and its `launches`, which would be of `unsplit` pieces if none were split; `empty_blocks` more
    turn out to have no work."""
    work = _work(problem, v, launches, unsplit, resident, gpu)
    time_us = _time_us(problem, v, launches, empty_blocks, unsplit, work, gpu)
    return Account(time_us, _traits(problem, v, launches, unsplit, work, time_us))


def _traits(problem: Problem, v: Mapping[str, Value], launches: Launches, unsplit: int, work: Work,
            time_us: float) -> tuple[float, ...]:
    """Coordinates, those that say most first: what a block takes by itself, how a launch fills the places, and sizes."""
    fill = work.blocks / work.places
    return (_begin_us(problem, v) / time_us * 2.1, v["block_heads_kv"], work.alone_us / time_us * 1.6,
            math.log2(v["num_warps"]) * 0.75, min(fill, 1) * 1.4, work.resident * 0.18, log2(work.block_bytes) * 0.074,
            work.clusters * 0.5, v["block_n"] * 0.014, math.log2(time_us) * 0.067,
            log2(problem.group * problem.seqlen_q) * 0.05, log2(problem.batch * problem.heads_kv) * 0.1, fill % 1 * 0.36,
            v["min_blocks_per_sm"] * 0.09, v["q_in_registers"] * 0.22, log2(visible(problem)) * 0.037,
            log2(problem.batch) * 0.028, log2(launches.grid / unsplit) * 0.05, log2(problem.page_size) * 0.01,
            # How early the next launch's blocks come: where they find room decides on which SMs they crowd.
            math.log2(1 + v["trigger_tiles"]) * 0.2, math.log2(1 + v["prefetch_tiles"]) * 0.3, v["speculative_start"] * 0.5)


def _time_us(problem: Problem, v: Mapping[str, Value], launches: Launches, empty_blocks: int, unsplit: int, work: Work,
             gpu: Gpu) -> float:
    rounds, rest = divmod(work.blocks, work.places)
    begin_us = _begin_us(problem, v)
    total_us = LAUNCH_US + EMPTY_BLOCK_US * empty_blocks + rounds * (_round_us(work, work.places, gpu.sms) +
                                                                    begin_us / work.resident**HIDDEN)
    if rest:
        total_us += _round_us(work, rest, gpu.sms) + begin_us
    if not v["dependent_launch"]:
        total_us += INDEPENDENT_US + SUCCESSOR_US
    else:
        room = work.places - (rest or work.places)
        total_us += SUCCESSOR_US * (1 - min(1.0, room / min(work.blocks, work.places)))
    if v["speculative_start"] and may_guess(problem):
        total_us -= GUESS_US
    return total_us + _merge_us(problem, v, launches, launches.grid // unsplit, gpu)


def _work(problem: Problem, v: Mapping[str, Value], launches: Launches, unsplit: int, resident: int, gpu: Gpu) -> Work:
    places, blocks = gpu.sms * resident, max(launches.grid, 1)
    if launches.cluster > 1:
        places = max(1, int(CLUSTER_SHARE * places / launches.cluster)) * launches.cluster
    tiles = math.ceil(math.ceil(visible(problem) / v["block_n"]) * unsplit / blocks)
    heads = v["block_heads_kv"]
    sharing = max(1, row_tiles(problem, v["block_m"] // heads))
    rate = READ_SHARE * gpu["bandwidth_gb_s"] * 1e3 * min(sharing, SHARED_READS)
    if heads * key_bytes(problem) < L2_LINE_BYTES:
        rate *= HALF_LINES
    step_us = STEP_US * (v["block_n"] / 16)**KEYS_POWER * (1 + ROWS_SHARE * (v["block_m"] / 16 - 1))
    step_us = step_us * (1 + SOFTCAP_SHARE if problem.softcap else 1) + (PAGED_STEP_US if problem.page_size else 0)
    return Work(blocks, places, resident, tiles * kv_bytes(problem.static, v),
                ring_bytes(problem.static, v) / RING_US, SM_BYTES_PER_CLOCK * gpu["sm_clock_mhz"], rate,
                math.ceil(tiles / v["num_warps"]) * step_us, launches.cluster > 1)


def _begin_us(problem: Problem, v: Mapping[str, Value]) -> float:
    total_us = BLOCK_US + WARPS_US * v["num_warps"] / 4 + STAGE_US * (v["num_stages"] - 2)
    if problem.page_size:
        total_us += PAGES_US + SEQUENCES_US * min(problem.batch, 256) / WARP_SIZE
    if problem.kv_dtype == "e4m3":
        total_us += E4M3_US
    if v["q_in_registers"]:
        total_us += Q_US
    if v["block_heads_kv"] > 1:
        total_us += PAIR_US
    return total_us + (PREFETCH_US if v["prefetch_tiles"] else 0)


def _round_us(work: Work, blocks: int, sms: int) -> float:
    """Of `blocks` side by side: some SMs have one more than the others. As SMs share the bandwidth, not blocks, those finish
    later, and read alone then."""
    low, more = divmod(blocks, sms)
    full = _slower(work.ring_rate * (low + 1), work.sm_rate)
    if not low:
        reading_us = work.block_bytes / _slower(full, work.rate / more)
    else:
        usual, share = _slower(work.ring_rate * low, work.sm_rate), work.rate / sms
        reading_us = low * work.block_bytes / _slower(usual, share)
        if more:
            left = share if usual >= share else (work.rate - (sms - more) * usual) / more
            rest = (low + 1) * work.block_bytes - _slower(left, full) * reading_us
            reading_us += max(0.0, rest) / _slower(full, work.rate / more)
    if work.clusters and work.resident > 1:
        reading_us *= CLUSTER_UNEVEN
    return (reading_us**SHARPNESS + work.alone_us**SHARPNESS)**(1 / SHARPNESS)


def _slower(a: float, b: float) -> float:
    """The rate that two limits leave."""
    share = (a / b)**SHARPNESS
    return a / (1 + share)**(1 / SHARPNESS)


def _merge_us(problem: Problem, v: Mapping[str, Value], launches: Launches, splits: int, gpu: Gpu) -> float:
    """What follows the last piece: one block reads what all splits of its rows have left, in as many turns as its shared memory
    asks for."""
    if launches.cluster > 1:
        return CLUSTER_US
    if not launches.slots:
        return 0.0
    threads = v["num_warps"] * WARP_SIZE
    turns = math.ceil(launches.rows * problem.head_dim_v / 8 / threads)
    slot_bytes = launches.rows * problem.head_dim_v * 4
    at_once = max(1, (v["smem_bytes"] - splits * launches.rows * 8) // slot_bytes)
    read_bytes = splits * slot_bytes * (turns if at_once < splits else 1)
    rate = MERGE_BYTES_PER_CLOCK * gpu["sm_clock_mhz"] * (threads / 128)**MERGE_POWER
    return MERGE_US + read_bytes / rate + SPLIT_US * turns * splits + (INDEPENDENT_US if launches.combine else 0.0)
