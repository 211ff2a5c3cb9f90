"""Keys dealt out to several blocks on a real GPU: right for every number of splits, the same bits every time, in graphs too."""

import numpy as np
import pytest
from gpu_arrays import cupy_fixture, names, problem_of, to_torch, torch_fixture, verdict  # noqa: F401 (fixtures)

import autotune
from autotune.core.gpu import detect
from autotune.check.inputs import make_inputs
from autotune.kernels import KERNELS
from autotune.kernels.forward.splits import NUM_SPLITS
from autotune.database.lookup import lookup
from autotune.check.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]

KERNEL = KERNELS["forward_wgmma"]


@pytest.fixture(autouse=True)
def hopper(cupy):
    gpu = detect()
    if gpu.arch != 90:
        pytest.skip(f"forward_wgmma is for compute capability 9.0, the GPU has {gpu.arch / 10}")
    return gpu


CASES = [
    problem_of(lengths=(300, 2000), window_right=0),
    problem_of(lengths=(300, 100), window_right=0),  # rows that see no key, and more splits than tiles
    problem_of(lengths=(113, 3001), head_dim=128, heads=(12, 2), sinks=True),
    problem_of(dtype="fp16", lengths=(200, 1500), head_dim=72, head_dim_v=200, window_left=700, window_right=0),
    problem_of(lengths=(70, 2500), head_dim=256, window_right=0, softcap=30.0, alibi=True),
]


@pytest.mark.parametrize("problem", CASES, ids=names)
@pytest.mark.parametrize("values", [dict(), dict(persistent=True, block_heads=2, block_n=48)], ids=str)
def test_every_number_of_splits_is_right(hopper, problem, values):
    default = {**KERNEL.default(problem, hopper).values, **values, "split_keys": True}
    for num_splits in NUM_SPLITS[1:]:
        config = KERNEL.config(problem.static, {**default, "num_splits": num_splits})
        assert KERNEL.illegal(problem.static, config, hopper) is None
        result = verify(problem, config, hopper)
        assert result.ok, f"{config}: {result.message}"


# attention() as it is called: defaults split these

SPLIT = [problem_of(batch=1, lengths=(100, 4000), window_right=0),
         problem_of(batch=1, lengths=(256, 8000), head_dim=128, sinks=True)]


@pytest.mark.parametrize("problem", SPLIT, ids=names)
def test_calls_split_and_give_the_same_bits(hopper, cupy, torch, problem):
    config = lookup(problem, hopper).config
    if not config["split_keys"]:
        pytest.skip(f"on {hopper.name} this problem is served by {config}")
    for convert in (lambda array: array, to_torch(torch)):
        result = verdict(problem, cupy, convert)
        assert result.ok, result.message
    inputs = make_inputs(problem, "random", xp=cupy)
    q, k, v, sinks = (to_torch(torch)(array) for array in (inputs.q, inputs.k, inputs.v, inputs.sinks))
    first = autotune.attention(q, k, v, causal=problem.mask == "causal", sinks=sinks, return_lse=True)
    for _ in range(50):
        again = autotune.attention(q, k, v, causal=problem.mask == "causal", sinks=sinks, return_lse=True)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_a_captured_torch_graph_replays_on_new_data(cupy, torch):
    problem = SPLIT[0]
    inputs = make_inputs(problem, "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    fresh = torch.randn_like(q)
    autotune.prepare(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [autotune.attention(q, k, v, causal=True, return_lse=True) for _ in range(3)]
    for data in (q.clone(), fresh):
        q.copy_(data)
        graph.replay()
        wanted = autotune.attention(q, k, v, causal=True, return_lse=True)
        assert all(torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1]) for out, lse in outs)


def test_a_captured_cupy_graph_keeps_its_workspace(cupy):
    problem = SPLIT[0]
    inputs = make_inputs(problem, "random", xp=cupy)
    wanted = autotune.attention(inputs.q, inputs.k, inputs.v, causal=True)
    out = cupy.zeros(wanted.shape, "uint16").view(wanted.dtype)
    autotune.prepare(problem.text)
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        autotune.attention(inputs.q, inputs.k, inputs.v, causal=True, out=out)
        graph = stream.end_capture()
        sizes = [2**n for n in range(8, 26)]
        others = [cupy.full(size, 7, np.float32) for size in sizes]  # whatever memory the pool has to give
        graph.launch(stream)
        stream.synchronize()
        assert all(bool((other == 7).all()) for other in others)
    assert bool((out.view("uint16") == wanted.view("uint16")).all())
