"""What a record of a decode step serves at other sizes: what keeps enough bytes in flight, on all SMs, as evenly as a default."""

import importlib
from dataclasses import replace

import pytest

from autotune.cuda import compile
from autotune.database import view
from autotune.core.gpu import by_name
from autotune.kernels import KERNELS
from autotune.kernels.decode.defaults import stands_alone
from autotune.kernels.decode.mma import enough_bytes_in_flight
from autotune.models.catalogue import catalogue
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
    assert module.distance(Problem.parse(tuned_for), problem, H200.sms) < module.RADIUS
    assert in_flight(lookup(tuned_for, H200)) > enough > KERNEL.bytes_in_flight(problem, winner, H200)
    match = lookup(asked, H200)
    assert (match.tier, match.config) == ("default", KERNEL.default(problem, H200)) and in_flight(match) > enough
    assert "no record suits" in match.why


@pytest.mark.parametrize("asked", ["b64-h32x8-q1-k2048", "b128-h32x8-q1-k8192", "b256-h32x8-q1-k1024", "b32-h64x16-q1-k8192"])
def test_small_blocks_serve_where_there_are_as_many(tuned, asked):
    winner = tuned("decode-bf16-b64-h32x8-q1-k4096-d128", **CROWD)
    match = lookup(f"decode-bf16-{asked}-d128", H200)
    assert (match.tier, match.config) == ("near", winner) and in_flight(match) > enough_bytes_in_flight(H200)


def test_few_bytes_are_no_reason_where_the_default_has_no_more(tuned):
    winner = tuned("decode-bf16-b1-h64x8-q1-k4096-d64", pieces=132)
    short, longer = (Problem.parse(f"decode-bf16-b1-h64x8-q1-k{keys}-d64") for keys in (7168, 16384))
    match = lookup(short, H200)
    assert (match.tier, match.config) == ("near", winner)
    assert in_flight(match) == default_in_flight(short) < enough_bytes_in_flight(H200)
    assert lookup(longer, H200).tier == "default" and in_flight(lookup(longer, H200)) > enough_bytes_in_flight(H200)


def test_pieces_are_of_the_sizes_that_are_asked_for(tuned):
    alone = dict(PAIRED, num_warps=8, num_stages=4, min_blocks_per_sm=1)
    tuned("decode-bf16-b32-h64x8-q1-k8192-d64-page16-kve4m3", **alone)  # 128 blocks, none of them cut
    many, few = (lookup(f"decode-bf16-b{batch}-h64x8-q1-k8192-d64-page16-kve4m3", H200) for batch in (64, 4))
    assert (many.tier, many.config["pieces"]) == (few.tier, 64) == ("near", 64)
    assert few.config["pieces"] == 132 and few.config == config(few.problem.text, **alone, pieces=132)  # 64 SMs would do it all
    tuned("decode-bf16-b128-h64x8-q1-k8192-d64", pieces=1056, min_blocks_per_sm=4)  # 1024 blocks, none of them cut
    match = lookup("decode-bf16-b32-h64x8-q1-k8192-d64", H200)
    assert match.tier == "near" and KERNEL.launches(match.problem, match.config).grid == 256


def test_blocks_that_may_stand_unevenly_do_not_serve_where_they_should_stand_alone(tuned):
    tuned("decode-bf16-b1-h64x8-q1-k4096-d128", pieces=132)
    problem = Problem.parse("decode-bf16-b8-h32x8-q1-k8192-d128")
    assert stands_alone(problem, 64, H200) and default_in_flight(problem) > enough_bytes_in_flight(H200)
    assert lookup(problem, H200).tier == "default" and lookup(replace(problem, batch=1), H200).tier == "near"


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


# What ships


def test_no_winner_is_taken_for_bad_where_it_won():
    records = view.open_view(H200, "decode").records
    assert len(records) > 50
    for record in records:
        assert KERNEL.adapted(record.problem, record.config, H200) == record.config, record.problem


def test_near_matches_of_all_sizes_keep_as_many_bytes_in_flight_as_are_enough_or_a_default_has(monkeypatch):
    kinds = {p.static: p for model in catalogue().values() for p in model.decode_problems}.values()
    asked = [replace(kind, batch=batch, seqlen_k=keys).simplified().bucketed()
             for kind in kinds for batch in (1, 4, 16, 48, 128) for keys in (2048, 12288, 65536)]

    def poor():
        module.refresh()
        near = [match for match in (lookup(problem, H200) for problem in asked) if match.tier == "near"]
        assert len(near) > len(asked) / 4
        return [match for match in near if KERNEL.uneven(match.problem, match.config, H200) or
                in_flight(match) < min(enough_bytes_in_flight(H200), default_in_flight(match.problem))]

    assert not poor()
    monkeypatch.setattr(type(KERNEL), "adapted", lambda self, problem, config, gpu: config)
    assert poor()
