"""Blocks of decode_mma that take two key/value heads side by side: which configs may, how work is cut, what comes out."""

import re

import pytest

from autotune import simulator
from autotune.cuda.compile import compile_source, flaw
from autotune.core.gpu import by_name, detect
from autotune.check.inputs import KINDS
from autotune.kernels import KERNELS
from autotune.core.problem import Problem
from autotune.cuda.render import render
from autotune.check.verify import verify

pytestmark = pytest.mark.slow

H200 = by_name("nvidia-h200")
KERNEL = KERNELS["decode_mma"]
NARROW = Problem.parse("decode-bf16-b1-h64x8-q1-k4096-d64-kve4m3")


def config(problem, **values):
    config = KERNEL.config(problem.static, {**KERNEL.default(problem, H200).values, "block_heads_kv": 2, "block_m": 16,
                                             "block_n": 16, "cluster_merges": False, **values})
    assert KERNEL.illegal(problem.static, config, H200) is None
    return config


# Which configs, and how work is cut


@pytest.mark.parametrize("text, heads", [
    ("decode-bf16-b1-h64x8-q1-k4096-d64-kve4m3", 2), ("decode-bf16-b1-h64x8-q1-k4096-d64-page16-kve4m3", 2),
    ("decode-bf16-b1-h64x8-q1-k4096-d32", 2),
    ("decode-bf16-b1-h64x8-q1-k4096-d64", 1),  # 128 bytes of a key are a line
    ("decode-bf16-b1-h64x8-q2-k4096-d64-kve4m3", 1),  # 16 rows of each head
    ("decode-bf16-b1-h8x1-q1-k4096-d64-kve4m3", 1), ("decode-bf16-b1-h64x8-q1-k4096-d40", 1)])
def test_the_default_pairs_heads_of_which_one_is_less_than_a_line(text, heads):
    problem = Problem.parse(text)
    default = KERNEL.default(problem, H200)
    assert default["block_heads_kv"] == heads and KERNEL.illegal(problem.static, default, H200) is None


def test_configs_without_it_mean_one_head():
    problem = Problem.parse("decode-bf16-b1-h64x8-q1-k4096-d64")
    raw = {name: value for name, value in KERNEL.default(problem, H200).values.items() if name != "block_heads_kv"}
    assert KERNEL.typed_config(raw, "here") == KERNEL.default(problem, H200)


def test_a_fragment_is_of_one_head():
    static = Problem.parse("decode-bf16-b1-h64x8-q1-k4096-d40").static
    wrong = KERNEL.config(static, {**config(NARROW).values, "q_in_registers": True})
    assert KERNEL.illegal(static, wrong, H200).startswith("block_heads_kv is 2; head dims of 40 and 40 allow 1")


def test_a_warp_copies_a_whole_key():
    fits, large = (Problem.parse(f"decode-bf16-b1-h64x8-q1-k4096-{dims}").static for dims in ("d128", "d192x128"))
    pair = {**config(NARROW).values, "min_blocks_per_sm": 1, "q_in_registers": False}
    assert KERNEL.illegal(fits, KERNEL.config(fits, pair), H200) is None
    assert "so a key has 768 bytes; a warp copies up to 512" in KERNEL.illegal(large, KERNEL.config(large, pair), H200)


def test_two_heads_are_one_piece_and_have_half_of_the_rows_each():
    problem = Problem.parse("decode-bf16-b3-h25x5-q2-k4096-d64")
    pair = config(problem)
    assert KERNEL.block_rows(pair) == 8
    launches = KERNEL.launches(problem, pair, uniform=True, num_splits=4)
    assert launches.grid == 3 * 3 * 2 * 4  # sequences, pairs of 5 heads, tiles of 8 of 10 rows, splits
    assert launches.slots == launches.grid and launches.rows == 8 + 8 and launches.tickets == 3 * 3 * 2
    few = Problem.parse("decode-bf16-b3-h25x5-q1-k4096-d64")
    assert KERNEL.launches(few, pair, num_splits=4).rows == 8 + 5


