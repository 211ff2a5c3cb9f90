"""Splits of a decode kernel that are merged in a cluster: which configs may, what is launched, what the simulator reports."""

import re
import subprocess
import warnings

import numpy as np
import pytest
from fake_arrays import FakeGpu, fake_gpu, qkv  # noqa: F401 (a fixture)
from simulator_probes import finding, run
from test_dependent_launch import fixture_build, offsets  # noqa: F401 (a fixture)
from test_launch import binary, fake_cuda, launch  # noqa: F401 (a fixture)

import autotune
from autotune.device import attributes, launch as launching
from autotune.calls import plans
from autotune import simulator
from autotune.check.verdict import Guarded
from autotune.cuda.compile import compile_source, flaw
from autotune.core.gpu import by_name, detect
from autotune.check.inputs import make_inputs
from autotune.kernels import KERNELS
from autotune.kernels.base import Step
from autotune.kernels.decode.base import MAX_CLUSTER
from autotune.device.launch import load
from autotune.database.lookup import Match
from autotune.core.problem import Problem
from autotune.cuda.render import render
from autotune.check.verify import verify

pytestmark = pytest.mark.slow

H200, A100 = by_name("nvidia-h200"), by_name("nvidia-a100-sxm-80gb")
KERNEL = KERNELS["decode_mma"]
PROBLEM = Problem.parse("decode-bf16-b1-h32x8-q1-k4096-d128")


def config(problem, **values):
    config = KERNEL.config(problem.static, {**KERNEL.default(problem, H200).values, "block_n": 16,
                                             "cluster_merges": True, **values})
    assert KERNEL.illegal(problem.static, config, H200) is None
    return config


# Which configs


def test_it_needs_sm_90_a_dense_cache_and_one_way_to_merge_the_rest():
    clustered = config(PROBLEM)
    assert KERNEL.illegal(PROBLEM.static, clustered, A100) == "dependent_launch needs compute capability 9.0, the GPU has 8.0"
    plain = config(PROBLEM, dependent_launch=False, prefetch_tiles=0, trigger_tiles=0)
    assert KERNEL.illegal(PROBLEM.static, plain, A100) == "cluster_merges needs compute capability 9.0, the GPU has 8.0"
    assert KERNEL.illegal(Problem.parse(PROBLEM.text + "-page16").static, clustered, H200).startswith(
        "cluster_merges needs lengths that the host knows")
    combine = KERNEL.config(PROBLEM.static, {**clustered.values, "last_block_merges": False})
    assert KERNEL.illegal(PROBLEM.static, combine, H200) == "last_block_merges is False; with cluster_merges it must be True"
    assert not KERNEL.default(PROBLEM, H200)["cluster_merges"]


def test_configs_without_it_mean_that_it_is_off():
    raw = {name: value for name, value in KERNEL.default(PROBLEM, H200).values.items() if name != "cluster_merges"}
    assert KERNEL.typed_config(raw, "here") == KERNEL.default(PROBLEM, H200)


def test_a_search_meets_each_config_once():
    merges = [(c["cluster_merges"], c["last_block_merges"]) for c in KERNEL.space(PROBLEM, H200)]
    assert set(merges) == {(False, True), (False, False), (True, True)}
    assert merges.count((True, True)) == merges.count((False, True)) == merges.count((False, False))
    for problem, gpu in ((PROBLEM, A100), (Problem.parse(PROBLEM.text + "-page16"), H200)):
        assert not any(c["cluster_merges"] for c in KERNEL.space(problem, gpu))


def test_it_leaves_no_trace_elsewhere():
    words = re.compile("cluster|mapa|keep_partial", re.I)
    base = config(PROBLEM)
    without = KERNEL.config(PROBLEM.static, {**base.values, "cluster_merges": False})
    assert words.search(render(PROBLEM.static, base, "sm_90")) and not words.search(render(PROBLEM.static, without, "sm_90"))


