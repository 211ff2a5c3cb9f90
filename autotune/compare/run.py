"""The part of `bench` that runs on the GPU: one problem, ours and the peers, on the same memory.

With torch everything is called on torch tensors, as its users do; without it there are no peers, and ours takes CuPy arrays.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Callable, Mapping, Sequence

import cupy

from .. import __version__
from ..calls.dense import attention, prepare
from ..calls.plans import match_of
from .comparison import OURS, Row, Timing
from .gradients import measure_backward
from ..check.verdict import Verdict, compare
from ..cuda.compile import nvrtc_version
from ..core.config import Config
from ..core.gpu import Gpu
from ..check.inputs import Inputs
from ..calls.kvcache import attention_with_kvcache
from ..check.numerics import array_dtype, bits
from .peers import Peer
from ..core.problem import DTYPE_BYTES, Problem
from ..timing.readfloor import readers
from ..check.reference import expect, sampled_blocks
from ..timing.bench import Bench, Candidate
from ..calls.varlen import attention_varlen

try:
    import torch
except ImportError:
    torch = None

RUNS = 3  # a time is the median of this many runs, each the median of its rounds
ROUNDS = 15  # of all candidates by turns, in a run; fewer where one takes long
RUN_US = 1e6  # that a run should last at most
LEAST_ROUNDS = 5
CHECKED_BLOCKS = 256  # (batch, head, 64 rows)
OTHER_RESULT = 8.0  # error / allowed error from which a peer has computed something else, a different mask for example

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "e4m3": "float8_e4m3fn"}
READ = "read "  # candidates that only read begin with it


def get_ready(problems: Sequence[Problem], peers: Sequence[Peer]) -> None:
    """Compiles our kernels in threads; meanwhile peers that compile their own are called once on each problem.

    Failures are left for the row of their problem to meet again, so that one does not cost the others.
    """
    with ThreadPoolExecutor() as pool:
        ours = [pool.submit(prepare, problem) for problem in problems]
        for problem in problems:
            for peer in peers:
                if peer.reject(problem) is None and problem.kv == "dense":
                    _call_once(peer, problem)
        for future in ours:
            future.exception()
    release()


def _call_once(peer: Peer, problem: Problem) -> None:
    served, _ = peer.serves(problem)
    dtype = getattr(torch, TORCH_NAMES[problem.dtype])
    shapes = [(problem.batch, length, heads, width) for length, heads, width in (
        (problem.seqlen_q, problem.heads_q, problem.head_dim), (problem.seqlen_k, problem.heads_kv, problem.head_dim),
        (problem.seqlen_k, problem.heads_kv, problem.head_dim_v))]
    sinks = torch.zeros(problem.heads_q, device="cuda") if served.sinks else None
    try:
        with torch.no_grad():
            peer.make(served, sinks, {})(*(torch.zeros(shape, dtype=dtype, device="cuda") for shape in shapes))
    except Exception:
        pass


def measure_row(problem: Problem, peers: Sequence[Peer], gpu: Gpu,
                sequences: Sequence[tuple[int, int]] | None = None,
                config: Config | None = None) -> tuple[Row | None, list[tuple[str, str]]]:
    """The row of `problem` and (who, reason) for those that are not in it: without a row, ours is among them. `sequences` are the
    (queries, keys) of packed ones, if they are not to be those that the problem stands for; `config` is what runs instead of what
    lookup chooses, not of a backward.

    Raises what `attention` raises.
    """
    if problem.op == "backward":
        return measure_backward(problem, peers, gpu, sys.modules[__name__])
    match = prepare(problem)[0] if config is None else match_of(problem, config, gpu)
    bench = Bench(problem, gpu, sequences=sequences)
    inputs = bench.sets[0].inputs
    arrays = [_arrays(item.inputs) for item in bench.sets]
    with _stream(bench.stream):
        _round_sinks(inputs)
        functions, notes, verdicts, failed = _judge(problem, peers, inputs, arrays[0], config)
        if not verdicts[OURS].ok:
            return None, [(OURS, f"our result is wrong: {verdicts[OURS].message}"), *failed]
        peaks = {name: _peak_bytes(functions[name], arrays[0]) for name in functions}
        candidates = [_candidate(bench, name, _launcher(function, arrays)) for name, function in functions.items()]
        if problem.op == "decode":
            reads = readers(problem, [item.inputs for item in bench.sets], gpu.sms)
            candidates += [Candidate(f"{READ}{n}", read) for n, read in enumerate(reads)]
        rounds = _rounds(problem, gpu, len(candidates))
        runs = []
        for n in range(RUNS):
            order = candidates if n % 2 == 0 else candidates[::-1]
            runs.append(dict(zip((candidate.name for candidate in order), bench.interleave(order, rounds))))
    used = sum(array.nbytes for array in (inputs.q, inputs.k, inputs.v))
    timings = {name: _timing([run[name] for run in runs], verdicts[name].worst_ratio, used + peaks[name], notes.get(name, ""))
               for name in functions}
    return Row(problem, match.config, f"{match.tier}, {match.evidence}", timings.pop(OURS), timings, match.why,
               _fastest_read(runs)), failed


def _fastest_read(runs: Sequence[Mapping]) -> Timing | None:
    """Of the kernels that only read, if there were any."""
    names = [name for name in runs[0] if name.startswith(READ)]
    return min((_timing([run[name] for run in runs], 0.0, 0, "") for name in names), key=lambda read: read.time_us, default=None)


def _judge(problem: Problem, peers: Sequence[Peer], inputs: Inputs, arrays: tuple, config: Config | None):
    """(functions, notes, verdicts) by name of those that compute `problem`, and (name, reason) for those that do not."""
    expected: dict[Problem, object] = {}

    def verdict(served: Problem, function: Callable) -> Verdict:
        if served not in expected:
            chosen = inputs if served == problem else replace(inputs, problem=served, sinks=None)
            expected[served] = expect(chosen, sampled_blocks(inputs.layout, CHECKED_BLOCKS, 0))
        cupy.cuda.get_current_stream().synchronize()
        return compare(served, expected[served].inputs, _as_cupy(function(*arrays), served), expected=expected[served])

    functions = {OURS: _ours(problem, inputs, config)}
    verdicts, notes, failed = {OURS: verdict(problem, functions[OURS])}, {}, []
    for peer in peers:
        served, note = peer.serves(problem)
        try:
            function = peer.make(served, _as_torch(inputs.sinks, "fp32") if served.sinks else None, _places(inputs))
            judged = verdict(served, function)
        except Exception as error:  # another library's: whatever it raises, it does not take part
            failed.append((peer.name, f"it fails: {(str(error).strip() or type(error).__name__).splitlines()[0]}"))
            continue
        if judged.worst_ratio <= OTHER_RESULT:
            functions[peer.name], verdicts[peer.name], notes[peer.name] = function, judged, note
        else:
            failed.append((peer.name, f"it computes something else: {judged.message}"))
    return functions, notes, verdicts, failed


def _timing(runs: Sequence, error_ratio: float, peak_bytes: int, note: str) -> Timing:
    """One library's runs as one `Timing`."""
    times = [run.time_us for run in runs]
    clocks = [run.sm_clock_mhz for run in runs if run.sm_clock_mhz]
    return Timing(median(times), max(run.spread for run in runs), sum(len(run.samples_us) for run in runs),
                  int(median(clocks)) if clocks else None, error_ratio, runs[0].policy, tuple(times), peak_bytes, note)


