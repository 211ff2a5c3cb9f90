"""Is one call for a batch of decodes and a chunk of a prompt as fast as separate calls? Over a paged cache, a chunk of 2,048
queries at the end of 32,768 keys, and 31 sequences that decode at 8,192 keys.

    python benchmarks/mixed_batch.py [--out FILE]

One process on the same arrays, by turns, each call in a CUDA graph. Needs a GPU; takes half a minute. Ratios are the time of a
call for the decodes and one for the chunk / the time of one call for all: above 1, one call is faster.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Callable

import numpy as np
import _result

import autotune
from autotune.core.gpu import Gpu
from autotune.check.inputs import make_inputs
from autotune.check.numerics import to_float32
from autotune.core.problem import Problem
from autotune.timing.bench import Bench, Candidate

DECODES, KEYS = 31, 8192
CHUNK, CHUNK_KEYS = 2048, 32768
SHAPES = ("h32x8", 128), ("h64x8", 64)
PAGE_SIZES = (16, 64, 256)
ROUNDS = 15
APART = 0.02  # of the outputs of both ways, absolute: splits differ


def main() -> int:
    parser = _result.parser(__doc__, "mixed-h200.yaml")
    options = parser.parse_args()
    gpu = _result.gpu_at_hand()
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    rows = {}
    for heads, head_dim in SHAPES:
        for page_size in PAGE_SIZES:
            name = f"{heads}-d{head_dim}-page{page_size}"
            rows[name] = measure(gpu, heads, head_dim, page_size)
            print(f"{name}: one call {rows[name]['one_call_us']} us, separate calls {rows[name]['separate_calls_us']} us, "
                  f"ratio {rows[name]['ratio']}", flush=True)
    ratios = [row["ratio"] for row in rows.values()]
    summary = {"geomean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3), "worst": min(ratios)}
    facts = {"batch": f"{DECODES} sequences decode at {KEYS} keys, one has a chunk of {CHUNK} queries at the end of {CHUNK_KEYS}",
             "rows": rows}
    _result.write(options.out, gpu, summary, facts)
    return 0


def measure(gpu: Gpu, heads: str, head_dim: int, page_size: int) -> dict:
    """Times of one call, of both separate calls, and of each of them."""
    calls = calls_of(heads, head_dim, page_size)
    # Whose arrays are not used: it brings a stream, the flush and the policy of decode steps of this size.
    bench = Bench(Problem.parse(f"decode-bf16-b{DECODES}-{heads}-q1-k{KEYS}-d{head_dim}"), gpu)
    with bench.stream:
        results = {name: call() for name, call in calls.items()}  # compiles and loads
        both = results["one_call"][:DECODES], results["one_call"][DECODES:]
        apart = max(float(abs(to_float32(one, "bf16") - to_float32(other, "bf16")).max())
                    for one, other in zip(both, results["separate_calls"]))
    if apart > APART:
        raise SystemExit(f"{heads}, d{head_dim}, page{page_size}: one call and separate calls are {apart:.3g} apart")
    measured = bench.interleave([Candidate(name, lambda i, call=call: call()) for name, call in calls.items()], ROUNDS)
    times = dict(zip(calls, measured))
    return {"ratio": round(times["separate_calls"].time_us / times["one_call"].time_us, 4),
            **{f"{name}_us": round(m.time_us, 1) for name, m in times.items()},
            "spread": max(m.spread for m in measured), "sm_clock_mhz": measured[0].sm_clock_mhz, "policy": measured[0].policy,
            "outputs_apart": round(apart, 5)}


def calls_of(heads: str, head_dim: int, page_size: int) -> dict[str, Callable]:
    """Functions that call attention for the whole batch, for its decodes and its chunk, for one of the two."""
    import cupy

    keys = [KEYS] * DECODES + [CHUNK_KEYS]
    pages = [-(-each // page_size) for each in keys]
    of_all = Problem.parse(f"decode-bf16-b1-{heads}-q1-k{sum(pages) * page_size}-d{head_dim}-page{page_size}")
    cache = make_inputs(of_all, "random", xp=cupy)
    ends = np.cumsum(pages)
    table = np.zeros((DECODES + 1, max(pages)), np.int32)
    for row, numbers in zip(table, np.split(np.random.default_rng(0).permutation(int(ends[-1])), ends[:-1])):
        row[:len(numbers)] = numbers
    table = cupy.asarray(table)
    q = make_inputs(Problem.parse(f"forward-bf16-b1-{heads}-q{DECODES + CHUNK}-k16-d{head_dim}"), "random", xp=cupy).q[0]
    lengths = cupy.asarray(keys, cupy.int32)
    starts = cupy.asarray([*range(DECODES + 1), DECODES + CHUNK], cupy.int32)
    decode_table, decode_lengths = table[:DECODES, :pages[0]], lengths[:DECODES]
    chunk_table, chunk_lengths = table[DECODES:], lengths[DECODES:]

    def one_call():
        return autotune.attention_with_kvcache(q, cache.k, cache.v, cache_seqlens=lengths, page_table=table, cu_seqlens_q=starts,
                                               max_seqlen_q=CHUNK)

    def decodes():
        return autotune.attention_with_kvcache(q[:DECODES, None], cache.k, cache.v, cache_seqlens=decode_lengths,
                                               page_table=decode_table)[:, 0]

    def chunk():
        return autotune.attention_with_kvcache(q[None, DECODES:], cache.k, cache.v, cache_seqlens=chunk_lengths,
                                               page_table=chunk_table)[0]

    return {"one_call": one_call, "separate_calls": lambda: (decodes(), chunk()), "decodes": decodes, "chunk": chunk}


if __name__ == "__main__":
    sys.exit(main())