@pytest.mark.parametrize("text, values", [
    ("decode-bf16-b1-h64x8-q1-k4096-d64", {}), ("decode-bf16-b1-h32x8-q1-k4096-d128", dict(num_warps=8, min_blocks_per_sm=1)),
    ("decode-fp16-b1-h5x1-q4-k4096-d80-causal-left100-sinks-softcap30-alibi", {}),
    ("decode-bf16-b1-h32x8-q1-k4096-d128-kve4m3", {}), ("decode-bf16-b1-h16x8-q1-k4096-d256", {}),
    ("decode-bf16-b1-h64x8-q1-k4096-d64", dict(min_blocks_per_sm=4))])
def test_it_compiles_without_spills(text, values):
    problem = Problem.parse(text)
    built = compile_source(render(problem.static, config(problem, **values), "sm_90"), "sm_90")
    assert flaw(built) is None and set(built.entries) == {"decode_mma", "decode_combine"}


# What is launched


@pytest.mark.parametrize("pieces, splits", [(64, 8), (132, 16), (264, 16), (4096, 16)])
def test_the_splits_of_the_same_rows_are_a_cluster(pieces, splits):
    chosen = config(PROBLEM, pieces=pieces)
    launches, (step,) = KERNEL.launches(PROBLEM, chosen), KERNEL.plan(PROBLEM, chosen)
    assert (launches.cluster, launches.splits, launches.grid) == (step.cluster, splits, 8 * splits) == (splits, splits, step.grid)
    assert (launches.slots, launches.tickets, launches.combine) == (0, 0, 0)
    assert f"the {splits} blocks of a cluster merge their pieces" in str(launches)


def test_other_launches_have_no_clusters():
    chosen = config(PROBLEM, pieces=132)
    lengths = KERNEL.launches(PROBLEM, chosen, uniform=False)
    assert lengths.cluster == 1 and lengths.slots > 0 and lengths.tickets == 8
    asked = KERNEL.launches(PROBLEM, chosen, uniform=False, num_splits=40)
    assert asked.cluster == 1 and asked.grid == 320
    many = Problem.parse("decode-bf16-b64-h32x8-q1-k4096-d128")
    one = KERNEL.launches(many, config(many, pieces=132))
    assert (one.cluster, one.splits, one.slots) == (1, 1, 0) and "not cut" in str(one)
    assert KERNEL.launches(PROBLEM, chosen, num_splits=40).cluster == MAX_CLUSTER
    assert KERNEL.launches(PROBLEM, chosen, num_splits=1).cluster == 1


def test_predictions_know_it():
    with_clusters, tickets = config(PROBLEM), KERNEL.default(PROBLEM, H200)
    assert 0.5 < KERNEL.estimate_us(PROBLEM, tickets, H200, 128) - KERNEL.estimate_us(PROBLEM, with_clusters, H200, 128) < 2


@pytest.mark.parametrize("early", [True, False])
def test_the_driver_is_told_of_clusters(cuda, early):
    loaded = load(binary(), 0)
    for cluster in (1, 2, 8, 9, 16):
        step = Step("entry", 144, 128, 1000, dependent=early, cluster=cluster)
        launch(loaded.bound(step), step, b"\0" * 8)
    assert cuda.clusters == ([1] if early else []) + [2, 8, 9, 16] and cuda.dependent == 5 * early
    assert cuda.attributes == [(100, launching.NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)]  # for the first large one


def test_sizes_and_offsets_are_those_of_the_header(build):
    numbers = ["sizeof(CUlaunchAttribute)", "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
               "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", "offsetof(CUlaunchAttribute, id)",
               *(f"offsetof(CUlaunchAttribute, value.clusterDim.{axis})" for axis in "xyz")]
    program = build("int main() { " + " ".join(f'printf("%d ", int({number}));' for number in numbers) + " }")
    printed = list(map(int, subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()))
    assert printed[:3] == [attributes.CLUSTER_ATTRIBUTE.size, attributes.CLUSTER_DIMENSION,
                           launching.NON_PORTABLE_CLUSTER_SIZE_ALLOWED]
    assert printed[3:] == offsets(attributes.CLUSTER_ATTRIBUTE, (21, 22, 23, 24))


