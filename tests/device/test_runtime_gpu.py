"""attention() on a real GPU: streams, threads, devices, graphs, other libraries, and what a call costs the host."""

import threading
import time
import warnings

import numpy as np
import pytest
from gpu_arrays import cupy_fixture, problem_of, to_torch, torch_fixture  # noqa: F401 (fixtures)

import autotune
from autotune.calls import plans
from autotune.device import counters
from autotune.device.arrays import AttentionError
from autotune.core.gpu import detect
from autotune.check.inputs import make_inputs
from autotune.calls.plans import UntunedWarning
from autotune.core.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]


def test_torchs_current_stream_is_used(cupy, torch):
    inputs = make_inputs(problem_of(), "random", xp=cupy)
    real, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    wanted = autotune.attention(real, k, v, causal=True)
    late = torch.zeros_like(real)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # 0.1 s: a launch on another stream would see zeros
        late.copy_(real)
        out = autotune.attention(late, k, v, causal=True)
        first = out.clone()
    stream.synchronize()
    assert torch.equal(first, wanted)


def test_cupys_current_stream_is_used(cupy):
    inputs = make_inputs(problem_of(), "random", xp=cupy)
    wanted = autotune.attention(inputs.q, inputs.k, inputs.v, causal=True)
    spin = cupy.RawKernel("""extern "C" __global__ void spin(long long n) {
        long long start = clock64();
        while (clock64() - start < n);
    }""", "spin")
    late = cupy.zeros(inputs.q.shape, "uint16")
    spin((1,), (1,), (np.int64(1),))
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        spin((1,), (1,), (np.int64(200_000_000),))
        late[...] = inputs.q.view("uint16")
        out = autotune.attention(late.view(inputs.q.dtype), inputs.k, inputs.v, causal=True)
        first = out.view("uint16").copy()
        stream.synchronize()
    assert bool((first == wanted.view("uint16")).all())


def test_streams_that_are_destroyed_while_they_work_share_no_counters(cupy):
    """Packed sequences draw their work from counters, and from nothing else that is lent. Each stream is destroyed as soon as its
    launch has been enqueued, so that the next one may get its handle."""
    counters._in_use.clear()  # of other tests: there is room for 1024 streams
    starts = cupy.array([0, 700, 1000, 1900, 2000], "int32")
    q = cupy.random.default_rng(1).standard_normal((2000, 8, 128), dtype="float32").astype("float16")

    def call():
        return autotune.attention_varlen(q, q, q, starts, starts, 900, 900, causal=True)

    wanted, names, results = call(), set(), []
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(300):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            results.append(call())
        names.add(counters.stream_id(stream.ptr))
        del stream
    cupy.cuda.runtime.deviceSynchronize()
    assert len(names) == 300 and None not in names and len(counters._in_use) == 301  # and that of the first call
    assert all(bool((result == wanted).all()) for result in results)


