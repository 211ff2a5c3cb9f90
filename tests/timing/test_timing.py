"""The rules of timing that need no GPU, and, where there is one, that caches really are cold."""

import numpy as np
import pytest

from autotune.timing import bench as timing
from autotune.core.gpu import by_name, catalogue
from autotune.core.problem import Problem

H200 = by_name("nvidia-h200")
SHORT = Problem.parse("forward-bf16-b1-h32x8-q1024-k1024-d128-causal")
LONG = Problem.parse("forward-bf16-b1-h64x8-q65536-k65536-d64")


class FakeSampler:
    """Takes its samples from a list, and logs whose turn it was."""

    log = []

    def __init__(self, bench, candidate):
        self.name, self.samples = candidate.name, candidate.launch(0)
        self.launches, self.policy, self.mhz = 10, bench.policy, 1980

    def sample(self):
        self.log.append(self.name)
        return next(self.samples)


@pytest.fixture
def bench(monkeypatch):
    bench = object.__new__(timing.Bench)
    bench.problem, bench.gpu, bench.graph, bench.sets = SHORT, H200, True, [None, None]
    bench.stream = __import__("contextlib").nullcontext()
    monkeypatch.setattr(timing, "_Sampler", FakeSampler)
    monkeypatch.setattr(timing, "conditions", lambda: {"nvrtc": "13.0.88"})
    FakeSampler.log = []
    return bench


def candidate(name, samples):
    return timing.Candidate(name, lambda _: iter(samples))


def test_policy_depends_on_the_problem_alone():
    assert timing.uses_graph(SHORT, H200) and not timing.uses_graph(LONG, H200)
    assert timing.set_count(LONG, H200) == 1


def test_sets_exceed_twice_the_l2():
    for gpu in catalogue().values():
        count = timing.set_count(SHORT, gpu)
        if timing.uses_graph(SHORT, gpu):
            assert (count - 1) * SHORT.compulsory_bytes > 2 * gpu["l2_bytes"]
    assert timing.set_count(Problem.parse("forward-bf16-b1-h1x1-q1-k16-d64"), H200) == timing.MAX_SETS
    assert timing.set_count(Problem(seqlen_q=0, seqlen_k=0), H200) == timing.MAX_SETS


def test_time_stops_at_its_budget(bench):
    m = bench.time(candidate("a", [100.0] * 1000), seconds=0.01, error_ratio=0.5)
    assert m.ok and m.time_us == 100.0 and len(m.samples_us) == 10 and m.error_ratio == 0.5
    assert m.policy == "graph over 2 input sets" and m.sm_clock_mhz == 1980 and m.conditions == {"nvrtc": "13.0.88"}
    assert len(bench.time(candidate("a", [100.0] * 1000), seconds=0).samples_us) == timing.MIN_SAMPLES
    assert len(bench.time(candidate("a", [1.0] * 1000), seconds=9).samples_us) == timing.MAX_SAMPLES


def test_time_gives_up_on_the_hopeless(bench):
    assert len(bench.time(candidate("a", [200.0] * 9), seconds=1, best_us=100.0).samples_us) == 2
    assert len(bench.time(candidate("a", [300.0, 101.0] + [300.0] * 9), seconds=0.02, best_us=100.0).samples_us) > 2


def test_interleave_takes_turns_and_reverses(bench):
    a, b, c = bench.interleave([candidate(n, [t] * 9) for n, t in (("a", 1.0), ("b", 2.0), ("c", 3.0))], rounds=3)
    assert "".join(FakeSampler.log) == "abccbaabc"
    assert (a.time_us, b.time_us, c.time_us) == (1.0, 2.0, 3.0) and len(b.samples_us) == 3


def test_rounds_are_dealt_out_to_captures(bench):
    """Three graphs of one candidate, of which two are slow: none of them decides alone."""
    graphs = iter([[33.0] * 9, [39.0] * 9, [38.0] * 9])
    measured, = bench.interleave([timing.Candidate("a", lambda _: iter(next(graphs)))], rounds=9, captures=3)
    assert measured.samples_us == (33.0,) * 3 + (39.0,) * 3 + (38.0,) * 3 and measured.time_us == 38.0


def test_our_own_kernels_compile():
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    from autotune.timing import readfloor
    from autotune.check.numerics import PRODUCT_SOURCE

    entries = {timing.FLUSH_SOURCE: ("flush",), PRODUCT_SOURCE: ("product_f32", "product_f64"), readfloor.SOURCE: ("read_cache",)}
    for source, names in entries.items():
        program = nvrtc.createProgram(source, "source.cu", (), ())
        nvrtc.compileProgram(program, ("-arch=sm_90", "--std=c++17"))
        ptx = nvrtc.getPTX(program)
        assert all(f".entry {name}".encode() in ptx for name in names)


def test_decode_steps_of_any_size_are_timed_by_graph():
    for text, sets in (("b1-h32x8-q1-k4096-d128", 9), ("b64-h32x8-q1-k8192-d128", 2), ("b128-h32x8-q1-k65536-d128", 1)):
        problem = Problem.parse(f"decode-bf16-{text}")
        assert timing.uses_graph(problem, H200) and timing.set_count(problem, H200) == sets


@pytest.mark.gpu
def test_bench_reads_memory_cold():
    import cupy

    from autotune.core.gpu import detect

    gpu = detect()
    problem = Problem.parse("forward-bf16-b1-h8x8-q4096-k4096-d128")  # 3 x 8 MB are read and written: one set stays in L2
    bench = timing.Bench(problem, gpu)
    add = cupy.ElementwiseKernel("uint64 x, uint64 y", "uint64 z", "z = x + y", "add_words")

    def launch(i):
        x = bench.sets[i].inputs
        add(x.q.view(cupy.uint64), x.k.view(cupy.uint64), bench.sets[i].out.view(cupy.uint64))

    alone = timing.Bench(problem, gpu)
    alone.sets = alone.sets[:1]
    cold, queued = bench.interleave([timing.Candidate("a", launch), timing.Candidate("b", launch, capturable=False)])
    warm = alone.time(timing.Candidate("warm", launch))
    assert cold.ok and queued.ok and queued.policy.startswith("queue")
    assert warm.time_us < cold.time_us and cold.time_us > 24e6 / gpu["bandwidth_gb_s"] / 1e3
    words = cupy.asnumpy(bench.sets[1].out.view(cupy.uint64))
    q, k = (cupy.asnumpy(a.view(cupy.uint64)) for a in (bench.sets[1].inputs.q, bench.sets[1].inputs.k))
    assert np.array_equal(words, q + k)


@pytest.mark.gpu
def test_events_policy():
    import cupy

    from autotune.core.gpu import detect

    bench = timing.Bench(Problem.parse("forward-bf16-b1-h32x8-q16384-k16384-d128"), detect())
    assert not bench.graph and len(bench.sets) == 1
    out, q = (a.view(cupy.uint16) for a in (bench.sets[0].out, bench.sets[0].inputs.q))
    m = bench.time(timing.Candidate("copy", lambda i: cupy.copyto(out, q)), seconds=0.01)
    assert m.ok and m.policy == "events after reading 4 x L2" and "nvrtc" in m.conditions