def _rounds(problem: Problem, gpu: Gpu, candidates: int) -> int:
    """Rounds of a run: all of them, unless they would take longer than `RUN_US` at 60 % of the roofline."""
    each = gpu.roofline_us(problem.flops, problem.compulsory_bytes, problem.dtype != "fp32") / 0.6
    return min(ROUNDS, max(LEAST_ROUNDS, int(RUN_US / (each * candidates))))


def release() -> None:
    """Gives the memory of finished problems back, so that the next one's does not have to fit beside it."""
    cupy.get_default_memory_pool().free_all_blocks()
    if torch:
        torch.cuda.empty_cache()


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Versions of whatever takes part."""
    found = {"autotune": __version__, "nvrtc": nvrtc_version(), "cupy": cupy.__version__}
    if torch:
        found |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    found |= {peer.name: peer.version() for peer in peers if peer.module != "torch"}
    return {name: str(value) for name, value in found.items()}


# Arrays: torch tensors over CuPy's memory, or CuPy arrays where there is no torch.


@contextmanager
def _stream(stream):
    """Makes `stream` current for torch too."""
    if torch is None:
        with stream:
            yield
    else:
        with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)), torch.no_grad():
            yield


def _arrays(inputs: Inputs) -> tuple:
    """q, k and v to call with."""
    dtypes = inputs.problem.dtype, inputs.problem.kv_dtype, inputs.problem.kv_dtype
    arrays = inputs.q, inputs.k, inputs.v
    return tuple(array if torch is None else _as_torch(array, dtype) for array, dtype in zip(arrays, dtypes))


def _places(inputs: Inputs) -> dict[str, object]:
    """Where packed queries and keys begin and where the keys of a paged cache stand, by the names that calls have for it; nothing
    for full sequences side by side."""
    layout, problem = inputs.layout, inputs.problem
    arrays = {}
    if layout.table is not None:
        arrays |= {"cache_seqlens": layout.device_lengths(), "page_table": layout.table}
    if problem.packed:
        arrays["cu_seqlens_q"] = layout.device_starts("query")
    if problem.kv == "varlen":
        arrays["cu_seqlens_k"] = layout.device_starts("key")
    if torch is not None:
        arrays = {name: torch.as_tensor(array, device="cuda") for name, array in arrays.items()}
    longest = {"max_seqlen_q": int(layout.queries.max())} if problem.packed else {}
    return arrays | longest | ({"max_seqlen_k": int(layout.lengths.max())} if problem.kv == "varlen" else {})


def _as_torch(array, dtype: str):
    """A torch tensor over `array`'s memory; torch reads neither bfloat16 nor 8-bit floats from an array interface."""
    word = {4: cupy.int32, 2: cupy.int16, 1: cupy.uint8}[DTYPE_BYTES[dtype]]
    return torch.as_tensor(bits(array, dtype).view(word), device="cuda").view(getattr(torch, TORCH_NAMES[dtype]))


