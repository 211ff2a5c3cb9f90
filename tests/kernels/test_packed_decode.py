"""Decode steps whose queries are packed, each sequence with its own number, on the simulator."""

import random
from dataclasses import replace

import numpy as np
import pytest

from autotune import simulator
from autotune.check.verdict import Guarded, compare
from autotune.core.gpu import by_name
from autotune.check.inputs import KINDS, make_inputs
from autotune.kernels import KERNELS
from autotune.kernels.decode.base import MAX_QUERIES
from autotune.check.layout import Layout
from autotune.check.numerics import from_float32
from autotune.core.problem import Problem, ProblemError
from autotune.check.reference import all_blocks, expect

pytestmark = pytest.mark.slow

KERNEL, GPU = KERNELS["decode_mma"], by_name("nvidia-h200")
SMALL = 2**17  # shared memory of the configs that are drawn: larger tiles only take longer

# dtype, heads, head dims, mask, cache: what is compiled in, and a few sizes (batch, most queries, most keys) for each.
CASES = [
    ("bf16", "h4x2", "d64", "-causal", "", ((3, 5, 100), (9, 1, 40), (2, 16, 200))),
    ("fp16", "h6x2", "d64", "-causal", "-page16", ((5, 4, 150), (40, 2, 33), (3, 16, 100))),
    ("bf16", "h5x1", "d40", "", "-page3", ((4, 3, 64), (2, 13, 90), (7, 16, 20))),
    ("bf16", "h8x1", "d64", "-causal-left30-sinks", "-page64", ((3, 7, 130), (33, 3, 70), (2, 16, 300))),
    ("fp16", "h2x2", "d72x32", "-left9-right2", "", ((4, 6, 80), (3, 16, 40), (12, 2, 50))),
    ("bf16", "h14x2", "d64", "-causal", "-page19-kve4m3", ((3, 4, 120), (6, 16, 64), (17, 1, 90))),
]
SEEDS_EACH = 5


def problem_of(case, size) -> Problem:
    dtype, heads, dims, mask, cache, _ = case
    kv = cache.partition("-kv")
    text = f"decode-{dtype}-b{size[0]}-{heads}-q{size[1]}-k{size[2]}-{dims}{mask}{kv[0]}-packed" + "".join(kv[1:])
    problem = Problem.parse(text)
    assert problem.text == text and problem.packed
    return problem


def configs_of(case, choose: random.Random):
    """The default and a drawn config."""
    problem = problem_of(case, case[-1][0])
    yield KERNEL.default(problem, GPU)
    while True:
        config = KERNEL.config(problem.static, {p.name: choose.choice(p.values) for p in KERNEL.parameters if not p.derived})
        if config["smem_bytes"] <= SMALL and KERNEL.illegal(problem.static, config, GPU) is None:
            yield config
            return


@pytest.mark.parametrize("number", range(len(CASES)))
def test_sequences_of_any_number_of_queries_are_right(number):
    """60 runs in all: every kind of inputs, sequences without queries, without keys, of one of each, and of all there can be."""
    case, choose = CASES[number], random.Random(f"packed {number}")
    for config in configs_of(case, choose):
        for seed in range(SEEDS_EACH):
            problem = problem_of(case, case[-1][seed % 3])
            verdict = simulator.verify(problem, config, (seed + number,), (KINDS[(seed + number) % len(KINDS)],))
            assert verdict.ok, f"{problem}: {config}: {verdict.message}"


def launched(problem: Problem, config, inputs, seed=0):
    rows = inputs.layout.rows
    out = Guarded(np, (*rows, problem.heads_q, problem.head_dim_v), problem.out_dtype).array
    lse = Guarded(np, (rows[0], problem.heads_q, rows[1]), "fp32").array
    simulation = simulator.simulate(problem, config, inputs, out, lse, seed)
    assert simulation.ok, simulation.findings
    return out, lse


@pytest.mark.parametrize("last_block_merges", [True, False])
def test_sequences_of_more_queries_than_it_serves_are_left_alone(last_block_merges):
    problem = Problem.parse("decode-bf16-b6-h4x2-q16-k300-d64-causal-page16-packed")
    config = KERNEL.default(problem, GPU)
    config = KERNEL.config(problem.static, {**config.values, "pieces": 64, "last_block_merges": last_block_merges})
    inputs = make_inputs(problem, "large", 2)
    layout = inputs.layout
    assert (layout.queries > 4).any() and ((0 < layout.queries) & (layout.queries <= 4)).any()
    whole = launched(problem, config, inputs)
    few = launched(replace(problem, seqlen_q=4), config, inputs, seed=1)
    served = np.repeat(layout.queries <= 4, layout.queries)
    for (got,), (wanted,) in zip(few, whole):
        got, wanted = (x if x.shape[0] == len(served) else x.swapaxes(0, 1) for x in (got, wanted))
        assert np.isnan(got[~served].astype(np.float32)).all() and not np.isnan(got[served].astype(np.float32)).any()
        assert np.allclose(got[served].astype(np.float32), wanted[served].astype(np.float32), atol=0.01, rtol=0.01)
    blocks = all_blocks(layout)
    checked = expect(inputs, blocks[layout.queries[blocks[:, 0]] <= 4])
    filled = [np.where(np.isnan(x.astype(np.float32)), np.zeros((), x.dtype), x) for x in few]
    assert compare(problem, inputs, *filled, expected=checked).ok


