"""How much does the simulator see? Every barrier, wait, fence, commit and parity of each kernel is removed or flipped in
turn, and each such mutant is simulated on a few small problems until something is found.

    python benchmarks/simulator_mutants.py [KERNEL ...] [--jobs N] [--out FILE]

Writes the share that was caught, and each survivor with the reason why it may survive. Exit code 1 if a survivor has none.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import yaml

from autotune import kernels, simulator
from autotune.core.config import Config
from autotune.core.gpu import by_name
from autotune.core.problem import Problem

RESULTS = Path(__file__).parent / "results" / "simulator-mutants.yaml"
GPU = "nvidia-h200"
SEEDS = (0, 1, 2, 4)  # early, late and mixed landings, both ends of the arrays, three scheduling quanta
KINDS = ("random", "masked_nan")
TIMEOUT_S = 60

# What each kernel is run with: together these take every branch that a barrier stands in.
CASES: dict[str, tuple[tuple[str, dict], ...]] = {
    "forward_simt": (
        ("forward-bf16-b1-h2x1-q70-k200-d40-causal", dict(num_warps=4, rows_per_warp=8)),
        ("forward-fp32-b1-h1x1-q70-k131-d24-left40-right8", dict(num_warps=2, rows_per_warp=4)),
        ("forward-bf16-b3-h2x1-q70-k90-d40-causal-varlen", dict(num_warps=4, rows_per_warp=4)),
    ),
    "forward_mma": (
        ("forward-bf16-b1-h2x1-q100-k300-d64-causal", dict(block_m=64, num_warps=4, block_n=48, num_stages=2)),
        ("forward-bf16-b1-h1x1-q100-k300-d64", dict(block_m=64, num_warps=4, block_n=48, num_stages=1)),
        ("forward-fp16-b1-h2x1-q100-k300-d64-causal", dict(block_m=128, num_warps=8, block_n=48, num_stages=3, overlap=True)),
        ("forward-bf16-b1-h1x1-q150-k300-d40-left60-right8",
         dict(block_m=64, num_warps=4, block_n=32, num_stages=1, q_in_registers=True)),
        ("forward-bf16-b1-h2x1-q100-k300-d64",
         dict(block_m=128, num_warps=4, block_n=32, num_stages=2, q_in_registers=True, overlap=True)),
        ("forward-fp16-b1-h2x1-q100-k300-d64-causal-alibi", dict(block_m=64, num_warps=4, block_n=48, num_stages=2, turing=True)),
        ("forward-bf16-b3-h2x1-q100-k150-d40-causal-page16", dict(block_m=64, num_warps=4, block_n=48, num_stages=2)),
    ),
    "forward_wgmma": (
        ("forward-bf16-b1-h2x1-q150-k300-d64-causal",
         dict(num_warpgroups=2, block_n=64, num_stages=2, overlap=True, ping_pong=True)),
        ("forward-fp16-b1-h3x1-q260-k300-d64-left60-right8",
         dict(num_warpgroups=2, block_n=48, num_stages=2, overlap=True, ping_pong=False, persistent=True, block_heads=2,
              q_stages=1)),
        ("forward-bf16-b1-h4x2-q200-k300-d40-causal",
         dict(num_warpgroups=3, block_n=48, num_stages=2, overlap=False, ping_pong=True, persistent=True, q_stages=2)),
        ("forward-bf16-b1-h3x1-q90-k300-d64-causal",  # splits without a key among them
         dict(num_warpgroups=1, block_n=64, num_stages=2, overlap=True, ping_pong=False, persistent=True, q_stages=1,
              block_heads=2, split_keys=True, num_splits=6)),
        ("forward-bf16-b4-h4x2-q150-k150-d40-causal-varlen",
         dict(num_warpgroups=2, block_heads=2, block_n=48, num_stages=2, q_stages=2, persistent=True)),
        ("forward-fp16-b3-h2x1-q100-k300-d64-causal-left60-page16",
         dict(num_warpgroups=2, block_heads=1, block_n=48, num_stages=2, q_stages=1, overlap=True, persistent=False)),
    ),
    "decode_mma": (
        ("decode-bf16-b2-h8x1-q3-k500-d64-causal-page16",
         dict(block_m=16, block_n=16, num_warps=2, num_stages=2, q_in_registers=True, pieces=64, last_block_merges=True,
              speculative_start=False)),
        ("decode-bf16-b3-h8x2-q1-k300-d64-page16",  # guesses that come out wrong
         dict(block_m=16, block_n=16, num_warps=2, num_stages=2, q_in_registers=False, pieces=64, last_block_merges=True,
              speculative_start=True, prefetch_tiles=1)),
        ("decode-fp16-b2-h10x2-q4-k600-d40-left300",
         dict(block_m=32, block_n=32, num_warps=4, num_stages=3, q_in_registers=False, pieces=96, last_block_merges=False)),
        ("decode-bf16-b1-h16x1-q1-k640-d16-causal",  # splits whose statistics reach over the ticket's place
         dict(block_m=16, block_n=16, num_warps=1, num_stages=2, q_in_registers=False, pieces=512, last_block_merges=True)),
        ("decode-bf16-b2-h8x2-q2-k200-d40-causal",
         dict(block_m=16, block_n=16, num_warps=2, num_stages=2, q_in_registers=True, pieces=64, cluster_merges=True)),
        ("decode-fp16-b2-h16x2-q1-k500-d64-page16-kve4m3",  # two heads side by side, converted queries in shared memory
         dict(block_m=16, block_heads_kv=2, block_n=16, num_warps=4, num_stages=2, q_in_registers=False, pieces=64,
              last_block_merges=True)),
    ),
    "backward_mma": (
        ("backward-bf16-b1-h2x1-q100-k150-d64-causal-sinks", dict(key_rows=64, key_queries=32, key_stages=2, query_rows=64,
                                                                  query_keys=32, query_stages=2)),
        ("backward-fp16-b2-h2x1-q90-k90-d80-left20-varlen", dict(key_rows=64, key_queries=32, column_parts=2, key_stages=1,
                                                                 query_rows=64, query_keys=32, query_stages=1)),
    ),
    "backward_wgmma": (
        ("backward-bf16-b1-h2x1-q150-k200-d64-causal-sinks", dict(key_groups=2, key_queries=48, query_groups=2, query_keys=64)),
        ("backward-fp16-b2-h2x1-q90-k90-d128-left20-varlen", dict(key_groups=2, key_queries=32, roles=2, query_groups=1,
                                                                  query_keys=48, ahead=1)),
    ),
    "backward_fused": (
        ("backward-bf16-b1-h2x1-q200-k300-d64-causal-sinks", dict(key_groups=2, dq_parts=1, key_stages=2)),
        ("backward-fp16-b2-h2x1-q190-k190-d80-left20", dict(key_groups=2, dq_parts=2, key_stages=1, ahead=0)),
    ),
}

# What holds for all cases of a kernel that do not say otherwise, in place of its default for the problem.
PLAIN: dict[str, dict] = {"forward_wgmma": dict(block_heads=1, min_blocks_per_sm=1)}

# Mutants that no run can tell from the original, by (part of the operation, part of the line).
REASONS: dict[tuple[str, str], str] = {
    ("sync_warp removed", "falls behind by a round"):
        "lanes that only wait: here each of them runs often enough, which a GPU does not promise",
    ("named_barrier_sync", "auto take_turn"): "turns only say who multiplies first; no result depends on that",
    ("sync_warp removed", "sync_warp();"):
        "before a ring's buffer is filled again: ldmatrix and mma, by which it was read, are done by all lanes as one",
}

FUNCTION = re.compile(r"^ *(?:template <[^>]*> )?"
                      r"(?:DEVICE [^(]*?|extern \"C\" __global__ void (?:__launch_bounds__\([^)]*\) )?)(\w+)\(", re.M)

CALLS = ("sync_block", "sync_warp", "copy_async_commit", "copy_async_wait", "close_copies", "wait_for_copies",
         "named_barrier_sync", "named_barrier_arrive",
         "mbarrier_init", "mbarrier_init_fence", "mbarrier_arrive", "mbarrier_arrive_expect", "mbarrier_wait",
         "fence_async_proxy", "wgmma_fence", "wgmma_commit", "wgmma_wait", "tma_store_commit", "tma_store_wait_read",
         "fence_device", "wait_for_dependencies", "sync_cluster", "leave_cluster")


@dataclass(frozen=True)
class Mutant:
    """One change of a template's text. `function`, `line` and `occurrence` find its place in any rendering."""

    operation: str
    function: str  # in which it is: that begins last before it
    line: str  # of the original, stripped
    occurrence: int  # which of several places in the function with that line and operation
    before: str
    after: str

    @property
    def is_declaration(self) -> bool:
        return self.before.startswith("u32 ")