def test_calls_launch_clusters_where_the_host_knows_the_lengths(gpu: FakeGpu, monkeypatch):
    monkeypatch.setattr(plans, "of_bucket", lambda problem, gpu: Match(config(problem), "default", "predicted", problem, gpu))
    q, k, v = qkv(seqlen_q=1, seqlen_k=700)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        autotune.attention_with_kvcache(q, k, v)
        assert gpu.clusters == [11] and gpu.calls[-1]["num_splits"] == 11 and not gpu.calls[-1]["tickets"]
        autotune.attention_with_kvcache(q, k, v, num_splits=3)
        assert gpu.clusters == [11, 3] and not gpu.calls[-1]["partial_o"]
        lengths = type(q)(np.full(2, 700, np.int32))
        autotune.attention_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert gpu.clusters == [11, 3, 1] and gpu.calls[-1]["tickets"] and gpu.calls[-1]["partial_o"]
    assert len(gpu.built) == 1


# On the simulator

SMALL = dict(block_m=16, num_warps=1, num_stages=2)
CASES = [("decode-bf16-b2-h8x1-q1-k70-d64", dict(num_warps=2), 2),
         ("decode-bf16-b2-h10x2-q1-k100-d64-sinks", dict(num_warps=2), 3),
         ("decode-fp16-b1-h2x2-q1-k300-d40", dict(num_warps=2), 9), ("decode-bf16-b1-h8x1-q4-k140-d64-causal", SMALL, 9),
         ("decode-bf16-b1-h8x1-q1-k300-d64", SMALL, 16), ("decode-bf16-b1-h8x1-q1-k130-d32-softcap30", SMALL, 9),
         ("decode-bf16-b1-h5x1-q4-k500-d40-causal-left80-sinks", dict(num_warps=1, q_in_registers=False), 7),
         ("decode-bf16-b1-h8x1-q4-k128-d32-causal-alibi", SMALL, 8), ("decode-bf16-b1-h8x1-q1-k128-d32-kve4m3", SMALL, 8),
         ("decode-bf16-b1-h8x1-q4-k256-d128x64", dict(block_m=32, num_warps=4, num_stages=2), 4),
         ("decode-bf16-b1-h8x1-q1-k20-d64", dict(num_warps=2), 1)]


@pytest.mark.parametrize("text, values, cluster", CASES, ids=[case[0] for case in CASES])
def test_results_are_right_with_and_without_lengths(text, values, cluster):
    """`random` fills every sequence, `mixed` draws lengths, so that tickets are taken."""
    problem = Problem.parse(text)
    chosen = config(problem, pieces=64, **values)
    assert KERNEL.launches(problem, chosen).cluster == cluster
    for seed in (0, 1, 2):
        verdict = simulator.verify(problem, chosen, (seed,), ("random", "mixed"))
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("text, values, cluster", CASES[3:5], ids=[case[0] for case in CASES[3:5]])
def test_however_blocks_run_the_bits_are_the_same(text, values, cluster):
    problem = Problem.parse(text)
    chosen, inputs, outputs = config(problem, pieces=64, **values), make_inputs(problem, "random"), []
    for seed in range(4):
        out = Guarded(np, (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v), problem.out_dtype).array
        lse = Guarded(np, (problem.batch, problem.heads_q, problem.seqlen_q), "fp32").array
        assert simulator.simulate(problem, chosen, inputs, out, lse, seed).ok
        outputs.append(out.tobytes() + lse.tobytes())
    assert len(set(outputs)) == 1


