"""Are packed sequences as fast as a batch of one length? 64 sequences whose lengths are drawn log-normal, 32,768 tokens in all,
32 query and 8 key/value heads of 128, causal, bf16: beside a dense problem of the same work, and beside FlashAttention-3.

    python benchmarks/varlen.py [--draws N] [--seed S] [--out FILE]

One process. Needs a GPU, and torch and flash_attn_interface for FlashAttention-3: without them its time is left out. Takes about
10 s a draw. The dense problem has as many tokens and multiply-adds, in sequences of one length: the mean length of the packed
ones, each weighted by its tokens. It is measured before and after the packed ones.
"""

from __future__ import annotations

import math
import sys
import warnings
from statistics import mean

import numpy as np
import _result

import autotune
from autotune.core.gpu import Gpu
from autotune.compare.peers import PEERS
from autotune.core.problem import Problem

SEQUENCES, TOKENS, SIGMA = 64, 32768, 1.0
SHAPE = dict(dtype="bf16", heads_q=32, heads_kv=8, head_dim=128, window_right=0)
DRAWS = 3

HEADER = """\
# vs_dense is TFLOP/s of the packed sequences / of the dense problem of the same work, vs_fa3 is FlashAttention-3's time / ours on
# the same arrays, both for the worst of the draws. Times are in microseconds, medians; TFLOP/s do not count masked pairs.
"""


def drawn(seed: int) -> list[int]:
    """Lengths of the sequences: log-normal, scaled to `TOKENS` in all, the last token or so of rounding with the longest."""
    shares = np.exp(SIGMA * np.random.default_rng(seed).standard_normal(SEQUENCES))
    lengths = np.maximum(1, np.round(shares * TOKENS / shares.sum())).astype(int)
    lengths[lengths.argmax()] += TOKENS - lengths.sum()
    return lengths.tolist()


def equal_work(lengths: list[int]) -> Problem:
    """The dense problem with about as many tokens and multiply-adds as packed sequences of `lengths`."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    batch = max(1, round(TOKENS / (sum(length**2 for length in lengths) / TOKENS)))
    length = round((math.sqrt(1 + 8 * pairs / batch) - 1) / 2)
    return Problem(batch=batch, seqlen_q=length, seqlen_k=length, **SHAPE)


def measure(gpu: Gpu, lengths: list[int], peers: list) -> dict:
    """One draw: our time packed and dense, and the peers' times. Raises `SystemExit` for a wrong result of ours."""
    from autotune.compare.run import measure_row, release

    packed = Problem(kv="varlen", batch=SEQUENCES, seqlen_q=max(lengths), seqlen_k=max(lengths), **SHAPE)
    dense = equal_work(lengths)
    around = []
    for problem, others, sequences in ((dense, [], None), (packed, peers, [(n, n) for n in lengths]), (dense, [], None)):
        row, failed = measure_row(problem, others, gpu, sequences)
        if row is None:
            raise SystemExit(f"{problem}: {failed[0][1]}")
        if problem is dense:
            around.append(row)
        else:
            ours, left_out = row, dict(failed)
        release()
    flops = packed.flops_of([(n, n) for n in lengths])
    dense_us = mean(row.ours.time_us for row in around)
    entry = {"vs_dense": round(flops / ours.ours.time_us / (dense.flops / dense_us), 4),
             "packed": _timed(flops, ours.ours.time_us, ours) | {"error_ratio": round(ours.ours.error_ratio, 3)},
             "dense": {"problem": dense.text} | _timed(dense.flops, dense_us, around[0]),
             "dense_before_and_after_us": [round(row.ours.time_us, 2) for row in around]}
    for name, timing in ours.peers.items():
        entry[name] = {"time_us": round(timing.time_us, 2), "tflops": round(flops / timing.time_us * 1e-6, 1),
                       "error_ratio": round(timing.error_ratio, 3), "policy": timing.policy}
        entry[f"vs_{name}"] = round(timing.time_us / ours.ours.time_us, 4)
    return entry | ({"left_out": left_out} if left_out else {}) | {
        "lengths": {"longest": max(lengths), "shortest": min(lengths), "flops": flops}}


def _timed(flops: int, time_us: float, row) -> dict:
    return {"time_us": round(time_us, 2), "tflops": round(flops / time_us * 1e-6, 1), "match": row.match,
            "config": row.config.text, "policy": row.ours.policy, "spread": round(row.ours.spread, 4),
            "sm_clock_mhz": row.ours.sm_clock_mhz}


def main() -> int:
    parser = _result.parser(__doc__, "varlen-h200.yaml")
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    gpu = _result.gpu_at_hand()
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    missing = PEERS["fa3"].missing()
    if missing:
        print(f"FlashAttention-3 does not take part: {missing}", file=sys.stderr)
    peers = [] if missing else [PEERS["fa3"]]
    rows = {}
    for seed in range(options.seed, options.seed + options.draws):
        rows[f"seed {seed}"] = row = measure(gpu, drawn(seed), peers)
        print(f"seed {seed}: packed {row['packed']['time_us']} us, {row['packed']['tflops']} TFLOP/s, dense "
              f"{row['dense']['tflops']} TFLOP/s, vs_dense {row['vs_dense']}, vs_fa3 {row.get('vs_fa3', '-')}", flush=True)
    summary = {name: min(row[name] for row in rows.values())
               for name in ("vs_dense", "vs_fa3") if all(name in row for row in rows.values())}
    from autotune.compare.run import versions

    facts = {"versions": versions(peers), **({"fa3": missing} if missing else {}), "rows": rows}
    _result.write(options.out, gpu, summary, facts, HEADER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