@dataclass
class Outcome:
    mutant: Mutant
    caught_by: str = ""  # kind of the finding, or "wrong result"
    executed: bool = True
    runs: int = 0


def mutants_of(source: str) -> Iterator[tuple[Mutant, str, str]]:
    """Every mutant of a rendered host source, with its text, and a text that breaks off where the mutant would differ.

    Only what comes after the twins is changed.
    """
    begin = source.index("using Element =")
    counts: dict[tuple[str, ...], int] = {}
    functions = [(match.start(), match.group(1)) for match in FUNCTION.finditer(source)]
    for start, end, operation, after in sorted(_edits(source, begin)):
        line = source[source.rfind("\n", 0, start) + 1:source.find("\n", start)].strip()
        function = next(name for begins, name in reversed(functions) if begins < start)
        key = (operation, function, line, after)
        mutant = Mutant(operation, function, line, counts.get(key, 0), source[start:end], after)
        counts[key] = mutant.occurrence + 1
        stop = "" if mutant.is_declaration else f"{source[:start]}(__builtin_trap(), {source[start:end]}){source[end:]}"
        yield mutant, source[:start] + after + source[end:], stop


def _edits(source: str, begin: int) -> Iterator[tuple[int, int, str, str]]:
    """(start, end, operation, replacement) of every place that is mutated."""
    for name in CALLS:
        for match in re.finditer(rf"\b{name}\b(?=[<(])", source[begin:]):
            start = begin + match.start()
            before = source[source.rfind("\n", 0, start) + 1:start]
            if before.lstrip().startswith("//") or before.endswith("DEVICE void "):  # a remark, or its definition
                continue
            opening = source.index("(", start)
            end = _closing(source, opening)
            call, arguments = source[start:end], _arguments(source[opening + 1:end - 1])
            yield start, end, f"{name} removed", "void()"
            for operation, after in _variants(name, call, arguments):
                yield start, end, f"{name} {operation}", after
    for match in re.finditer(r"\b\w*phase \^= 1", source[begin:]):
        yield begin + match.start(), begin + match.end(), "phase not flipped", "void()"
    for match in re.finditer(r"\bu32 \w*phase = 0", source[begin:]):
        yield begin + match.start(), begin + match.end(), "first phase flipped", match.group()[:-1] + "1"


