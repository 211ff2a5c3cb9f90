"""Does the same launch give the same bits? Each config 1,000 times on the same inputs, half of the times beside another stream
that keeps the GPU busy, output and log-sum-exp compared bit by bit with those of the first launch, which is checked.

    python benchmarks/repeatability.py [--runs N] [--configs N] [--out FILE]

For each problem: the default config of every kernel that serves it, and random legal ones. Needs a GPU; takes a minute. Exit code
1 if a launch differs.
"""

from __future__ import annotations

import os
import sys
from typing import Callable

import _result

from autotune.check.cases import Case, drawn_configs, serving
from autotune.check.judge import Binaries
from autotune.cuda import compile
from autotune.check.checkers import checker_of
from autotune.check.numerics import bits, empty
from autotune.core.problem import Problem
from autotune.check.verify import runner

RUNS, CONFIGS = 1000, 2
KIND = "mixed"
NOISE_FLOATS = 1 << 24  # what the other stream reads and writes at most: 128 MB, about 40 us of an H200
POISON = 0xFF

PROBLEMS = (
    "forward-bf16-b2-h4x2-q777-k1001-d64",
    "forward-bf16-b1-h8x2-q1023-k1023-d128-causal",
    "forward-fp16-b1-h16x2-q2000-k2000-d64-causal-left127-sinks",
    "forward-bf16-b1-h32x8-q4096-k4096-d128-causal",
    "forward-bf16-b1-h8x1-q512-k3000-d192x128-causal",
    "forward-fp16-b3-h6x3-q300-k500-d256-causal-softcap30",
    "forward-bf16-b2-h10x2-q500-k700-d96-causal-alibi",
    "forward-bf16-b5-h8x2-q700-k900-d128-causal-varlen",
    "forward-bf16-b5-h8x2-q300-k2000-d128-causal-page16",
    "decode-bf16-b1-h8x1-q1-k65536-d128",
    "decode-bf16-b3-h16x4-q4-k5000-d64-causal",
    "decode-fp16-b8-h28x4-q1-k9000-d128-page16",
    "decode-bf16-b2-h32x8-q1-k20000-d128-page64-kve4m3",
    "decode-bf16-b2-h64x8-q2-k3000-d64-causal-left127-sinks",
    "backward-bf16-b2-h8x2-q1023-k1023-d128-causal-sinks-deterministic",
    "backward-fp16-b1-h16x2-q2000-k2000-d64-causal-left127-deterministic",
    "backward-bf16-b5-h8x2-q700-k900-d128-causal-varlen-deterministic",
    "backward-bf16-b1-h4x4-q800-k700-d256-softcap30-deterministic",
)


def main() -> int:
    parser = _result.parser(__doc__, "repeatability-h200.yaml")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"launches of each config ({RUNS})")
    parser.add_argument("--configs", type=int, default=CONFIGS,
                        help=f"random configs of each kernel beside its default ({CONFIGS})")
    options = parser.parse_args()
    gpu = _result.gpu_at_hand()
    rows, unserved = {}, []
    binaries = Binaries(gpu, max(1, len(os.sched_getaffinity(0)) - 1))
    todo = []
    for problem in map(Problem.parse, PROBLEMS):
        case = Case(problem, "packed")
        kernels = serving(case, gpu)
        configs = [kernel.default(problem, gpu) for kernel in kernels]
        configs += [config for kernel in kernels for config in drawn_configs(kernel, case, gpu, options.configs, 0)]
        todo.append((problem, [(config, binaries.submit(problem.static, config)) for config in configs]))
        unserved += [] if kernels else [problem.text]
    for problem, configs in todo:
        rows[problem.text] = row = {}
        for config, future in configs:
            try:
                binary = future.result()
            except compile.CompileError as error:
                print(f"{problem}  {config}: {error}", file=sys.stderr)
                continue
            if compile.flaw(binary) is None:
                row[config.text] = differing(problem, runner(problem, config, binary, 0), options.runs)
        print(f"{problem}  {len(row)} configs, {sum(row.values())} of {len(row) * options.runs} launches differ", flush=True)
    binaries.close()
    launches = sum(map(len, rows.values())) * options.runs
    different = sum(sum(row.values()) for row in rows.values())
    summary = {"problems": len(rows) - len(unserved), "runs": launches, "differing": different}
    _result.write(options.out, gpu, summary, {
        "runs_of_each_config": options.runs, "not_served": unserved,
        "launches_that_differ": {text: row for text, row in rows.items() if row}}, default_flow_style=False, width=1000)
    return 1 if summary["differing"] or not launches else 0


def differing(problem: Problem, run: Callable, runs: int) -> int:
    """How many of `runs` launches wrote other bits than the first; all if the first is wrong."""
    import cupy

    checker = checker_of(problem, [KIND], xp=cupy, sample=64)
    verdict = checker(run)
    if not verdict.ok:
        print(f"{problem}: {verdict.message}", file=sys.stderr)
        return runs
    cupy.cuda.Device().synchronize()  # inputs were made on another stream than launches use
    return repeat(cupy, checker.case(KIND)[0], run, runs)


def repeat(cupy, given, run: Callable, runs: int) -> int:
    """How many of `runs` launches on `given`, `Inputs` or of a backward `GradientInputs`, wrote other bits than the first."""
    stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    noise = cupy.zeros(NOISE_FLOATS, cupy.float32)
    cupy.cuda.Device().synchronize()
    with stream:
        results, words = results_of(cupy, given)
        first: list = []
        count = cupy.zeros((), cupy.int64)
        for n in range(runs):
            if n >= runs // 2:
                with other:  # more or less of it, so that it meets the launch at other moments
                    part = noise[:NOISE_FLOATS >> n % 8]
                    part += 1
            for word in words:
                word.view(cupy.uint8).fill(POISON)
            run(given, *results)
            if first:
                count += sum((word != once).any() for word, once in zip(words, first)) > 0
            else:
                first = [word.copy() for word in words]
    stream.synchronize()
    other.synchronize()
    return int(count)


def results_of(cupy, given) -> tuple[tuple, tuple]:
    """(what a launch is given to write, all of it as integers)"""
    problem = given.problem
    if problem.op == "backward":
        gradients = given.empty_gradients()
        words = [bits(array, problem.dtype) for array in gradients[:3]]
        return (gradients, None), (*words, *([bits(gradients.dsinks, "fp32")] if gradients.dsinks is not None else []))
    outer, rows = given.layout.rows
    out = empty(cupy, (outer, rows, problem.heads_q, problem.head_dim_v), problem.out_dtype)
    lse = cupy.empty((outer, problem.heads_q, rows), cupy.float32)
    return (out, lse), (bits(out, problem.out_dtype), bits(lse, "fp32"))


if __name__ == "__main__":
    sys.exit(main())