def test_predictions_prefer_whole_lines():
    """Where reading is what takes time: 65.4 us on an H200, with one head 76.9 (8 warps and 4)."""
    problem = Problem.parse("decode-bf16-b32-h64x8-q1-k8192-d64-kve4m3")
    alone = config(problem, block_heads_kv=1)
    assert KERNEL.estimate_us(problem, config(problem), H200, 128) < KERNEL.estimate_us(problem, alone, H200, 128)


# What comes out

PAIRS = [  # groups of 1, 4, 5, 8 and 12 rows, heads that have no partner, every feature
    ("decode-bf16-b2-h16x2-q1-k900-d64", {}),
    ("decode-bf16-b2-h16x2-q1-k900-d64", dict(cluster_merges=True)),
    ("decode-bf16-b2-h16x2-q1-k900-d64", dict(q_in_registers=False, num_stages=3)),
    ("decode-fp16-b2-h15x3-q1-k700-d64-page16", dict(last_block_merges=False)),
    ("decode-bf16-b2-h5x1-q3-k500-d64-causal-alibi-softcap20-sinks", dict(block_n=32)),
    ("decode-fp16-b2-h12x3-q1-k900-d80x48-left100-sinks", dict(num_warps=2)),
    ("decode-bf16-b3-h24x2-q1-k900-d64-page19-kve4m3-sinks", {}),
    ("decode-bf16-b2-h3x3-q4-k400-d48-causal-kve4m3-softcap20-alibi", {}),
    ("decode-bf16-b2-h24x3-q2-k600-d64-causal-kve4m3", dict(block_m=32, num_warps=2, cluster_merges=True)),
    ("decode-fp16-b2-h16x2-q1-k500-d64-page16-kve4m3", dict(q_in_registers=False, num_warps=2)),
    ("decode-bf16-b2-h8x4-q1-k500-d128-page1", dict(num_warps=2, q_in_registers=False, last_block_merges=False)),
]


@pytest.mark.parametrize("text, values", PAIRS, ids=str)
def test_the_simulator_finds_results_right(text, values):
    problem = Problem.parse(text)
    verdict = simulator.verify(problem, config(problem, min_blocks_per_sm=1, **values), (0, 1), KINDS)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("text, values", PAIRS, ids=str)
def test_it_compiles_without_spills(text, values):
    problem = Problem.parse(text)
    binary = compile_source(render(problem.static, config(problem, min_blocks_per_sm=1, **values), "sm_90"), "sm_90")
    assert flaw(binary) is None


MUTANTS = [  # (what is wrong, before, after)
    ("a query meets the keys of both heads", "== head_of(m, half);", ">= 0;"),
    ("rows beyond a head's count as the next head's", "row % HEAD_ROWS < each", "true"),
    ("all rows are of the first head", "return head_kv + row / HEAD_ROWS;", "return head_kv;"),
    ("the first head's columns are stored for both", "head_of(m, half) * TILES_OF_HEAD", "0"),
    ("a lane's chunk is one of the first head", "min_of(chunk / CHUNKS_OF_HEAD, heads - 1) * head_stride", "0"),
    ("both heads have the first one's scale", "scale[head_of(m, i / 2)]", "scale[0]"),
]


@pytest.mark.parametrize("what, before, after", MUTANTS, ids=[what for what, _, _ in MUTANTS])
def test_a_wrong_pair_is_found(what, before, after):
    problem = Problem.parse("decode-bf16-b2-h10x2-q1-k300-d64-kve4m3")
    pair = config(problem)
    source, count = re.subn(re.escape(before), after, simulator.host_source(problem, pair))
    assert count
    assert not simulator.verify(problem, pair, (0, 1), ("random", "masked_nan"), source=source).ok


@pytest.mark.gpu
@pytest.mark.parametrize("text, values", PAIRS, ids=str)
def test_a_gpu_finds_results_right(text, values):
    gpu = detect()
    if gpu.arch < 90:
        pytest.skip(f"its configs are for compute capability 9.0, the GPU has {gpu.arch / 10}")
    problem = Problem.parse(text)
    result = verify(problem, config(problem, min_blocks_per_sm=1, **values), gpu)
    assert result.ok, result.message
