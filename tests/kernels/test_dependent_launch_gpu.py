"""Programmatic dependent launch on a real GPU: kernels that are in place early wait for what those before them write."""

import re
from dataclasses import replace

import numpy as np
import pytest
from gpu_arrays import cupy_fixture, torch_fixture  # noqa: F401 (fixtures)

import autotune
from autotune.cuda import compile
from autotune.core.gpu import detect
from autotune.check.inputs import make_inputs
from autotune.kernels import KERNELS
from autotune.core.problem import Problem
from autotune.cuda.render import render
from autotune.check.verify import runner, verify

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]

KERNEL = KERNELS["decode_mma"]
DENSE = "decode-bf16-b2-h16x2-q1-k3000-d64"
TEXTS = [DENSE, "decode-bf16-b3-h16x2-q2-k3000-d128-causal-page16"]
MERGERS = pytest.mark.parametrize("last_block_merges", [True, False], ids=["last block", "combine"])
CAPTURED = pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])

# Lets the next kernel begin at once, does nothing for a while, then copies `count` arrays; a job is (from, to, words).
LATE = r"""
extern "C" __global__ void write_late(const long long* jobs, long long count, long long clocks) {
    asm volatile("griddepcontrol.launch_dependents;");
    const long long begin = clock64();
    while (clock64() - begin < clocks) {}
    for (const long long* job = jobs; job < jobs + 3 * count; job += 3)
        for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < job[2]; i += gridDim.x * blockDim.x)
            ((int*)job[1])[i] = ((const int*)job[0])[i];
}"""
CLOCKS = 4_000_000  # about 2 ms: longer than it takes to enqueue what follows


@pytest.fixture(name="gpu")
def fixture_gpu():
    gpu = detect()
    if gpu.arch < 90:
        pytest.skip(f"dependent launch needs compute capability 9.0, the GPU has {gpu.arch / 10}")
    return gpu


class Kernel:
    """decode_mma for `problem` with dependent launch: `run` as `runner` has it, without its waits if so wished."""

    def __init__(self, problem, gpu, last_block_merges, waits=True):
        values = {**KERNEL.default(problem, gpu).values, "dependent_launch": True, "last_block_merges": last_block_merges}
        self.config = KERNEL.config(problem.static, values)
        target = KERNEL.target(gpu)
        source = render(problem.static, self.config, target)
        if not waits:
            begin = source.index("using Element =")
            source = source[:begin] + re.sub(r"wait_for_dependencies\([^;]*\);", ";", source[begin:])
        self.run = runner(problem, self.config, compile.compile_source(source, target), 0)


class Elsewhere:
    """A layout with lengths and page table in other arrays."""

    def __init__(self, layout, lengths, table):
        self._layout, self._lengths, self.table = layout, lengths, table

    def __getattr__(self, name):
        return getattr(self._layout, name)

    def device_lengths(self):
        return self._lengths


