"""The part of `bench` that runs on the GPU: one problem, ours and the peers, on the same memory through torch tensors."""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import cupy
import torch

from . import __version__
from .attention import attention
from .bench import OURS, BenchError, Row, Timing
from .check import compare
from .compile import nvrtc_version
from .gpu import Gpu
from .inputs import Inputs
from .lookup import lookup
from .numerics import array_dtype, bits
from .peers import Peer
from .problem import Problem
from .timing import Bench, Candidate

ROUNDS = 21  # of all candidates by turns
CHECKED_BLOCKS = 256  # (batch, head, 64 rows)
OTHER_RESULT = 8.0  # error / allowed error from which a peer has computed something else, a different mask for example

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measure_row(problem: Problem, peers: Sequence[Peer], gpu: Gpu) -> tuple[Row | None, list[tuple[str, str]]]:
    """The row of `problem`, or None if every peer fails, and (peer, reason) for those that do.

    Raises `BenchError` if our result is wrong, and what `attention` raises.
    """
    problem = problem.simplified()
    bench = Bench(problem, gpu)
    tensors = [_tensors(item.inputs, problem.dtype) for item in bench.sets]
    functions = {OURS: _ours(problem, bench.sets[0].inputs), **{peer.name: peer.make(problem) for peer in peers}}
    with torch.cuda.stream(torch.cuda.ExternalStream(bench.stream.ptr)), torch.no_grad():
        errors, failed = _judge(problem, functions, bench.sets[0].inputs, tensors[0])
        if len(errors) < 2:
            return None, failed
        candidates = [Candidate(name, _launcher(functions[name], tensors)) for name in errors]
        measurements = bench.interleave(candidates, ROUNDS)
    timings = {candidate.name: Timing(m.time_us, m.spread, len(m.samples_us), m.sm_clock_mhz, errors[candidate.name], m.policy)
               for candidate, m in zip(candidates, measurements)}
    match = lookup(problem, gpu)
    return Row(problem, match.config, f"{match.tier}, {match.evidence}", timings.pop(OURS), timings), failed


def _judge(problem: Problem, functions: Mapping[str, Callable], inputs: Inputs, tensors: tuple):
    """(name -> error / allowed error for those that compute `problem`, (name, reason) for those that do not)"""
    errors, failed = {}, []
    for name, function in functions.items():
        try:
            verdict = _check(problem, inputs, function(*tensors))
        except RuntimeError as error:
            if name == OURS:
                raise
            failed.append((name, f"it fails: {str(error).splitlines()[0]}"))
            continue
        if name == OURS and not verdict.ok:
            raise BenchError(f"our result for {problem} is wrong, so it is not timed: {verdict.message}")
        if verdict.worst_ratio <= OTHER_RESULT:
            errors[name] = verdict.worst_ratio
        else:
            failed.append((name, f"it computes something else: {verdict.message}"))
    return errors, failed


def release() -> None:
    """Gives the memory of finished problems back, so that the next one's does not have to fit beside it."""
    cupy.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Versions of whatever takes part."""
    found = {"autotune": __version__, "nvrtc": nvrtc_version(), "cupy": cupy.__version__, "torch": torch.__version__,
             "torch_cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return {name: str(value) for name, value in found.items()}


def _ours(problem: Problem, inputs: Inputs) -> Callable:
    sinks = None if inputs.sinks is None else torch.as_tensor(inputs.sinks, device="cuda")
    options = dict(causal=problem.causal, window=(problem.window_left, problem.window_right), softcap=problem.softcap,
                   sinks=sinks)
    return lambda q, k, v: attention(q, k, v, **options)


def _launcher(function: Callable, tensors: Sequence[tuple]) -> Callable[[int], None]:
    def launch(i: int) -> None:
        function(*tensors[i])

    return launch


def _tensors(inputs: Inputs, dtype: str) -> tuple:
    """q, k and v as torch tensors over the same memory."""
    signed = cupy.int32 if dtype == "fp32" else cupy.int16  # torch reads no bfloat16 from an array interface
    return tuple(torch.as_tensor(bits(array, dtype).view(signed), device="cuda").view(TORCH_DTYPES[dtype])
                 for array in (inputs.q, inputs.k, inputs.v))


def _check(problem: Problem, inputs: Inputs, out: torch.Tensor):
    """The verdict on torch's `out` (B, Sq, Hq, Dv)."""
    torch.cuda.current_stream().synchronize()
    signed = torch.int32 if problem.out_dtype == "fp32" else torch.int16
    array = cupy.asarray(out.contiguous().view(signed)).view(array_dtype(problem.out_dtype))
    return compare(problem, inputs, array, blocks=CHECKED_BLOCKS)