def _variants(name: str, call: str, arguments: list[str]) -> Iterator[tuple[str, str]]:
    if name in ("copy_async_wait", "wait_for_copies", "wgmma_wait"):
        pending = re.match(rf"{name}<(.*?)>\(", call).group(1)
        yield "for one group less", call.replace(f"<{pending}>", f"<({pending}) + 1>", 1)
    if name == "mbarrier_wait":
        yield "for the other parity", f"{name}({arguments[0]}, ({arguments[1]}) ^ 1)"
    if name == "mbarrier_arrive_expect":
        yield "of 16 bytes more", f"{name}({arguments[0]}, {arguments[1]} + 16)"
        yield "of 16 bytes less", f"{name}({arguments[0]}, {arguments[1]} - 16)"
    if name == "mbarrier_init":
        yield "for one arrival more", f"{name}({arguments[0]}, {arguments[1]} + 1)"
    if name == "mbarrier_arrive":
        yield "twice", f"({call}, {call})"
    if name == "named_barrier_sync":
        yield "without waiting", call.replace("named_barrier_sync", "named_barrier_arrive")
        yield "for one warp more", f"{name}({arguments[0]}, {arguments[1]} + WARP_SIZE)"
    if name == "named_barrier_arrive":
        yield "for one warp more", f"{name}({arguments[0]}, {arguments[1]} + WARP_SIZE)"


def _closing(source: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(source)):
        depth += {"(": 1, ")": -1}.get(source[i], 0)
        if depth == 0:
            return i + 1
    raise ValueError("a parenthesis is not closed")


