"""What serves decode steps of other sizes than those that were timed: what keeps enough bytes in flight, cut for these sizes."""

import importlib
from dataclasses import replace

import pytest

from autotune.cuda import compile
from autotune.database import view
from autotune.core.gpu import by_name
from autotune.kernels import KERNELS
from autotune.kernels.decode.mma import enough_bytes_in_flight
from autotune.core.problem import Problem
from autotune.database.record import GpuKey, Record

module = importlib.import_module("autotune.database.lookup")  # `autotune.lookup` is the function
lookup = module.lookup

H200, KERNEL = by_name("nvidia-h200"), KERNELS["decode_mma"]
SHAPE = dict(block_m=16, block_heads_kv=1, block_n=16, num_warps=4, num_stages=2, q_in_registers=True, l2_prefetch=128,
             min_blocks_per_sm=2, dependent_launch=True, cluster_merges=False, pieces=64, last_block_merges=True,
             prefetch_tiles=1, trigger_tiles=1)
PAIRED = dict(block_heads_kv=2, prefetch_tiles=0, trigger_tiles=0)
ONE_WARP = dict(block_n=32, num_warps=1)
CROWD = dict(num_warps=1, min_blocks_per_sm=4, last_block_merges=False, trigger_tiles=0)


def config(text, **values):
    return KERNEL.config(Problem.parse(text).static, {**SHAPE, **values})


def in_flight(match):
    return KERNEL.bytes_in_flight(match.problem, match.config, H200)


def default_in_flight(problem):
    return KERNEL.bytes_in_flight(problem, KERNEL.default(problem, H200), H200)


@pytest.fixture(autouse=True)
def refreshed(monkeypatch):
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "13.0.88")
    module.refresh()
    yield
    module.refresh()


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Makes the record of one problem all there is."""
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "user"))
    monkeypatch.setattr(view, "shipped_root", lambda: tmp_path / "shipped")

    def write(text, **values):
        winner, problem = config(text, **values), Problem.parse(text)
        assert KERNEL.illegal(problem.static, winner, H200) is None
        view.write([Record(problem=problem, gpu=GpuKey.of(H200), config=winner, evidence="measured", time_us=250.0,
                               date="2026-01-31 12:00:00 UTC", trials=100, nvrtc="13.0.88", cubin_sha256="a" * 64,
                               autotune="0.1.0")])
        module.refresh()
        return winner

    return write


@pytest.mark.parametrize("tuned_for, values, asked", [
    ("decode-bf16-b128-h64x8-q1-k8192-d64-kve4m3", PAIRED, "decode-bf16-b32-h64x8-q1-k8192-d64-kve4m3"),  # 88.2, not 62.9 us
    ("decode-bf16-b16-h32x32-q1-k8192-d128-kve4m3", ONE_WARP, "decode-bf16-b32-h32x8-q1-k8192-d128-kve4m3"),  # 187.4, not 121.6
    ("decode-bf16-b16-h32x32-q1-k8192-d128-kve4m3", ONE_WARP, "decode-bf16-b1-h32x8-q1-k16384-d128-kve4m3")])
def test_a_ring_that_was_enough_for_more_blocks_does_not_serve_where_it_is_too_small(tuned, tuned_for, values, asked):
    winner = tuned(tuned_for, **values)
    enough, problem = enough_bytes_in_flight(H200), Problem.parse(asked)
    assert in_flight(lookup(tuned_for, H200)) > enough > KERNEL.bytes_in_flight(problem, winner, H200)
    match = lookup(asked, H200)
    assert (match.tier, match.config) == ("default", KERNEL.default(problem, H200)) and in_flight(match) > enough


def test_pieces_are_of_the_sizes_that_are_asked_for():
    alone = config("decode-bf16-b32-h64x8-q1-k8192-d64-page16-kve4m3", **dict(PAIRED, num_warps=8, num_stages=4,
                                                                              min_blocks_per_sm=1))
    few = Problem.parse("decode-bf16-b4-h64x8-q1-k8192-d64-page16-kve4m3")
    assert KERNEL.fitted(few, alone, H200)["pieces"] == 132  # 64 SMs would do it all
    uncut = config("decode-bf16-b128-h64x8-q1-k8192-d64", pieces=1056, min_blocks_per_sm=4)
    fewer = Problem.parse("decode-bf16-b32-h64x8-q1-k8192-d64")
    assert KERNEL.launches(fewer, KERNEL.fitted(fewer, uncut, H200)).grid == 256


def test_bytes_in_flight_grow_with_rings_and_blocks_and_end_with_the_keys():
    text = "decode-bf16-b{}-h32x8-q1-k8192-d128-kve4m3"
    problems = [Problem.parse(text.format(batch)) for batch in (8, 16, 32, 64, 128, 256)]
    flying = [KERNEL.bytes_in_flight(problem, config(problem.text), H200) for problem in problems]
    assert flying == sorted(flying) and flying[-1] == flying[-2]  # two blocks an SM are all that must find room
    assert flying[0] == 64 / 132 * 4 * 2 * 16 * 256
    shapes = [dict(num_warps=warps, num_stages=stages, min_blocks_per_sm=1) for warps in (1, 2, 4) for stages in (2, 4, 8)]
    rings = [KERNEL.bytes_in_flight(problems[0], config(problems[0].text, **shape), H200) for shape in shapes]
    assert len(set(rings)) > 3 and all(a <= b for a, b in zip(rings, rings[3:])) and rings[:3] == sorted(rings[:3])
    window = Problem.parse("decode-bf16-b1-h64x8-q1-k8192-d64-left127")
    assert KERNEL.bytes_in_flight(window, config(window.text, num_warps=8), H200) == window.compulsory_bytes / H200.sms
    assert KERNEL.bytes_in_flight(replace(window, batch=0), config(window.text), H200) == 0


# What was found slow by hand, with what ships


@pytest.mark.parametrize("batch", [200, 193, 224])
def test_sequences_that_fill_the_gpu_are_not_cut(batch):
    """526 us where blocks of whole sequences took 283: pieces of another batch. Nor at the other end of the bucket."""
    asked = Problem.parse(f"decode-bf16-b{batch}-h40x8-q1-k1500-d128")
    match = lookup(asked, H200)
    assert KERNEL.launches(asked, match.config).grid == KERNEL.unsplit(asked, match.config)


@pytest.mark.parametrize("asked", ["forward-bf16-b2-h40x8-q6144-k6144-d128-causal",
                                   "forward-bf16-b1-h20x4-q6144-k6144-d128-causal"])
def test_no_row_is_computed_for_a_head_that_is_not_there(asked):
    """1565 us where another config took 978: 8 rows computed for 5."""
    match = lookup(asked, H200)
    assert match.problem.group % match.config["block_heads"] == 0


def test_few_queries_share_keys_though_no_config_of_their_cover_does():
    """94 us where 35 were found: 64 blocks for 132 SMs (docs/log.md, forward_wgmma)."""
    match = lookup("forward-bf16-b1-h8x8-q128-k8192-d64", H200)
    assert match.config["split_keys"] and match.config["num_splits"] > 1
