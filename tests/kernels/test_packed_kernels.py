"""Forward kernels over packed sequences, on the simulator: keys packed too, or in pages of a cache."""

import random
from dataclasses import replace

import numpy as np
import pytest

from autotune.cuda import compile
from autotune import simulator
from autotune.check.verdict import Guarded
from autotune.core.gpu import by_name
from autotune.check.inputs import KINDS, make_inputs
from autotune.kernels import KERNELS
from autotune.kernels.base import params_bytes
from autotune.kernels.forward.varlen import most_blocks
from autotune.core.problem import Problem
from autotune.cuda.render import render
from autotune.check.reference import all_blocks

pytestmark = pytest.mark.slow

GPU = by_name("nvidia-h200")
FORWARD = [name for name in KERNELS if name.startswith("forward")]
SMALL = 2**17  # shared memory of the configs that are drawn: larger tiles only take longer

# heads, head dims, mask and features, source, and a few sizes (batch, most queries, most keys)
CASES = [
    ("h4x2", "d64", "-causal", "-varlen", ((4, 150, 150), (40, 20, 30), (1, 70, 200))),
    ("h3x1", "d40", "", "-varlen", ((5, 100, 60), (3, 9, 250), (70, 5, 5))),
    ("h8x2", "d64", "-causal-left30-sinks", "-varlen", ((6, 130, 130), (9, 40, 200), (2, 200, 50))),
    ("h6x2", "d24x72", "-left40-right8-alibi", "-varlen", ((4, 90, 300), (33, 12, 40), (3, 150, 20))),
    ("h4x1", "d64", "-causal-softcap20-alibi-sinks", "-varlen", ((5, 140, 140), (35, 17, 25), (2, 33, 260))),
    ("h4x2", "d64", "-causal", "-page16", ((4, 150, 250), (40, 20, 60), (1, 70, 200))),
    ("h8x2", "d40", "", "-page48", ((3, 100, 260), (9, 10, 100), (34, 6, 50))),
    ("h5x1", "d64", "-causal-left50", "-page64", ((4, 140, 300), (7, 30, 200), (2, 90, 150))),
    ("h2x2", "d72x32", "-left9-right2-alibi", "-page32", ((4, 60, 180), (36, 9, 40), (3, 130, 70))),
    ("h4x2", "d16", "-causal-sinks", "-page3", ((4, 90, 100), (9, 17, 40), (2, 40, 120))),
    ("h3x3", "d64", "-causal-left19-softcap9", "-page19", ((4, 70, 130), (3, 33, 100), (36, 7, 30))),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("name", FORWARD)
def test_each_sequence_is_right(name, number):
    """Every kind of inputs, with lengths of 0, of 1 and of all that there can be; unused pages hold NaN, unused table entries are
    huge; the default and two drawn configs."""
    kernel, choose = KERNELS[name], random.Random(f"{name} {number}")
    heads, dims, features, source, sizes = CASES[number]
    runs = 0
    for turn, (batch, queries, keys) in enumerate(sizes):
        dtype = ("bf16", "fp16")[(number + turn) % 2]
        problem = Problem.parse(f"forward-{dtype}-b{batch}-{heads}-q{queries}-k{keys}-{dims}{features}{source}")
        if reason := kernel.reject(problem, GPU):
            pytest.skip(reason)
        config = kernel.default(problem, GPU) if turn == 0 else drawn_config(kernel, problem, choose)
        for seed in range(turn, turn + (1 if turn else 2)):
            kinds = KINDS[(number + seed) % len(KINDS)], KINDS[(number + seed + 3) % len(KINDS)]
            verdict = simulator.verify(problem, config, (seed,), kinds)
            assert verdict.ok, f"{problem}: {config}: {verdict.message}"
            runs += 2
    assert runs == 8


def drawn_config(kernel, problem, choose):
    while True:
        config = kernel.config(problem.static, {p.name: choose.choice(p.values) for p in kernel.parameters if not p.derived})
        if config["smem_bytes"] <= SMALL and kernel.illegal(problem.static, config, GPU) is None:
            return config


WRONG_STARTS = {"beyond the end": (0, 40, 1000, 2000), "falling": (0, 80, 30, 100), "negative": (-50, -20, 30, 100),
                "all of it": (0, 100, 100, 100), "nothing": (0, 0, 0, 0), "huge": (0, 2**31 - 1, 5, -2**31)}


@pytest.mark.parametrize("starts", WRONG_STARTS.values(), ids=WRONG_STARTS)
@pytest.mark.parametrize("source", ["varlen", "page16"])
@pytest.mark.parametrize("name", FORWARD)
def test_wrong_starts_touch_nothing_outside(name, source, starts, monkeypatch):
    problem = Problem.parse(f"forward-bf16-b3-h2x1-q100-k150-d32-causal-{source}")
    inputs = make_inputs(problem, "masked_nan", 1, sequences=[(30, 50), (0, 7), (70, 93)])
    layout, wrong = inputs.layout, np.array(starts, np.int64).astype(np.int32)
    lengths = np.array([-5, 2**31 - 1, 3], np.int32)  # of a cache: there is room for 150
    monkeypatch.setattr(layout, "device_starts", lambda of: wrong)
    if layout.table is not None:
        monkeypatch.setattr(layout, "device_lengths", lambda: lengths)
        layout.table[...] = np.arange(layout.table.size).reshape(layout.table.shape) % inputs.k.shape[0]
    config = KERNELS[name].default(problem, GPU)
    out = Guarded(np, (*layout.rows, 2, 32), "bf16").array
    lse = Guarded(np, (1, 2, layout.rows[1]), "fp32").array
    for seed in (0, 1):
        findings = simulator.simulate(problem, config, inputs, out, lse, seed).findings
        assert {finding.kind for finding in findings} <= {"race"}, findings  # of blocks that write a row which two sequences have


@pytest.mark.parametrize("name", FORWARD)
def test_rows_of_no_sequence_are_not_written(name, monkeypatch):
    problem = Problem.parse("forward-bf16-b2-h2x1-q60-k60-d32-causal-varlen")
    inputs = make_inputs(problem, "random", 1, sequences=[(40, 40), (60, 60)])
    layout, config = inputs.layout, KERNELS[name].default(problem, GPU)
    shorter = np.array([0, 40, 53], np.int32)  # 47 rows behind the last sequence
    monkeypatch.setattr(layout, "device_starts", lambda of: shorter)
    out = Guarded(np, (*layout.rows, 2, 32), "bf16").array
    lse = Guarded(np, (1, 2, layout.rows[1]), "fp32").array
    assert simulator.simulate(problem, config, inputs, out, lse, 1).ok
    word = out.view(np.uint16)[0]
    assert (word[53:] == 0xFFFF).all() and (word[:53] != 0xFFFF).any((1, 2)).all() and np.isnan(lse[0, :, 53:]).all()
    assert not np.isnan(lse[0, :, :53]).any()


@pytest.mark.parametrize("block", [1, 32, 64, 128])
@pytest.mark.parametrize("seed", range(4))
def test_the_grid_is_enough_for_any_lengths(block, seed):
    lengths = np.random.default_rng(seed).integers(0, 300, 20)
    need = int((-(-lengths // block)).sum())
    assert need <= most_blocks(len(lengths), int(lengths.sum()), block) <= need + len(lengths)
    worst = [1] * 19 + [block * 3 + 1]
    assert most_blocks(20, sum(worst), block) >= 19 + 4 and most_blocks(20, 0, block) == 0


@pytest.mark.parametrize("source", ["varlen", "page16"])
@pytest.mark.parametrize("name", FORWARD)
def test_a_packed_kernel_compiles_without_a_flaw_and_stays_short(name, source):
    problem = Problem.parse(f"forward-bf16-b8-h32x8-q2048-k2048-d128-causal-{source}")
    kernel = KERNELS[name]
    config = kernel.default(problem, GPU)
    assert compile.flaw(compile.build(problem.static, config, GPU)) is None
    text = render(problem.static, config, kernel.target(GPU))
    assert "cu_seqlens_q" in text and ("page_table" in text) == (source != "varlen") and "schedule(" not in text
    assert len(text[text.index('extern "C" __global__'):].splitlines()) <= 150
    assert params_bytes(kernel.params(problem.static, config)) <= 1024


@pytest.mark.parametrize("name", FORWARD)
def test_every_default_of_packed_sequences_is_legal(name):
    kernel = KERNELS[name]
    for dims in ("d16", "d64", "d96", "d128", "d192x128", "d192", "d256"):
        for heads in ("h16x16", "h64x8", "h6x1", "h14x2"):
            for features in ("", "-causal", "-causal-left127", "-softcap30", "-causal-alibi"):
                for sizes in ("b1-{}-q1-k1", "b64-{}-q3420-k3420", "b4-{}-q40000-k40000"):
                    for source in ("varlen", "page16"):
                        problem = Problem.parse(f"forward-bf16-{sizes.format(heads)}-{dims}{features}-{source}")
                        if kernel.reject(problem, GPU) is None:
                            assert kernel.illegal(problem.static, kernel.default(problem, GPU), GPU) is None, problem


def test_estimates_follow_the_work():
    kernel = KERNELS["forward_wgmma"]
    short, long = (Problem.parse(f"forward-bf16-b64-h32x8-q{n}-k{n}-d128-causal-varlen") for n in (1000, 8000))
    config = kernel.default(long, GPU)
    times = [kernel.estimate_us(problem, config, GPU, 168) for problem in (short, long)]
    assert times[0] < times[1] / 10
    dense = replace(long, kv="dense")
    assert times[1] < kernel.estimate_us(dense, kernel.default(dense, GPU), GPU, 168) / 3
    layout = make_inputs(replace(short, heads_q=1, heads_kv=1, head_dim=16), "random").layout
    queries = kernel.block_queries(config)
    assert kernel.blocks(short, config) == int((-(-layout.queries // queries)).sum()) * 8 and len(all_blocks(layout))


def test_pages_reach_the_copy_engine_as_boxes_that_divide_them_and_a_tile():
    kernel = KERNELS["forward_wgmma"]
    for page_size, block_n, rows in ((16, 128, 16), (64, 128, 64), (128, 128, 128), (256, 128, 128), (48, 80, 16), (96, 64, 32)):
        problem = Problem.parse(f"forward-bf16-b4-h8x2-q100-k1000-d128-causal-page{page_size}")
        values = {p.name: kernel.default(problem, GPU)[p.name] for p in kernel.parameters if not p.derived}
        config = kernel.config(problem.static, {**values, "block_n": block_n})
        maps = {shape.tensor: shape for shape in kernel.maps(problem, config)}
        assert maps["k"].rows == maps["v"].rows == rows
    assert "multiple of 16 keys" in kernel.reject(replace(problem, page_size=24), GPU)
    assert KERNELS["forward_mma"].reject(replace(problem, page_size=24), GPU) is None
