"""Decode kernels: how work is cut, what is rendered and compiled, which configs are legal."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autotune.cuda.compile import compile_source, flaw
from autotune.core.gpu import by_name
from autotune.kernels import KERNELS
from autotune.kernels.base import reciprocal
from autotune.kernels.decode.base import MAX_CLUSTER
from autotune.core.problem import Problem
from autotune.cuda.render import render

pytestmark = pytest.mark.slow

KERNEL, GPU = KERNELS["decode_mma"], by_name("nvidia-h200")


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_a_reciprocal_divides_exactly(n, divisor):
    magic, shift = reciprocal(divisor)
    assert magic < 2**32 and n * magic < 2**64 and n * magic >> 31 + shift == n // divisor


def pieces_on_device(problem, config, queries, lengths, num_splits):
    """(pieces, those that have a slot), as pieces.cuh cuts them in its own arithmetic."""
    tile, block_m, heads, one = config["block_n"], config["block_m"], config["block_heads_kv"], np.float32(1)
    unsplit = -(-problem.heads_kv // heads) * -(-problem.group * queries // (block_m // heads))
    begin = np.zeros_like(lengths) if problem.window_left is None else np.maximum(lengths - queries - problem.window_left, 0)
    tiles = np.where(lengths > begin, -(-(lengths - begin // tile * tile) // tile), 0)
    share = np.float32((tiles * unsplit).sum()) * (one / np.float32(config["pieces"]) * np.float32(1 - 1e-6))
    share = max(np.float32(config["num_warps"]), share)
    wanted = np.minimum(num_splits, tiles) if num_splits else (tiles.astype(np.float32) * (one / share)).astype(int)
    splits = np.clip(wanted, 1, 4096 // block_m)
    return int((splits * unsplit).sum()), int((splits * unsplit)[splits > 1].sum())


@given(lengths=st.lists(st.integers(0, 20000), min_size=1, max_size=70), data=st.data(), queries=st.integers(1, 16),
       packed=st.booleans(), heads=st.sampled_from([(1, 1), (64, 8), (28, 4)]), left=st.none() | st.integers(0, 4000),
       num_splits=st.integers(0, 40))
def test_grid_and_slots_have_room_for_any_lengths(lengths, data, heads, queries, left, num_splits, packed):
    problem = Problem(op="decode", batch=len(lengths), heads_q=heads[0], heads_kv=heads[1], seqlen_q=queries, seqlen_k=20000,
                      head_dim=64, window_left=left, window_right=None if left is None else 0)
    values = {p.name: data.draw(st.sampled_from(p.values)) for p in KERNEL.parameters if not p.derived}
    config = KERNEL.config(problem.static, values)
    launches = KERNEL.launches(problem, config, uniform=False, num_splits=num_splits)
    each = np.full(len(lengths), queries)
    if packed:
        each = np.array(data.draw(st.lists(st.integers(0, queries), min_size=len(lengths), max_size=len(lengths))))
    pieces, slots = pieces_on_device(problem, config, each, np.array(lengths), num_splits)
    assert pieces <= launches.grid and slots <= launches.slots <= launches.grid
    assert launches.slots <= values["pieces"] or num_splits
    assert not launches.slots or bool(launches.combine) != bool(launches.tickets)


@given(batch=st.integers(1, 300), length=st.integers(1, 200000), data=st.data())
def test_full_sequences_are_cut_by_the_host_into_about_as_many_pieces_as_asked_for(batch, length, data):
    problem = Problem(op="decode", batch=batch, heads_q=64, heads_kv=8, seqlen_q=1, seqlen_k=length, head_dim=64)
    values = {p.name: data.draw(st.sampled_from(p.values)) for p in KERNEL.parameters if not p.derived}
    config = KERNEL.config(problem.static, values)
    launches = KERNEL.launches(problem, config)
    unsplit = batch * 8 // values["block_heads_kv"]
    assert launches.grid == unsplit * launches.splits and launches.splits >= 1
    assert launches.grid <= max(values["pieces"], unsplit)
    alone = launches.splits > launches.cluster  # blocks merge through global memory
    assert launches.combine == (unsplit if alone and not values["last_block_merges"] else 0)
    assert launches.cluster == (launches.splits if values["cluster_merges"] else 1) and launches.cluster <= MAX_CLUSTER
    assert (launches.slots > 0) == alone and launches.grid % launches.cluster == 0


def test_a_call_may_ask_for_a_number_of_splits():
    problem = Problem.parse("decode-bf16-b2-h8x2-q1-k4096-d64")
    config = KERNEL.config(problem.static, {**KERNEL.default(problem, GPU).values, "block_n": 16})
    for asked, got in ((1, 1), (7, 7), (100000, 256)):
        launches = KERNEL.launches(problem, config, num_splits=asked)
        assert launches.grid == 4 * got and (launches.slots == 0) == (got == 1)
    assert KERNEL.workspace_bytes(problem, config) == 4 * (KERNEL.launches(problem, config, uniform=False).slots * 4 * 66 + 4)


COMPILED = ["decode-bf16-b1-h64x8-q1-k4096-d64", "decode-fp16-b4-h32x8-q4-k4096-d128-causal-page16",
            "decode-bf16-b4-h5x1-q1-k500-d80", "decode-bf16-b1-h8x8-q1-k4096-d192x128-causal-left100-sinks",
            "decode-fp16-b1-h16x1-q2-k4096-d256-causal-page3", "decode-bf16-b1-h64x1-q1-k4096-d40x72",
            "decode-bf16-b1-h32x8-q1-k4096-d128-page16-kve4m3", "decode-fp16-b1-h64x8-q1-k4096-d64-kve4m3",
            "decode-bf16-b1-h16x8-q1-k4096-d256-softcap50", "decode-bf16-b1-h16x8-q1-k4096-d256-page16-kve4m3",
            "decode-bf16-b1-h16x8-q4-k4096-d256-causal-left1000-softcap50-alibi-kve4m3",
            "decode-bf16-b1-h64x1-q1-k4096-d128-alibi-page16",
            "decode-bf16-b1-h32x8-q4-k4096-d128-causal-left1000-softcap50-alibi-page16-kve4m3"]


@pytest.mark.parametrize("text", COMPILED)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120"])
def test_defaults_compile_without_spills(text, target):
    problem = Problem.parse(text)
    gpu = by_name({"sm_80": "nvidia-a100-sxm-80gb", "sm_90": "nvidia-h200", "sm_120": "nvidia-geforce-rtx-5090"}[target])
    if problem.kv_dtype == "e4m3" and target == "sm_80":
        assert "compute capability 8.9" in KERNEL.reject(problem, gpu)
        return
    config = KERNEL.default(problem, gpu)
    assert KERNEL.illegal(problem.static, config, gpu) is None and KERNEL.target(gpu) == target
    binary = compile_source(render(problem.static, config, target), target)
    assert set(binary.entries) == {"decode_mma", "decode_combine"} and flaw(binary) is None


def test_what_a_problem_lacks_leaves_no_trace():
    config = KERNEL.default(Problem.parse(COMPILED[0]), GPU)
    dense = render(Problem.parse("decode-bf16-b1-h64x8-q1-k4096-d64").static, config, "sm_90")
    paged = render(Problem.parse("decode-bf16-b1-h64x8-q1-k4096-d64-page16").static, config, "sm_90")
    capped = render(Problem.parse("decode-bf16-b1-h64x8-q1-k4096-d64-softcap30-alibi").static, config, "sm_90")
    for token in ("softcap", "tanh", "alibi", "fabsf"):
        assert token in capped and token not in dense.lower() and token not in paged.lower()
    assert "slot j % page_size" in paged and "slot j % page_size" not in dense and "window, inclusive" not in dense


@pytest.mark.parametrize("text, reason", [
    ("forward-bf16-b1-h8x8-q1-k64-d64", "decode problems, not forward"), ("decode-fp32-b1-h8x8-q1-k64-d64", "not fp32"),
    ("decode-bf16-b1-h8x8-q17-k64-d64", "up to 16 queries"), ("decode-bf16-b1-h8x8-q1-k64-d264", "head_dim is 264"),
    ("decode-bf16-b1-h8x8-q1-k64-d72-kve4m3", "multiples of 16"), ("decode-bf16-b1-h8x8-q1-k64-d64-kvfp16", "not fp16"),
    ("decode-bf16-b1-h8x8-q1-k64-d64x12", "head_dim_v is 12"), ("decode-bf16-b1-h8x8-q1-k64-d64-varlen", "varlen"),
])
def test_what_it_cannot_serve_it_refuses(text, reason):
    assert reason in KERNEL.reject(Problem.parse(text), GPU)


def test_a_bound_that_hides_nothing_goes_but_one_that_depends_on_lengths_stays():
    parse = Problem.parse
    assert parse("decode-bf16-b1-h8x8-q1-k64-d64-causal").simplified().mask == "full"
    assert parse("decode-bf16-b1-h8x8-q2-k64-d64-causal-page16").simplified().mask == "causal"
    assert parse("decode-bf16-b1-h8x8-q1-k64-d64-causal-left100").simplified().window_left == 100


def test_a_search_has_what_may_be_fastest_and_only_blocks_that_stand_alone_where_graphs_differ():
    def space(text):
        return KERNEL.space(Problem.parse(text), GPU)

    shared = [config for config in space("decode-bf16-b1-h64x8-q1-k4096-d64") if config["smem_bytes"] <= 113 * 1024]
    assert shared and all(config["dependent_launch"] and config["l2_prefetch"] == 128 for config in shared)
    alone = space("decode-bf16-b1-h64x8-q1-k65536-d64")
    assert alone and all(config["smem_bytes"] > 113 * 1024 for config in alone)
    assert KERNEL.default(Problem.parse("decode-bf16-b1-h64x8-q1-k65536-d64"), GPU) in alone
    many = space("decode-bf16-b64-h64x8-q1-k4096-d64")  # more blocks than SMs: the next one comes wherever one ends
    assert len(many) > len(alone) and min(config["smem_bytes"] for config in many) < 64 * 1024
    assert {config["block_heads_kv"] for config in many} == {1, 2}
    assert {config["block_heads_kv"] for config in space("decode-bf16-b64-h32x8-q1-k4096-d128")} == {1}


@pytest.mark.parametrize("text, pieces", [
    ("decode-bf16-b1-h64x8-q1-k65536-d64", 132), ("decode-bf16-b64-h64x8-q1-k4096-d64", 512),
    ("decode-bf16-b32-h64x8-q1-k8192-d64-page16", 396), ("decode-bf16-b128-h64x8-q1-k8192-d64", 512),
    ("decode-bf16-b64-h64x8-q1-k8192-d64-left127-page16", 132)])
def test_by_default_sequences_of_one_length_are_split_only_where_they_leave_sms_idle(text, pieces):
    problem = Problem.parse(text)
    config = KERNEL.default(problem, GPU)
    launches = KERNEL.launches(problem, config, uniform=problem.kv == "dense")
    unsplit = problem.batch * problem.heads_kv
    assert config["pieces"] == pieces
    if problem.kv == "dense":
        assert (launches.splits > 1) == (unsplit < GPU.sms)
    else:  # cut on the device
        lengths = np.full(problem.batch, problem.seqlen_k)
        assert pieces_on_device(problem, config, 1, lengths, 0) == (unsplit, 0)


@pytest.mark.parametrize("text, shape, early", [
    ("b4-h64x8-q1-k4096-d64-left127", (16, 8, True), (0, 8)), ("b64-h64x8-q1-k4096-d64-left127-page16", (16, 2, True), (0, 8)),
    ("b1-h32x8-q1-k4096-d128", (16, 4, False), (1, 2)), ("b1-h32x8-q1-k8192-d128-left4095-page16", (16, 4, False), (1, 2)),
    ("b1-h32x8-q1-k16384-d128", (32, 4, True), (2, 2)), ("b1-h32x8-q1-k4096-d128-kve4m3", (32, 4, True), (2, 2)),
    ("b1-h64x8-q1-k65536-d64", (32, 8, True), (2, 2)), ("b8-h16x8-q1-k8192-d256", (16, 4, False), (4, 4)),
    ("b32-h32x8-q1-k4096-d128-page16", (16, 4, True), (1, 0)), ("b256-h32x8-q1-k1024-d128-page16", (16, 4, True), (0, 0))])
def test_defaults_suit_the_keys_that_a_block_has(text, shape, early):
    config = KERNEL.default(Problem.parse(f"decode-bf16-{text}"), GPU)
    assert tuple(config[name] for name in ("block_n", "num_warps", "q_in_registers")) == shape
    assert (config["prefetch_tiles"], config["trigger_tiles"]) == early


def test_predictions_prefer_more_bytes_in_flight_and_fewer_launches():
    large = Problem.parse("decode-bf16-b64-h32x8-q1-k4096-d128")
    base = {**KERNEL.default(large, GPU).values, "block_n": 16, "pieces": 132}

    def estimate(problem, **values):
        return KERNEL.estimate_us(problem, KERNEL.config(problem.static, {**base, **values}), GPU, 128)

    assert 230 < estimate(large) < 290
    small = Problem.parse("decode-bf16-b1-h32x8-q1-k4096-d128")
    assert estimate(small, num_stages=2, num_warps=1, pieces=64) > 1.5 * estimate(small)
    assert estimate(small, last_block_merges=False) > estimate(small) and 5 < estimate(small) < 12