class Moved:
    """The arrays of `inputs` once more: `poison` spoils them, `write` fills them in late, on the current stream. They stand where
    those of `into` do, if it is given."""

    def __init__(self, cupy, inputs, into=None):
        layout = inputs.layout
        arrays = [inputs.q, inputs.k, inputs.v, layout.device_lengths(), *([] if layout.table is None else [layout.table])]
        self._copies = into._copies if into else [array.copy() for array in arrays]
        q, k, v, lengths, *table = self._copies
        self.inputs = replace(inputs, q=q, k=k, v=v, layout=Elsewhere(layout, lengths, *(table or [None])))
        jobs = [(array.data.ptr, copy.data.ptr, array.nbytes // 4) for array, copy in zip(arrays, self._copies)]
        self._jobs, self._count = cupy.asarray(jobs, "int64"), len(jobs)
        self._kernel = cupy.RawKernel(LATE, "write_late")

    def poison(self):
        for copy in self._copies:
            spoil(copy)

    def write(self):
        self._kernel((32,), (256,), (self._jobs, self._count, CLOCKS))


def spoil(array):
    array.view("uint8")[...] = 255  # NaN, lengths of -1


def same(a, b):
    return bool((a.view("uint8") == b.view("uint8")).all())


def repeatable(cupy, stream, captured, action):
    """A function that does on `stream` what `action`, which has run before, does: again, or by a replay of its graph."""
    if not captured:
        return action
    stream.begin_capture()
    try:
        action()
    finally:
        graph = stream.end_capture()
    return lambda: graph.launch(stream)


@MERGERS
@pytest.mark.parametrize("text", [*TEXTS, "decode-bf16-b1-h32x8-q1-k4096-d128",
                                  "decode-bf16-b2-h8x2-q2-k777-d128-causal-page16-kve4m3",
                                  "decode-fp16-b70-h8x8-q4-k900-d64-causal-left40-sinks"])
def test_results_are_right(gpu, text, last_block_merges):
    problem = Problem.parse(text)
    result = verify(problem, Kernel(problem, gpu, last_block_merges).config, gpu)
    assert result.ok, result.message


@CAPTURED
@MERGERS
@pytest.mark.parametrize("text", TEXTS)
def test_it_waits_for_a_kernel_that_writes_its_arrays(cupy, gpu, text, last_block_merges, captured):
    problem = Problem.parse(text)
    run = Kernel(problem, gpu, last_block_merges).run
    inputs = make_inputs(problem, "random" if text == DENSE else "needles", 1, cupy)
    wanted, out = inputs.q.copy(), inputs.q.copy()
    run(inputs, wanted, None)
    moved = Moved(cupy, inputs)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        def action():
            moved.write()
            run(moved.inputs, out, None)

        action()
        stream.synchronize()
        again = repeatable(cupy, stream, captured, action)
        for _ in range(5):
            moved.poison()
            spoil(out)
            stream.synchronize()
            again()
            stream.synchronize()
            assert same(out, wanted)


@CAPTURED
def test_without_its_waits_it_comes_too_early(cupy, gpu, captured):
    """So the launches really overlap, and the test above would tell."""
    problem = Problem.parse(DENSE)
    right, early = (Kernel(problem, gpu, True, waits).run for waits in (True, False))
    inputs = make_inputs(problem, "random", 1, cupy)
    wanted, out = inputs.q.copy(), inputs.q.copy()
    right(inputs, wanted, None)
    moved = Moved(cupy, inputs)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        def action():
            moved.write()
            early(moved.inputs, out, None)

        action()
        stream.synchronize()
        again = repeatable(cupy, stream, captured, action)
        moved.poison()
        stream.synchronize()
        again()
        stream.synchronize()
        assert not same(out, wanted)


@pytest.mark.parametrize("where", ["stream", "default stream", "graph"])
@MERGERS
@pytest.mark.parametrize("text", TEXTS)
def test_many_launches_share_workspace_and_tickets(cupy, gpu, text, last_block_merges, where):
    """Each launch's queries are the output of the one before, over caches in turn. All enqueued while the stream is held up."""
    problem = Problem.parse(text)
    kernel, steps = Kernel(problem, gpu, last_block_merges), 150
    sets = [make_inputs(problem, "random", seed, cupy) for seed in range(3)]
    states = [sets[0].q, *(sets[0].q.copy() for _ in range(steps))]
    hold = cupy.RawKernel(LATE, "write_late")
    nothing = cupy.zeros(3, "int64")

    def step(i):
        kernel.run(replace(sets[i % 3], q=states[i]), states[i + 1], None)

    def action():
        hold((1,), (32,), (nothing, 0, 10 * CLOCKS))
        for i in range(steps):
            step(i)

    for i in range(steps):
        step(i)
        cupy.cuda.Device().synchronize()
    wanted = [state.copy() for state in states]
    with cupy.cuda.Stream.null if where == "default stream" else cupy.cuda.Stream(non_blocking=True) as stream:
        action()
        stream.synchronize()
        again = repeatable(cupy, stream, where == "graph", action)
        for _ in range(3):
            for state in states[1:]:
                spoil(state)
            stream.synchronize()
            again()
            stream.synchronize()
            assert [i for i in range(steps + 1) if not same(states[i], wanted[i])] == []
    lse = cupy.zeros((problem.batch, problem.heads_q, problem.seqlen_q), "float32")
    kernel.run(sets[0], states[-1], lse)  # raises if tickets are left


def test_a_graph_that_torch_captures_replays_with_new_inputs(torch, gpu):
    q = torch.randn(4, 1, 16, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(4, 3000, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([3000, 17, 0, 2048], device="cuda", dtype=torch.int32)

    def layers():
        h = q * 1.5
        for _ in range(6):
            k[:, :1] = h[:, :, :2]  # as a step that appends to its cache does
            h = h + autotune.attention_with_kvcache(h, k, v, cache_seqlens=lengths)
        return h

    wanted = layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    graph.replay()
    assert torch.equal(out, wanted)
    q.normal_()
    lengths.copy_(torch.tensor([5, 2999, 1, 640], device="cuda"))
    graph.replay()
    assert torch.equal(out, layers())


@CAPTURED
@pytest.mark.parametrize("text, counts", [("b5-h16x2-q300-k3000-d64-causal-page16", (1, 300, 2, 1, 130)),
                                          ("b40-h16x2-q17-k8000-d128-causal-page64", (1,) * 20 + (17,) + (1,) * 19)],
                         ids=["long chunk", "long decodes"])
def test_a_mixed_batch_waits_for_what_comes_before_and_is_waited_for(cupy, gpu, text, counts, captured):
    """Its two kernels run at the same time; what comes next spoils the arrays that both read."""
    problem = Problem.parse(f"decode-bf16-{text}-packed")
    inputs = make_inputs(problem, "random", 1, cupy)
    layout = inputs.layout
    layout.queries[:] = counts
    layout.query_starts = np.concatenate([[0], np.cumsum(counts)])
    q = make_inputs(Problem.parse(f"forward-bf16-b1-h16x2-q{sum(counts)}-k16-d{problem.head_dim}"), "random", 2, cupy).q
    inputs = replace(inputs, q=q)
    starts = cupy.asarray(layout.query_starts, "int32")

    def call(given, out):
        autotune.attention_with_kvcache(given.q[0], given.k, given.v, cache_seqlens=given.layout.device_lengths(),
                                        page_table=given.layout.table, cu_seqlens_q=starts, max_seqlen_q=max(counts), out=out)

    table = layout.table.copy()
    table[:, :2] = table[:, 1::-1]  # two pages of each sequence change places
    other = replace(inputs, layout=Elsewhere(layout, layout.device_lengths() - 700, table))
    wanted, out = [inputs.q[0].copy() for _ in range(2)], inputs.q[0].copy()
    for given, target in zip((inputs, other), wanted):
        call(given, target)
    assert not same(*wanted)
    moved = [Moved(cupy, inputs)]
    moved.append(Moved(cupy, other, moved[0]))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        def action(which):
            which.write()
            call(which.inputs, out)
            which.poison()

        action(moved[0])
        stream.synchronize()
        again = [repeatable(cupy, stream, captured, lambda which=which: action(which)) for which in moved]
        for n in range(20):  # old lengths and pages, which an SM may still have in its L1, are wrong ones
            spoil(out)
            stream.synchronize()
            again[n % 2]()
            stream.synchronize()
            assert same(out, wanted[n % 2])


def test_a_mixed_batch_and_a_decode_step_after_it_are_captured_on_a_stream_of_torchs_own(torch, gpu):
    """A stream that no call was made on: the one beside it is made within the capture, and the step after comes early."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    counts = (1, 1, 300, 1, 64)
    k, v, q, steps = random(260, 16, 2, 64), random(260, 16, 2, 64), random(sum(counts), 16, 64), random(5, 1, 16, 64)
    table = torch.randperm(260, generator=generator, device="cuda")[:240].to(torch.int32).view(5, 48)
    lengths = torch.tensor([768, 5, 512, 700, 100], dtype=torch.int32, device="cuda")
    starts = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32, device="cuda")

    def both():
        return (autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, cu_seqlens_q=starts,
                                                max_seqlen_q=300),
                autotune.attention_with_kvcache(steps, k, v, cache_seqlens=lengths, page_table=table))

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both()
    for length in (768, 300, 0):
        lengths[0] = length
        for array in got:
            array.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(got, both()))