def test_both_barriers_of_the_cluster_are_needed():
    problem = Problem.parse("decode-bf16-b1-h8x1-q1-k100-d32")
    chosen = config(problem, pieces=64, **SMALL)
    source = simulator.host_source(problem, chosen)
    places = [match.span() for match in re.finditer(r"(sync|leave)_cluster\(\);", source)]
    found = [simulator.verify(problem, chosen, (seed,), ("random",), source=source[:begin] + source[end:]).message
             for begin, end in places for seed in range(3)]
    assert len(places) == 2 and all(re.match("race|uninitialised read", message) for message in found), found


FILL = "SharedArray<u32>{smem_base()}.set(thread_id(), block_id() * 100 + thread_id());\n"
READ = "p.out[block_id() * 32 + thread_id()] = u32(load_remote_floats(remote_address(smem_base(), rank ^ 1)).x[0]);\n"
RANK = "const int rank = block_id() % 2;\n"


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_a_cluster_see_each_others_shared_memory(seed):
    body = RANK + "SharedArray<float>{smem_base()}.set(thread_id(), float(block_id() * 100 + thread_id()));\n" + \
        "sync_cluster();\n" + READ + "sync_cluster();"
    out, simulation = run(body, seed=seed, grid=6, cluster=2, out_words=192)
    assert simulation.findings == () and (out.reshape(6, 32) == np.array([100, 0, 300, 200, 500, 400])[:, None]).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("body, words", [
    (RANK + FILL + READ + "sync_cluster();", "race|uninitialised read"),
    (FILL + "sync_block();" + RANK + READ + "sync_cluster();", "race|uninitialised read"),
    (RANK + FILL + "sync_cluster();" + READ, "race.*(may end before that|has ended)"),
    (RANK + FILL + "sync_cluster();" + READ + FILL.replace("* 100", "* 77 + 3") + "sync_cluster();", "race"),
    (RANK + "sync_cluster();" + READ + "sync_cluster();", "uninitialised read.*of block . of the cluster"),
    (RANK + FILL + "sync_cluster(); load_shared_16(remote_address(smem_base(), rank ^ 1)); sync_cluster();", "out of bounds"),
    ("remote_address(smem_base(), 2);", "out of bounds.*block 2 of a cluster of 2"),
    (RANK + "load_remote_floats(remote_address(smem_base() + 4096, rank ^ 1));", "out of bounds"),
    (RANK + "load_remote_floats(remote_address(smem_base() + 4, rank ^ 1));", "misaligned"),
    ("if (block_id() % 2) sync_cluster();", "deadlock.*waits at the barrier of the cluster, where 32 of 64"),
])
def test_what_is_wrong_in_a_cluster_is_found(seed, body, words):
    found = finding(body, seed=seed, grid=4, cluster=2, out_words=128)
    assert re.match(words, f"{found.kind}: {found.message}"), found


def test_a_grid_is_whole_clusters():
    assert "3 blocks are no multiple of a cluster of 2" in finding("sync_cluster();", grid=3, cluster=2).message


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [64, 264])
@pytest.mark.parametrize("text", ["decode-bf16-b1-h64x8-q1-k4096-d64", "decode-bf16-b2-h10x2-q4-k3000-d128-causal-left900-sinks",
                                  "decode-fp16-b3-h8x8-q1-k700-d80-softcap30",
                                  "decode-bf16-b1-h32x8-q2-k4096-d128-causal-kve4m3"])
def test_results_on_a_gpu_are_right(text, pieces):
    gpu = detect()
    if gpu.arch < 90:
        pytest.skip(f"clusters need compute capability 9.0, the GPU has {gpu.arch / 10}")
    problem = Problem.parse(text)
    for early in (True, False):
        values = {"pieces": pieces, "dependent_launch": early, "prefetch_tiles": int(early), "trigger_tiles": int(early),
                  "cluster_merges": True}
        chosen = KERNEL.config(problem.static, {**KERNEL.default(problem, gpu).values, **values})
        result = verify(problem, chosen, gpu)
        assert KERNEL.launches(problem, chosen).cluster > 1 and result.ok, result.message