def test_threads_with_their_own_streams(cupy, torch):
    inputs = make_inputs(problem_of(lengths=(200, 333)), "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    wanted = autotune.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    wrong = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(200):
                    if not torch.equal(autotune.attention(q, k, v, causal=True), wanted):
                        wrong.append("differs")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_arrays_of_another_device(cupy, torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    inputs = make_inputs(problem_of(), "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    wanted = autotune.attention(q, k, v, causal=True)
    far = [tensor.to("cuda:1") for tensor in (q, k, v)]
    out = autotune.attention(*far, causal=True)
    assert out.device.index == 1 and torch.cuda.current_device() == 0 and torch.equal(out.to("cuda:0"), wanted)
    with pytest.raises(AttentionError, match="k is on device 1 and q on device 0"):
        autotune.attention(q, far[1], v)


def test_the_forward_is_bitwise_repeatable(cupy, torch):
    inputs = make_inputs(problem_of(lengths=(700, 1500), heads=(8, 2)), "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    out, lse = autotune.attention(q, k, v, causal=True, return_lse=True)
    for _ in range(100):
        again, log = autotune.attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out, again) and torch.equal(lse, log)


# Graphs


def test_a_captured_torch_graph_replays_on_new_data(cupy, torch):
    problem = problem_of(dtype="fp16", lengths=(130, 260), head_dim=96, window_right=0)
    inputs = make_inputs(problem, "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    fresh = torch.randn_like(q)
    autotune.prepare(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = autotune.attention(q, k, v, causal=True, return_lse=True)
    for data in (q.clone(), fresh):
        q.copy_(data)
        graph.replay()
        wanted = autotune.attention(q, k, v, causal=True, return_lse=True)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


def test_capture_of_an_unprepared_kernel_says_what_to_do(cupy, torch):
    q = torch.randn(1, 8, 2, 48, device="cuda", dtype=torch.float16)  # a head dim that no other test here uses
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: the graph is empty
        with pytest.raises(AttentionError, match=r"autotune.prepare\('forward-fp16-b1-h2x2-q8-k8-d48'\)"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                autotune.attention(q, q, q)
    autotune.prepare("forward-fp16-b1-h2x2-q8-k8-d48")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = autotune.attention(q, q, q)
    graph.replay()
    assert torch.equal(out, autotune.attention(q, q, q))


def test_a_captured_cupy_graph_replays(cupy):
    problem = problem_of(lengths=(100, 150), window_right=0)
    inputs = make_inputs(problem, "random", xp=cupy)
    wanted = autotune.attention(inputs.q, inputs.k, inputs.v, causal=True)
    out = cupy.zeros(wanted.shape, "uint16").view(wanted.dtype)
    autotune.prepare(problem.text)
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        autotune.attention(inputs.q, inputs.k, inputs.v, causal=True, out=out)
        graph = stream.end_capture()
        assert not bool(out.view("uint16").any())  # captured, not run
        graph.launch(stream)
        stream.synchronize()
    assert bool((out.view("uint16") == wanted.view("uint16")).all())


# The rest


def test_requires_grad(torch):
    q = torch.randn(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    kv = torch.randn(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert autotune.attention(q, kv, kv).requires_grad and autotune.attention(kv, kv, torch.nn.Parameter(kv)).requires_grad
    with pytest.raises(AttentionError, match="requires grad"):
        autotune.attention_with_kvcache(q, kv, kv)
    with torch.no_grad():
        assert torch.equal(autotune.attention(q, kv, kv, scale=-1.0), autotune.attention(q.detach(), kv, kv, scale=-1.0))
        autotune.attention(torch.nn.Parameter(q), kv, kv, sinks=torch.nn.Parameter(torch.zeros(2, device="cuda")))


def test_bad_torch_arguments(cupy, torch):
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    device = q.cuda()
    for bad, sentence in (((q, q, q), "q is in host memory"), ((device, q, device), "k is on device -1|k is in host memory"),
                          ((device, device, device.half()), "v is torch.float16 and q is torch.bfloat16"),
                          ((device.long(),) * 3, "q is torch.int64; allowed are torch.bfloat16, torch.float16, torch.float32"),
                          ((device, cupy.zeros((1, 8, 2, 64), "float16"), device), "k is a ndarray; it must be an array of"),
                          ((device[0], device, device), "q has shape"), ((device, device, [1]), "v is a list")):
        with pytest.raises(AttentionError, match=sentence):
            autotune.attention(*bad)


class OnlyDlpack:
    """An array of a library that we know nothing of."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **keywords):
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class WithNamespace(OnlyDlpack):
    def __array_namespace__(self):
        return type("Namespace", (), {"from_dlpack": staticmethod(WithNamespace)})


def test_other_libraries_come_in_through_dlpack(cupy):
    inputs = make_inputs(problem_of(), "random", xp=cupy)
    wanted, lse = autotune.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    given = [OnlyDlpack(array) for array in (inputs.q, inputs.k, inputs.v)]
    out = autotune.attention(*given, causal=True)
    assert type(out) is cupy.ndarray and bool((out.view("uint16") == wanted.view("uint16")).all())
    given[0] = WithNamespace(inputs.q)
    out, log = autotune.attention(*given, causal=True, return_lse=True)
    assert type(out) is WithNamespace and bool((log._array == lse).all())
    assert autotune.explain(*given, causal=True).kernel.name in ("forward_wgmma", "forward_mma")


def host_cost(function, sets):
    """Median over rounds of the host's time for one call, in microseconds; the queue is empty when a round begins."""
    started = time.perf_counter()
    for arrays in sets:
        function(*arrays)
    return (time.perf_counter() - started) / len(sets) * 1e6


def test_a_warm_call_costs_the_host_no_more_than_torch_sdpa(torch):
    """Sizes change with every call. Same run, alternating order, the same tensors."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    sets = [tuple(torch.randn(1, 16 + n, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv") for n in range(128)]
    turned = [tuple(tensor.transpose(1, 2) for tensor in arrays) for arrays in sets]
    ours, theirs = [], []
    peers = ((ours, lambda q, k, v: autotune.attention(q, k, v, causal=True), sets),
             (theirs, lambda q, k, v: sdpa(q, k, v, is_causal=True), turned))
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for n in range(40):
            for costs, function, inputs in peers[::1 if n % 2 else -1]:
                torch.cuda.synchronize()
                costs.append(host_cost(function, inputs))
    ours, theirs = np.median(ours[5:]), np.median(theirs[5:])
    print(f"host cost of a call: {ours:.2f} us, torch SDPA {theirs:.2f} us")
    assert ours <= theirs


def test_warm_lookup_takes_under_2_us():
    gpu = detect()
    problems = [Problem(heads_q=8, heads_kv=2, seqlen_q=100 + n, seqlen_k=100 + n, window_right=0) for n in range(500)]
    costs = []
    for _ in range(20):
        started = time.perf_counter()
        for problem in problems:
            autotune.lookup(problem, gpu)
        costs.append((time.perf_counter() - started) / len(problems) * 1e6)
    print(f"warm lookup: {np.median(costs[2:]):.2f} us")
    assert np.median(costs[2:]) < 2


def test_the_warning_is_issued_on_a_real_gpu(torch):
    plans._told.clear()
    plans._plans.clear()
    q = torch.randn(1, 3, 1, 24, device="cuda", dtype=torch.bfloat16)  # not in the database
    with pytest.warns(UntunedWarning, match="autotune tune --problem forward-bf16-b1-h1x1-q3-k3-d24"):
        autotune.attention(q, q, q)