def test_one_split_and_many_agree_and_repeat_bit_for_bit():
    problem = Problem.parse("decode-bf16-b5-h8x2-q6-k400-d64-causal-sinks-page16-packed")
    inputs = make_inputs(problem, "mixed", 4)
    default = KERNEL.default(problem, GPU).values
    results = [launched(problem, KERNEL.config(problem.static, {**default, "pieces": pieces}), inputs, seed)
               for pieces in (64, 4096) for seed in range(3)]
    for out, lse in results[1:3]:
        assert (out.view("u2") == results[0][0].view("u2")).all() and (lse.view("u4") == results[0][1].view("u4")).all()
    finite = np.isfinite(results[0][1])
    assert all(np.abs(lse - results[0][1])[finite].max() < 1e-4 for _, lse in results)
    assert all(compare(problem, inputs, out, lse).ok for out, lse in results)


def test_what_packed_inputs_hold():
    problem = Problem.parse("decode-bf16-b9-h2x1-q16-k90-d16-causal-packed")
    layout = Layout(problem, "large", 0)
    assert layout.queries.max() == 16 and layout.queries.min() == 0 and layout.lengths.min() == 0
    assert layout.rows == (1, layout.queries.sum()) and layout.shape(1, 16) == (9, 90, 1, 16)
    assert (layout.device_starts("query") == np.concatenate([[0], np.cumsum(layout.queries)])).all()
    inputs = make_inputs(problem, "masked_nan", 0)
    hidden = np.arange(90) >= inputs.layout.lengths[:, None]
    assert hidden.any() and np.isnan(inputs.k[hidden].astype(np.float32)).all()
    with pytest.raises(ProblemError, match="packed is for decode problems"):
        Problem.parse("forward-bf16-b9-h2x1-q16-k90-d16-causal-packed")


MIXED = ["bf16-b5-h4x2-q60-k300-d64-causal-page16", "fp16-b4-h6x2-q40-k150-d64x32-causal-left30-sinks-page3",
         "bf16-b3-h5x1-q33-k100-d40-left20-right3", "bf16-b6-h2x2-q90-k208-d64-causal"]


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("forward")])
@pytest.mark.parametrize("text", MIXED)
def test_decode_and_forward_share_a_mixed_batch(text, name):
    """One after the other, each writes the rows of its sequences and touches no other: over pages, and over a dense cache, which
    is one of a page for each sequence."""
    problem = Problem.parse(f"decode-{text}-packed")
    inputs = make_inputs(problem, "large", 3)
    layout, counts = inputs.layout, np.array([problem.seqlen_q, 1, 16, 17, 0, 5][:problem.batch])
    layout.queries, layout.query_starts = counts, np.concatenate([[0], np.cumsum(counts)])
    numbers = np.random.default_rng(1).standard_normal((*layout.rows, problem.heads_q, problem.head_dim)).astype(np.float32)
    inputs = replace(inputs, q=from_float32(np, 16 * numbers, problem.dtype))
    outputs = (Guarded(np, (*layout.rows, problem.heads_q, problem.head_dim_v), problem.out_dtype).array,
               Guarded(np, (1, problem.heads_q, layout.rows[1]), "fp32").array)
    few = replace(problem, seqlen_q=MAX_QUERIES)
    many = replace(problem, op="forward", packed_queries=False, kv="paged", page_size=problem.page_size or problem.seqlen_k)
    kernel = KERNELS[name]
    if reason := kernel.reject(many, GPU):
        pytest.skip(reason)
    layout.min_queries = MAX_QUERIES + 1
    for seed, (each, config) in enumerate(((few, KERNEL.default(few, GPU)), (many, kernel.default(many, GPU)))):
        simulation = simulator.simulate(each, config, inputs, *outputs, seed)
        assert simulation.ok, simulation.findings
    verdict = compare(problem, inputs, *outputs)
    assert verdict.ok, verdict.message
