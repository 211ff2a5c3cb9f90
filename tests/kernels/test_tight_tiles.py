"""Tiles of forward_wgmma that end with the last key (forward_wgmma/tiles/tight.cuh.j2), and rows that begin with a finite
reference or a sink.

The last tile shares keys with the one before it, a lone one begins before all keys: each such key must count once or not at all.
"""

from dataclasses import replace

import numpy as np
import pytest

from autotune import simulator
from autotune.check.verdict import compare
from autotune.core.gpu import by_name
from autotune.check.inputs import make_inputs
from autotune.kernels import KERNELS
from autotune.core.problem import Problem

pytestmark = pytest.mark.slow

KERNEL, H200 = KERNELS["forward_wgmma"], by_name("nvidia-h200")
SMALL = dict(num_warpgroups=1, block_heads=1, block_n=32, num_stages=2, q_stages=1, ping_pong=False,
             split_keys=False, num_splits=1)


def config(problem, **values):
    config = KERNEL.config(problem.static, {**KERNEL.default(problem, H200).values, **SMALL, **values})
    assert KERNEL.illegal(problem.static, config, H200) is None
    return config


def judged(problem, chosen, inputs, seed=0, source=None):
    """(verdict, out, lse) of one simulated launch."""
    out = np.full((*inputs.layout.rows, problem.heads_q, problem.head_dim_v), np.nan, inputs.q.dtype)
    lse = np.full((inputs.layout.rows[0], problem.heads_q, inputs.layout.rows[1]), np.nan, np.float32)
    simulation = simulator.simulate(problem, chosen, inputs, out, lse, seed, source=source)
    assert simulation.ok, simulation.findings[0]
    return compare(problem, inputs, out, lse), out, lse


# Keys once each


@pytest.mark.parametrize("seqlen_k", [1, 31, 32, 33, 64, 65, 95])
@pytest.mark.parametrize("features", ["", "-causal", "-left20-right3", "-causal-left40-softcap20-sinks", "-causal-alibi"])
def test_any_number_of_keys(features, seqlen_k):
    problem = Problem.parse(f"forward-bf16-b2-h2x1-q70-k{seqlen_k}-d32{features}")
    for overlap, slack in ((True, 8), (False, -1)):
        chosen = config(problem, overlap=overlap, rescale_slack=slack)
        verdict = simulator.verify(problem, chosen, (seqlen_k,), ("masked_nan", "needles"))
        assert verdict.ok, verdict.message


@pytest.mark.parametrize("source", ["varlen", "page16"])
@pytest.mark.parametrize("features", ["-causal-sinks", "-left20-right3", ""])
def test_sequences_without_keys_or_queries(source, features):
    """A lone tile of a short sequence begins among the keys of the one before it, which are not finite where nobody sees them."""
    sequences = [(0, 0), (5, 0), (0, 40), (33, 7), (1, 100), (70, 64), (64, 65)]
    problem = Problem.parse(f"forward-bf16-b{len(sequences)}-h3x1-q70-k100-d32{features}-{source}")
    chosen = config(problem, block_heads=2, q_stages=2)
    for seed, kind in enumerate(("random", "masked_nan")):
        verdict, *_ = judged(problem, chosen, make_inputs(problem, kind, seed, np, sequences), seed)
        assert verdict.ok, verdict.message


MUTANTS = [  # (what is wrong, before, after)
    ("shared keys count twice", "max_of(mask.row_begin(queries[half]), tiles.own_key(tile))", "mask.row_begin(queries[half])"),
    ("columns before the first own key are taken for visible", "max_of(shared_begin, own_key(tile)) - first_key(tile)",
     "shared_begin - first_key(tile)"),
    ("the last tile is taken for full", "own_key(tile) + BLOCK_N > shared_end", "own_key(tile) >= shared_end"),
    ("hidden rows of V are not zeroed", "if (count <= 0) return;", "return;"),
    ("the last tile does not move back", "min_of(own_key(tile), key_end - BLOCK_N)", "own_key(tile)"),
    ("the first product adds to what is there", "n > 0 || accumulate", "true"),
    ("no product adds to the one before", "n > 0 || accumulate", "n > 0"),
    ("rows begin at no number", "constexpr float LOWEST = -GREATEST;", "const float LOWEST = -INF;"),
    ("every lane counts the sink", "c_column() == 0 ? exp2_approx(sink", "c_column() >= 0 ? exp2_approx(sink"),
    ("a sink has no weight", "rows.sum[half] = c_column() == 0", "rows.sum[half] = c_column() < 0"),
]


@pytest.mark.parametrize("before, after", [mutant[1:] for mutant in MUTANTS], ids=[mutant[0] for mutant in MUTANTS])
def test_a_wrong_tile_or_row_is_found(before, after):
    verdicts = []
    for features in ("causal-sinks", "left20-right3", "causal-sinks-varlen"):
        problem = Problem.parse(f"forward-bf16-b4-h2x1-q70-k70-d32-{features}")
        chosen = config(problem)
        source = simulator.host_source(problem, chosen)
        assert source.count(before) == 1
        for kind in ("random", "masked_nan"):
            inputs = make_inputs(problem, kind, 0, np, [(0, 40), (33, 7), (0, 30), (70, 33)] if problem.packed else None)
            verdicts.append(judged(problem, chosen, inputs, source=source.replace(before, after))[0])
    assert not all(verdict.ok for verdict in verdicts)


# What rows begin with


@pytest.mark.parametrize("slack", [-1, 8])
@pytest.mark.parametrize("sink", [-np.inf, -1e30, -5.0, 10.0, 1000.0, 1e30])
def test_sinks_of_any_size(sink, slack):
    """30 rows of the first problem see no key: their LSE is the sink."""
    for text in ("forward-bf16-b1-h2x1-q80-k50-d32-causal-sinks", "forward-fp16-b1-h2x1-q70-k90-d32-left20-right3-sinks"):
        problem = Problem.parse(text)
        inputs = make_inputs(problem, "random")
        inputs = replace(inputs, sinks=np.full_like(inputs.sinks, sink))
        verdict, out, lse = judged(problem, config(problem, rescale_slack=slack), inputs)
        assert verdict.ok, verdict.message
        if problem.seqlen_k < problem.seqlen_q:
            assert not out[0, :30].any() and np.allclose(lse[0, :, :30], sink)


@pytest.mark.parametrize("integer_max", [False, True])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_rows_of_large_negative_scores(size, integer_max):
    """Every score is below -size: none may be lost between the reference that rows begin with and the mask's -inf."""
    problem = Problem.parse("forward-bf16-b1-h2x1-q70-k90-d32-causal")
    inputs = make_inputs(problem, "random")
    inputs.q[...] = abs(inputs.q) + inputs.q.dtype.type(1)
    inputs.k[...] = -(abs(inputs.k) + inputs.k.dtype.type(1)) * inputs.k.dtype.type(size)
    for slack in (-1, 8):
        verdict, _, lse = judged(problem, config(problem, rescale_slack=slack, integer_max=integer_max), inputs)
        assert verdict.ok and lse.max() < -size, verdict.message


@pytest.mark.parametrize("scale", [1.1754943508222875e-38, 1e-30, 1e30])
def test_any_scale(scale):
    problem = Problem.parse("forward-bf16-b1-h2x1-q70-k90-d32-causal-left30")
    verdict, *_ = judged(problem, config(problem), replace(make_inputs(problem, "random"), scale=scale))
    assert verdict.ok, verdict.message
