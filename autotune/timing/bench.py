"""Times candidates on the GPU: our kernels and others' libraries by the same code.

    bench = Bench(problem, gpu)
    m = bench.time(Candidate("ours", lambda i: launch_on(bench.sets[i])))
    ms = bench.interleave([ours, theirs], rounds=20)

Caches are cold. Below a millisecond a CUDA graph walks through input sets that together are larger than twice the L2, so
that none is there when its turn comes again, and no launch waits for the host. Above, L2 is flushed before each launch by
*reading* 4 x L2: a flush that writes makes the kernel pay for the write-back, up to 32 % of a short one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable, Iterator, Sequence

from .conditions import conditions, sm_clock_mhz
from ..core.gpu import Gpu
from ..check.gradients import GradientInputs, make_gradient_inputs
from ..check.inputs import Inputs, make_inputs
from ..core.measurement import Measurement, hopeless
from ..check.numerics import empty
from ..core.problem import Problem

GRAPH_BELOW_US = 1000.0
HUGE_SET = 64  # times the L2
MAX_SETS = 512  # tiny problems: below this they fit L2 anyway, as they will in use
REPLAY_US = 1000.0  # a sample lasts about this long: a graph takes 5 to 10 us to begin, which its launches share
WARM_UP_US = 5000.0  # clocks rise within this
MIN_SAMPLES, MAX_SAMPLES = 3, 40
RACE_FACTOR = 1.15  # a candidate whose fastest sample is this much slower than the best is not timed further


@dataclass(frozen=True)
class Candidate:
    """Something to time. `launch(i)` enqueues one call on input set i, on CuPy's current stream, and does not wait.

    It is called once before any capture, so what loads lazily may. A candidate whose library cannot be captured says
    `capturable=False`; its launches are then enqueued one by one behind a flush that hides the host.
    """

    name: str
    launch: Callable[[int], None]
    capturable: bool = True


@dataclass(frozen=True)
class InputSet:
    """Arrays for one call: the `Inputs` and an output, (B, Sq, Hq, Dv) or packed as q is; of a backward its `GradientInputs` and
    `Gradients`."""

    inputs: Inputs | GradientInputs
    out: object


def uses_graph(problem: Problem, gpu: Gpu) -> bool:
    """Whether `problem` is timed by graph. From the roofline, so that all candidates and all runs agree. Decode steps are:
    that is how they run in use."""
    if problem.op == "decode":
        return True
    if problem.dtype == "fp32":
        flops_per_us = gpu.sms * gpu["fma_flops_per_clock_sm"] * gpu["sm_clock_mhz"]
    else:
        flops_per_us = gpu.mma_tflops * 1e6
    bound = max(problem.flops / flops_per_us, problem.compulsory_bytes / (gpu["bandwidth_gb_s"] * 1e3))
    return bound / 0.6 < GRAPH_BELOW_US  # good kernels reach about 60 % of it


def set_count(problem: Problem, gpu: Gpu) -> int:
    """How many input sets are together larger than twice the L2, one in use; 1 where a flush does the work, or where a set is so
    large that what is left of it in L2 is nothing."""
    each = max(1, problem.compulsory_bytes)
    if not uses_graph(problem, gpu) or each > HUGE_SET * gpu["l2_bytes"]:
        return 1
    return min(MAX_SETS, 2 * gpu["l2_bytes"] // each + 2)


class Bench:
    """Input sets, a stream and a flush for one problem on the current device. Everything lives as long as the object."""

    def __init__(self, problem: Problem, gpu: Gpu, seed: int = 0, sequences: Sequence[tuple[int, int]] | None = None):
        """`sequences` are the (queries, keys) of packed ones, if they are not to be those that the problem stands for."""
        import cupy

        self.problem, self.gpu, self.graph = problem, gpu, uses_graph(problem, gpu)
        self.warm_up_us = WARM_UP_US
        count = set_count(problem, gpu)
        self.sets = list((_gradient_sets if problem.op == "backward" else _sets)(problem, count, seed, sequences))
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._flush_source = cupy.zeros(4 * gpu["l2_bytes"] // 16 * 4, cupy.float32)
        self._flush_sink = cupy.zeros(1, cupy.float32)
        cupy.cuda.Device().synchronize()

    @property
    def policy(self) -> str:
        """How times are taken, as it stands in a `Measurement`."""
        return f"graph over {len(self.sets)} input sets" if self.graph else "events after reading 4 x L2"

    def time(self, candidate: Candidate, seconds: float = 0.1, best_us: float | None = None,
             error_ratio: float | None = None) -> Measurement:
        """Times one candidate for about `seconds`, or until it cannot come near `best_us`. Exceptions of the launch pass on."""
        with self.stream:
            sampler = _Sampler(self, candidate)
            samples: list[float] = []
            spent_us = 0.0
            while len(samples) < MAX_SAMPLES and (len(samples) < MIN_SAMPLES or spent_us < seconds * 1e6):
                samples.append(sampler.sample())
                spent_us += samples[-1] * sampler.launches
                if hopeless(samples, best_us, RACE_FACTOR):
                    break
        return _measurement(samples, sampler, error_ratio)

    def interleave(self, candidates: Sequence[Candidate], rounds: int = 15, captures: int = 1) -> list[Measurement]:
        """Times the candidates by turns, in an order that reverses every round, so that heat and clocks are shared fairly.

        The rounds are dealt out to as many `captures`: where blocks come to stand that are launched before others have ended
        may differ between two graphs of the same launches, but not within one (33.7, 38.4 and 39.7 us, of a decode step).
        """
        samples: list[list[float]] = [[] for _ in candidates]
        with self.stream:
            for capture in range(captures):
                samplers = [_Sampler(self, candidate) for candidate in candidates]
                for n in range(capture, rounds, captures):
                    order = range(len(candidates))
                    for i in order if n % 2 == 0 else reversed(order):
                        samples[i].append(samplers[i].sample())
        return [_measurement(taken, sampler, None) for taken, sampler in zip(samples, samplers)]

    def can_capture(self, launch: Callable[[int], None]) -> bool:
        """Whether `launch`, which has run before, can be captured into a graph."""
        with self.stream:
            self.stream.begin_capture()
            try:
                launch(0)
            except Exception:  # some libraries synchronise or allocate
                return False
            finally:
                ended = _end_capture(self.stream)
        return ended

    def flush(self) -> None:
        """Reads 4 x L2 on the current stream."""
        count = self._flush_source.size // 4
        _flush_kernel()((self.gpu.sms * 8,), (256,), (self._flush_source, self._flush_sink, count))


def _sets(problem: Problem, count: int, seed: int, sequences) -> Iterator[InputSet]:
    import cupy

    first = make_inputs(problem, "random", seed, cupy, sequences)
    shape = *first.layout.rows, problem.heads_q, problem.head_dim_v
    for i in range(count):
        inputs = first if i == 0 else replace(first, q=first.q.copy(), k=first.k.copy(), v=first.v.copy())
        yield InputSet(inputs, empty(cupy, shape, problem.out_dtype))


def _gradient_sets(problem: Problem, count: int, seed: int, sequences) -> Iterator[InputSet]:
    import cupy

    given = make_gradient_inputs(problem, "random", seed, cupy, sequences, exact=False)
    for i in range(count):
        if i:
            inputs = replace(given.inputs, **{name: getattr(given.inputs, name).copy() for name in ("q", "k", "v")})
            given = replace(given, inputs=inputs, **{name: getattr(given, name).copy() for name in ("out", "lse", "dout")})
        yield InputSet(given, given.empty_gradients())


def _end_capture(stream) -> bool:
    """Ends a capture; False if it was broken off."""
    try:
        stream.end_capture()
    except RuntimeError:
        return False
    return True


class _Sampler:
    """One candidate made ready: warm, captured if the policy wants it. The bench's stream is current throughout."""

    def __init__(self, bench: Bench, candidate: Candidate):
        from cupy.cuda import Event

        self._bench, self._candidate = bench, candidate
        self._begin, self._end = Event(), Event()
        self._sets = len(bench.sets)
        self.launches, self.policy, self.mhz = 1, bench.policy, None
        self._call = lambda: candidate.launch(0)
        warm = self._elapsed()  # also loads whatever loads lazily
        if bench.graph:
            self.launches = self._sets
            self._call = self._captured() if candidate.capturable else self._enqueue
            self._elapsed()
            warm, rounds = 0.0, round(REPLAY_US / self._elapsed())  # by graph: a library's host must not make its samples shorter
            if rounds > 1:
                self.launches *= rounds
                self._call = self._captured() if candidate.capturable else self._enqueue
            if not candidate.capturable:
                self.policy = f"queue over {self._sets} input sets"
        while warm < bench.warm_up_us:
            warm += max(self._elapsed(), 1.0)

    def sample(self) -> float:
        """Mean time of a launch in microseconds, caches cold."""
        flush = not self._bench.graph or not self._candidate.capturable
        return self._elapsed(flush, ask_clock=self.mhz is None) / self.launches

    def _enqueue(self) -> None:
        for i in range(self.launches):
            self._candidate.launch(i % self._sets)

    def _captured(self) -> Callable[[], None]:
        stream = self._bench.stream
        stream.begin_capture()
        try:
            self._enqueue()
        finally:  # a stream left capturing could not be used again
            graph = stream.end_capture()
        graph.upload(stream)
        return lambda: graph.launch(stream)

    def _elapsed(self, flush: bool = False, ask_clock: bool = False) -> float:
        from cupy.cuda import get_elapsed_time

        if flush:
            self._bench.flush()
        self._begin.record(self._bench.stream)
        self._call()
        self._end.record(self._bench.stream)
        if ask_clock:  # the GPU is at work meanwhile
            self.mhz = sm_clock_mhz()
        self._end.synchronize()
        return get_elapsed_time(self._begin, self._end) * 1e3


def _measurement(samples_us: list[float], sampler: _Sampler, error_ratio: float | None) -> Measurement:
    return Measurement.of_samples(samples_us, policy=sampler.policy, sm_clock_mhz=sampler.mhz, error_ratio=error_ratio,
                                  conditions=conditions())


# Every thread sums what it reads and stores the sum only if it is a number that zeros do not add up to, so no write happens.
FLUSH_SOURCE = r"""
extern "C" __global__ void flush(const float4* source, float* sink, long long count) {
    float sum = 0;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x) {
        const float4 four = source[i];
        sum += four.x + four.y + four.z + four.w;
    }
    if (sum != 0) *sink = sum;
}
"""


@lru_cache(maxsize=1)
def _flush_kernel():
    import cupy

    return cupy.RawKernel(FLUSH_SOURCE, "flush")