def _as_cupy(out, problem: Problem):
    """`out` (B, Sq, Hq, Dv), or packed as q is, complete, as a CuPy array."""
    cupy.cuda.get_current_stream().synchronize()
    if torch is None:
        return out
    signed = torch.int32 if DTYPE_BYTES[problem.out_dtype] == 4 else torch.int16
    return cupy.asarray(out.contiguous().view(signed)).view(array_dtype(problem.out_dtype))


def _round_sinks(inputs: Inputs) -> None:
    """Sinks that are bfloat16 values, the only ones that every library takes."""
    if inputs.sinks is not None:
        word = inputs.sinks.view(cupy.uint32)
        word &= cupy.uint32(0xFFFF0000)


def _ours(problem: Problem, inputs: Inputs, config: Config | None) -> Callable:
    sinks, slopes, k_scale, v_scale = (
        array if torch is None or array is None else _as_torch(array, "fp32")
        for array in (inputs.sinks, inputs.alibi_slopes, inputs.k_scales, inputs.v_scales))
    options = dict(**problem.bounds.arguments, softcap=problem.softcap,
                   sinks=sinks, alibi_slopes=slopes, config=config)
    options |= _places(inputs)
    if problem.kv == "varlen":
        return lambda q, k, v: attention_varlen(q[0], k[0], v[0], **options)[None]
    if problem.op == "decode" or problem.kv == "paged":
        options |= dict(k_scale=k_scale, v_scale=v_scale)
        if problem.packed:
            return lambda q, k, v: attention_with_kvcache(q[0], k, v, **options)[None]
        return lambda q, k, v: attention_with_kvcache(q, k, v, **options)
    return lambda q, k, v: attention(q, k, v, **options)


def _candidate(bench: Bench, name: str, launch: Callable[[int], None]) -> Candidate:
    """A graph is captured only where times are taken by graph, and only of libraries that allow it."""
    return Candidate(name, launch, not bench.graph or bench.can_capture(launch))


def _launcher(function: Callable, arrays: Sequence[tuple]) -> Callable[[int], None]:
    def launch(i: int) -> None:
        function(*arrays[i])

    return launch


class _Peak(cupy.cuda.MemoryHook):
    """Most bytes that CuPy's pool had handed out at once, beyond those at the start."""

    name = "peak"

    def __init__(self):
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def malloc_postprocess(self, **event):
        self._sizes[event["mem_ptr"]] = event["mem_size"]
        self.now += event["mem_size"]
        self.peak = max(self.peak, self.now)

    def free_preprocess(self, **event):
        self.now -= self._sizes.pop(event["mem_ptr"], 0)


def _peak_bytes(function: Callable, arrays: Mapping) -> int:
    """Device memory that one warm call allocates at most at once, its output included."""
    if torch is None:
        with _Peak() as hook:
            function(*arrays)
        return hook.peak
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(*arrays)
    return torch.cuda.max_memory_allocated() - before
