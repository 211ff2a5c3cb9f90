"""Keys of a block of queries dealt out to several blocks: right results on the simulator, and when it is done."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_simulator import launched

from autotune.cuda import compile
from autotune import simulator
from autotune.core.gpu import by_name
from autotune.check.inputs import make_inputs
from autotune.kernels import KERNELS, config_from_text
from autotune.kernels.forward.splits import NUM_SPLITS
from autotune.core.problem import Problem
from autotune.cuda.render import render
from autotune.tuner.seeds import predicted

pytestmark = pytest.mark.slow

GPU = by_name("nvidia-h200")
KERNEL = KERNELS["forward_wgmma"]
SMALL = dict(num_warpgroups=1, block_heads=1, block_n=48, num_stages=2, q_stages=1, overlap=True, ping_pong=False,
             rescale_slack=8, integer_max=False, min_blocks_per_sm=1, split_keys=True, longest_first=True, head_group=4,
             persistent=False, num_splits=3)


def forward(text: str) -> Problem:
    return Problem.parse(f"forward-{text}")


def split(problem: Problem, **values):
    config = KERNEL.config(problem.static, {**SMALL, **values})
    assert KERNEL.illegal(problem.static, config, GPU) is None
    return config


# The simulator

CASES = [
    ("bf16-b1-h2x1-q70-k300-d64-causal", dict(num_splits=4)),
    ("fp16-b1-h1x1-q70-k100-d64", dict(num_splits=16)),  # more splits than tiles
    ("bf16-b1-h2x2-q100-k20-d64-causal", dict(num_splits=2)),  # rows that see no key, and one tile
    ("bf16-b2-h1x1-q65-k1-d40", dict(num_splits=2)),
    ("bf16-b1-h2x1-q130-k400-d64-left60-right8", dict(num_splits=2, num_warpgroups=2, persistent=True)),
    ("bf16-b1-h2x1-q70-k400-d64-causal-left200-sinks", dict(num_splits=3, rescale_slack=-1)),
    # a block has a head that is not there
    ("fp16-b1-h6x2-q40-k300-d40-causal-sinks", dict(num_splits=3, block_heads=4, persistent=True, q_stages=2)),
    ("bf16-b2-h3x1-q50-k200-d24x72-causal", dict(num_splits=2, block_heads=2, overlap=False, integer_max=True)),
    ("bf16-b1-h4x1-q9-k300-d72x32-softcap20-alibi-sinks", dict(num_splits=6, block_heads=4)),
    ("bf16-b1-h1x1-q300-k500-d128-causal", dict(num_splits=2, num_warpgroups=3, ping_pong=True, persistent=True, q_stages=2)),
]


@pytest.mark.parametrize("text, values", CASES, ids=[text for text, _ in CASES])
def test_splits_are_put_together(text, values):
    problem = forward(text)
    verdict = simulator.verify(problem, split(problem, **values), (0, 1, 2), ("random", "needles", "masked_nan"))
    assert verdict.ok, verdict.message


def test_the_order_of_blocks_does_not_reach_the_result():
    problem = forward("bf16-b1-h3x1-q150-k300-d64-causal-sinks")
    for persistent in (False, True):
        config = split(problem, num_splits=4, persistent=persistent)
        results = []
        for seed in range(5):
            out, lse, simulation = launched(problem, config, make_inputs(problem, "random", 5), seed)
            assert simulation.ok
            results.append((out.tobytes(), lse.tobytes()))
        assert len(set(results)) == 1


def test_splits_differ_from_the_whole_by_rounding_only():
    problem = forward("bf16-b1-h2x1-q90-k500-d64-causal-sinks")
    inputs = make_inputs(problem, "random", 1)
    whole = launched(problem, split(problem, split_keys=False, num_splits=1), inputs, 0)
    for num_splits in NUM_SPLITS[1:]:
        parts = launched(problem, split(problem, num_splits=num_splits), inputs, 0)
        assert np.allclose(parts[1], whole[1], rtol=0, atol=1e-5)
        assert np.abs(parts[0].astype(np.float32) - whole[0].astype(np.float32)).max() < 2e-2


MUTANTS = [  # (what is wrong, before, after)
    ("a split is left out", "int split = 0; split < p.num_splits", "int split = 1; split < p.num_splits"),
    ("the last split is left out", "if (split + s >= p.num_splits) continue;", "if (split + s >= p.num_splits - 1) continue;"),
    ("a split is merged twice", "workspace.row(split + s, row) + column", "workspace.row(split, row) + column"),
    ("maxima are not compared", "weight_of(parts[s].maximum, top)", "1.0f"),
    ("what was merged before is not weighted", "whole.sum = before * whole.sum", "whole.sum = whole.sum"),
    ("O is not weighted", "whole.o[c] = before * whole.o[c]", "whole.o[c] = whole.o[c]"),
    ("the sink counts in every split", "row_statistics(task.split, r), maximum, sum);",
     "row_statistics(task.split, r), maximum, sum + exp2_approx(-maximum));"),
    ("splits overlap by a tile", "tiles.end = each + int(split < longer);", "tiles.end = each + 1;"),
    ("splits leave a tile out", "tiles.end = each + int(split < longer);", "tiles.end = each;"),
    ("keys of the first split", "tiles.key_begin += begin * BLOCK_N;", ""),
    ("the last split sees keys of the one before", "max_of(mask.row_begin(queries[half]), tiles.own_key(tile))",
     "mask.row_begin(queries[half])"),
    ("rows that are not there are stored", "if (!task.work.exists(row)) continue;", ""),
    ("all splits in one slot", "workspace.row(task.split, r)", "workspace.row(0, r)"),
    ("the sum of one lane", "const float sum = row_sum(rows.sum[half]);", "const float sum = rows.sum[half];"),
    ("nobody waits for the splits", "wait_for_dependencies();\n    if (row", "if (row"),
    ("the sink is left out", "finish(whole, sink_logit_log2(p.sinks, p.sink_dtype, head)", "finish(whole, -INF"),
]


@pytest.mark.parametrize("before, after", [mutant[1:] for mutant in MUTANTS], ids=[mutant[0] for mutant in MUTANTS])
def test_wrong_merging_is_found(before, after):
    verdicts = []
    for features in ("causal-sinks", "causal-left90-sinks"):
        problem = forward(f"bf16-b1-h3x1-q70-k300-d64-{features}")
        config = split(problem, num_splits=2 if problem.mask == "window" else 4, block_heads=2, block_n=32)
        source = simulator.host_source(problem, config)
        assert source.count(before) == 1
        verdicts.append(simulator.verify(problem, config, (0, 1), ("random", "needles"), source=source.replace(before, after)))
    assert not all(verdict.ok for verdict in verdicts)


# The source


def test_without_splits_nothing_of_them_is_there():
    problem = forward("bf16-b1-h2x1-q70-k300-d64-causal")
    words = re.compile("split|combine|workspace|dependent", re.I)
    sources = {value: render(problem.static, split(problem, split_keys=value, num_splits=2 if value else 1), "sm_90a")
               for value in (False, True)}
    assert not words.search(sources[False]) and words.search(sources[True])
    assert sources[True].count('extern "C"') == 2


def test_configs_with_splits_do_not_spill_more_than_those_without():
    """The loader has few registers, and what it works out is one number more."""
    choose = random.Random(4)
    found = []
    while len(found) < 8:
        head_dim, mask = choose.choice((64, 96, 128, 192, 256)), choose.choice(("", "-causal", "-left500"))
        problem = forward(f"bf16-b1-h8x2-q500-k9000-d{head_dim}{mask}")
        drawn = {**KERNEL.draw(choose.choice), "split_keys": True, "num_splits": 2}  # sooner than from all of the space
        config = KERNEL.config(problem.static, drawn)
        if KERNEL.illegal(problem.static, config, GPU):
            continue
        whole = KERNEL.config(problem.static, {**config.values, "split_keys": False, "num_splits": 1})
        found.append((problem, config, whole))
    with ThreadPoolExecutor(2) as pool:
        for problem, config, whole in found:
            parts, plain = pool.map(lambda c, p=problem: compile.build(p.static, c, GPU).entries, (config, whole))
            assert parts["forward_combine"].spill_bytes == 0
            assert parts["forward_wgmma"].spill_bytes <= plain["forward_wgmma"].spill_bytes, f"{problem}: {config}"


@pytest.mark.parametrize("text", ["bf16-b1-h8x8-q512-k8192-d128-causal", "bf16-b1-h16x16-q128-k16384-d64",
                                  "fp16-b1-h4x1-q300-k20000-d256", "bf16-b1-h4x4-q400-k9000-d192x128-causal-left4095"])
def test_defaults_with_splits_compile_without_a_flaw(text):
    problem = forward(text)
    config = KERNEL.default(problem, GPU)
    assert config["split_keys"] and compile.flaw(compile.build(problem.static, config, GPU)) is None


# When it is done


def test_defaults_split_where_blocks_leave_a_third_of_the_gpu_idle():
    for text, num_splits in (
            ("b1-h8x8-q512-k8192-d128-causal", 4), ("b1-h16x16-q128-k16384-d64", 8), ("b1-h8x8-q512-k1024-d128", 2),
            ("b1-h8x8-q512-k512-d128", 1), ("b1-h32x8-q512-k32768-d128-causal", 1), ("b4-h8x8-q512-k8192-d128", 1),
            ("b1-h32x8-q2048-k32768-d128-causal", 1), ("b1-h1x1-q64-k100000-d64", 32),
            ("b1-h8x8-q512-k8192-d128-causal-left127", 1), ("b2-h8x2-q64-k4096-d128-causal-varlen", 1)):
        problem = forward(f"bf16-{text}")
        config = KERNEL.default(problem, GPU)
        assert (config["num_splits"], config["split_keys"]) == (num_splits, num_splits > 1), text
        steps = KERNEL.plan(problem, config)
        assert len(steps) == 1 + (num_splits > 1) and steps[0].grid == KERNEL.blocks(problem, config) * num_splits
        rows = problem.batch * problem.heads_q * problem.seqlen_q
        assert KERNEL.workspace_bytes(problem, config) == (num_splits > 1) * 4 * num_splits * rows * (problem.head_dim_v + 2)


def test_splits_are_searched_where_the_gpu_is_not_full():
    few, many = forward("bf16-b1-h8x8-q512-k8192-d128-causal"), forward("bf16-b1-h32x8-q8192-k8192-d128-causal")
    space = KERNEL.space(few, GPU)
    assert KERNEL.default(few, GPU) in set(space) and not any(config["split_keys"] for config in KERNEL.space(many, GPU))
    assert all((config["num_splits"] > 1) == config["split_keys"] for config in space)
    assert {config["num_splits"] for config in space} >= {1, 2, 3, 4, 6, 8}
    assert len(space) < 1.6 * sum(not config["split_keys"] for config in space)
    for config in random.Random(0).sample([config for config in space if config["split_keys"]], 50):
        assert KERNEL.illegal(few.static, config, GPU) is None
    first = predicted(KERNEL, few, GPU, space, 10)
    assert {config["split_keys"] for config in first} == {False, True} or first[0]["split_keys"]


def test_estimates_prefer_splits_where_most_of_the_gpu_would_idle():
    for text, wins in (("b1-h8x8-q512-k8192-d128-causal", True), ("b1-h16x16-q128-k16384-d64", True),
                       ("b8-h32x8-q2048-k8192-d128", False)):
        problem = forward(f"bf16-{text}")
        base = {**KERNEL.default(problem, GPU).values, "split_keys": False, "num_splits": 1}
        whole, parts = (KERNEL.config(problem.static, {**base, "split_keys": n > 1, "num_splits": n}) for n in (1, 4))
        assert (KERNEL.account_us(problem, parts, GPU) < KERNEL.account_us(problem, whole, GPU)) == wins


def test_what_goes_together_and_what_does_not():
    static, packed = (forward(f"bf16-b2-h2x1-q70-k300-d64{kv}").static for kv in ("", "-varlen"))
    parts = split(forward("bf16-b2-h2x1-q70-k300-d64"))
    said = [KERNEL.illegal(static, KERNEL.config(static, {**SMALL, **values}), GPU)
            for values in (dict(num_splits=1), dict(split_keys=False))]
    assert said[0].startswith("num_splits is 1; with split_keys it must be 2 or 3 or ")
    assert said[1] == "num_splits is 3; without split_keys it must be 1"
    assert KERNEL.illegal(packed, parts, GPU) == "keys of packed sequences are not split"
    assert config_from_text(parts.text) == parts
    whole = split(forward("bf16-b2-h2x1-q70-k300-d64"), split_keys=False, num_splits=1)
    assert config_from_text(whole.text.replace(" split_keys=false", "").replace(" num_splits=1", "")) == whole  # from before


def test_splits_follow_from_sizes():
    few = forward("bf16-b1-h8x8-q512-k8192-d128-causal")
    fewer, many = forward("bf16-b1-h8x8-q128-k8192-d128-causal"), forward("bf16-b1-h8x8-q4096-k8192-d128-causal")
    parts = KERNEL.default(few, GPU)
    whole = KERNEL.default(many, GPU)
    assert KERNEL.fitted(fewer, parts, GPU)["num_splits"] == 16 and KERNEL.fitted(few, parts, GPU) == parts
    assert KERNEL.fitted(many, parts, GPU)["num_splits"] == 2
    assert KERNEL.fitted(many, whole, GPU) == KERNEL.fitted(few, whole, GPU) == whole
    assert KERNEL.account_us(few, parts, GPU) < KERNEL.account_us(few, whole, GPU)  # most of the GPU would idle