def _arguments(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def cases(kernel: str) -> list[tuple[Problem, Config]]:
    """The kernel's problems and configs; what neither a case nor `PLAIN` says is as in the kernel's default."""
    gpu = by_name(GPU)
    result = []
    for text, values in CASES[kernel]:
        problem = Problem.parse(text)
        searched = kernels.KERNELS[kernel].default(problem, gpu).values
        config = kernels.KERNELS[kernel].config(problem.static, {**searched, **PLAIN.get(kernel, {}), **values})
        if reason := kernels.KERNELS[kernel].illegal(problem.static, config, gpu):
            raise ValueError(f"{config} is illegal for {problem}: {reason}")
        result.append((problem, config))
    return result


def hunt(mutant: Mutant, kernel: str) -> Outcome:
    """Simulates the mutant until something is found. One that nothing finds is looked at again: is its place ever reached?"""
    outcome = Outcome(mutant)
    for number in (1, 2):
        for problem, config in cases(kernel):
            found = next((m for m in mutants_of(simulator.host_source(problem, config)) if m[0] == mutant), None)
            if found is None or not found[number]:
                continue
            for seed, kind in itertools.product(SEEDS, KINDS):
                outcome.runs += number == 1
                verdict = simulator.verify(problem, config, (seed,), (kind,), TIMEOUT_S, source=found[number])
                if not verdict.ok:
                    outcome.caught_by = kind_of(verdict.message) if number == 1 else ""
                    return outcome
    outcome.executed = mutant.is_declaration  # those have no text that breaks off
    return outcome


def kind_of(message: str) -> str:
    """The kind of a finding, or "wrong result", from what a verdict says."""
    finding = re.match(r"(race|uninitialised read|out of bounds|misaligned|deadlock|barrier misuse|register hazard|tickets|"
                       r"dependency|undefined behaviour|crash|timeout|not simulated)\b", message)
    return finding.group() if finding else "wrong result"


def survey(name: str, jobs: int) -> dict:
    """What becomes of a kernel's mutants, as it is written."""
    mutants: dict[Mutant, None] = {}
    for problem, config in cases(name):
        verdict = simulator.verify(problem, config, SEEDS, KINDS)
        if not verdict.ok:
            raise RuntimeError(f"{name} is wrong before any mutation: {problem}: {config}: {verdict.message}")
        mutants.update((mutant, None) for mutant, _, _ in mutants_of(simulator.host_source(problem, config)))
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = [outcome for outcome in pool.map(lambda mutant: hunt(mutant, name), mutants) if outcome.executed]
    caught = Counter(outcome.caught_by for outcome in outcomes if outcome.caught_by)
    survivors = [{"mutant": m.operation, "line": m.line, "reason": reason_of(m)} for m in
                 (outcome.mutant for outcome in outcomes if not outcome.caught_by)]
    print(f"{name}: {caught.total()} of {len(outcomes)} caught", file=sys.stderr)
    return {"mutants": len(outcomes), "caught": caught.total(), "runs": sum(outcome.runs for outcome in outcomes),
            "caught_by": dict(sorted(caught.items())), "survivors": survivors}


def reason_of(mutant: Mutant) -> str:
    return next((why for (operation, part), why in REASONS.items() if operation in mutant.operation and part in mutant.line), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autotune-mutants-") as cache:
        os.environ["AUTOTUNE_CACHE"] = cache
        found = {name: survey(name, args.jobs) for name in args.kernels or kernels.KERNELS}
    total = sum(kernel["mutants"] for kernel in found.values())
    summary = {"mutants": total, "caught_share": round(sum(kernel["caught"] for kernel in found.values()) / total, 4),
               "runs": sum(kernel["runs"] for kernel in found.values()), "seconds": round(time.perf_counter() - started)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/simulator_mutants.py", *args.kernels])
    args.out.write_text(yaml.safe_dump({"summary": summary, "command": command, "kernels": found}, sort_keys=False, width=130))
    print(summary, file=sys.stderr)
    unexplained = [f"{name}: {s['mutant']}: {s['line']}" for name, kernel in found.items() for s in kernel["survivors"]
                   if not s["reason"]]
    for line in unexplained:
        print(f"survives without a reason: {line}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
