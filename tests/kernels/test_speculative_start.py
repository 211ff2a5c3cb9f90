"""Blocks over pages that begin before they know what stands there: which configs may, and that no wrong guess is taken."""

import re

import pytest

from autotune import simulator
from autotune.core.gpu import by_name
from autotune.kernels import KERNELS
from autotune.core.problem import Problem
from autotune.cuda.render import render

pytestmark = pytest.mark.slow

H200, A100 = by_name("nvidia-h200"), by_name("nvidia-a100-sxm-80gb")
KERNEL = KERNELS["decode_mma"]
PAGED = "decode-bf16-b3-h8x2-q1-k300-d64-page16"


def config(problem, **values):
    config = KERNEL.config(problem.static, {**KERNEL.default(problem, H200).values, "speculative_start": True, **values})
    assert KERNEL.illegal(problem.static, config, H200) is None
    return config


def verified(problem, chosen, seeds=(0, 1, 2, 3), kinds=("random", "masked_nan"), **keywords):
    return simulator.verify(problem, chosen, seeds, kinds, **keywords)


# Which configs


@pytest.mark.parametrize("text, gpu, chosen", [
    ("b1-h32x8-q1-k4096-d128-page16", H200, True), ("b8-h32x8-q1-k2048-d128-page16", H200, True),
    ("b1-h64x8-q1-k8192-d64-left127-page16", H200, True), ("b32-h32x8-q1-k8192-d128-page16", H200, False),
    ("b64-h8x1-q1-k8192-d128-page16", H200, False), ("b4-h32x8-q4-k900-d128-causal-page16-packed", H200, False),
    ("b1-h32x8-q1-k4096-d128", H200, False), ("b1-h32x8-q1-k4096-d128-page16", A100, False)])
def test_the_default_begins_early_over_pages_where_sequences_are_few(text, gpu, chosen):
    problem = Problem.parse(f"decode-bf16-{text}")
    default = KERNEL.default(problem, gpu)
    assert default["speculative_start"] is chosen and KERNEL.illegal(problem.static, default, gpu) is None


def test_it_needs_pages_and_dependent_launch():
    problem, dense = Problem.parse(PAGED), Problem.parse("decode-bf16-b3-h8x2-q1-k300-d64")
    values = config(problem).values
    on_dense = KERNEL.config(dense.static, values)
    assert KERNEL.illegal(dense.static, on_dense, H200) == "speculative_start is for a cache of pages"
    late = KERNEL.config(problem.static, {**values, "dependent_launch": False, "prefetch_tiles": 0, "trigger_tiles": 0})
    assert KERNEL.illegal(problem.static, late, H200) == "speculative_start needs dependent_launch"
    assert not any(c["speculative_start"] for c in KERNEL.space(dense, H200))
    assert {c["speculative_start"] for c in KERNEL.space(problem, H200)} == {False, True}


def test_configs_without_it_begin_when_they_know():
    problem = Problem.parse("decode-bf16-b32-h32x8-q1-k8192-d128-page16")
    raw = {name: value for name, value in KERNEL.default(problem, H200).values.items() if name != "speculative_start"}
    assert KERNEL.typed_config(raw, "here") == KERNEL.default(problem, H200)


def test_other_sources_have_nothing_of_it():
    problem = Problem.parse(PAGED)
    with_it, without = (render(problem.static, config(problem, speculative_start=value), "sm_90") for value in (True, False))
    words = re.compile("guess_cut|struct Start|own_length|SPECULATIVE")
    assert words.search(with_it) and not words.search(without) and "SPECULATIVE_START" not in with_it


# What comes out, on the simulator, where of a block's guesses none, few or many are wrong


@pytest.mark.parametrize("text, values", [
    (PAGED, {}), (PAGED, dict(q_in_registers=False, prefetch_tiles=2)),
    (PAGED, dict(num_stages=3, num_warps=2, prefetch_tiles=0)),
    (PAGED, dict(block_n=32, last_block_merges=False)),
    ("decode-bf16-b3-h4x2-q1-k200-d64-page3", dict(num_warps=2, pieces=64)),
    ("decode-fp16-b2-h10x2-q4-k300-d40-causal-page1", dict(num_warps=2)),
    ("decode-bf16-b3-h8x1-q3-k100-d64-causal-left9-sinks-page16", dict(num_warps=1)),
    ("decode-bf16-b3-h4x2-q2-k100-d64-causal-softcap20-alibi-page19", dict(num_warps=2)),
    ("decode-bf16-b3-h6x3-q1-k200-d64-page16-kve4m3", dict(block_heads_kv=2, q_in_registers=False, num_warps=2)),
    ("decode-bf16-b3-h6x3-q1-k200-d128-page64-kve4m3", dict(block_heads_kv=1)),
    ("decode-bf16-b32-h2x1-q1-k100-d64-page16", dict(num_warps=1, pieces=64)),
    ("decode-bf16-b33-h2x1-q1-k60-d64-page16", dict(num_warps=1, pieces=64)),  # more than a lane each
    ("decode-bf16-b3-h4x2-q3-k100-d64-causal-page16-packed", dict(num_warps=2))])  # queries of their own
def test_results_are_right_whatever_was_guessed(text, values):
    problem = Problem.parse(text)
    result = verified(problem, config(problem, **values), kinds=("random", "masked_nan", "mixed"))
    assert result.ok, result.message


ALL = "known || !any_in_warp(length_now != length || !same_pages(taken, now))"
ANEW = "            copy_async_wait<0>();\n            sync_warp();\n        }"
FEW = dict(num_warps=2, pieces=64)
LAST = "for (int i = 0; i <= NUM_STAGES; ++i)\n#pragma unroll\n            for (int n = 0; n < KvRows::ENTRIES"
MUTANTS = [
    ("whatever was guessed is taken", PAGED, FEW, ALL, "true"),
    ("lengths are not looked at again", PAGED, FEW, ALL, "known || !any_in_warp(!same_pages(taken, now))"),
    ("pages are not looked at again", PAGED, FEW, ALL, "known || !any_in_warp(length_now != length)"),
    ("only a lane's own pages count", PAGED, FEW, "!any_in_warp(length_now != length || !same_pages(taken, now))",
     "(length_now == length && same_pages(taken, now))"),
    ("pages are any number", PAGED, FEW, "max_of(0, min_of(load_guess(entry), pages - 1))", "load_guess(entry)"),
    ("what was started in vain may come late", PAGED, FEW, ANEW, "        }"),
    ("the last tile's pages do not count", "decode-bf16-b2-h8x8-q1-k400-d64-page16", dict(num_warps=1, num_stages=2, pieces=64),
     LAST, LAST.replace("<= NUM", "< NUM")),
    ("pages of the first 32 keys count", "decode-bf16-b2-h2x2-q1-k300-d64-page16", dict(block_n=64, num_warps=1, pieces=64),
     "for (int n = 0; n < KvRows::ENTRIES; ++n) same", "for (int n = 0; n < 1; ++n) same"),
    ("the piece is guessed for more sequences than lanes", "decode-bf16-b33-h2x1-q1-k60-d64-page16", FEW,
     "p.batch <= WARP_SIZE", "true"),
    ("queries are guessed too", "decode-bf16-b3-h4x2-q3-k100-d64-causal-page16-packed", FEW,
     "p.batch <= WARP_SIZE && !p.query_starts;", "p.batch <= WARP_SIZE;"),
]


@pytest.mark.parametrize("text, values, old, new", [mutant[1:] for mutant in MUTANTS], ids=[mutant[0] for mutant in MUTANTS])
def test_a_wrong_guess_that_is_taken_is_noticed(text, values, old, new):
    problem = Problem.parse(text)
    source = simulator.host_source(problem, chosen := config(problem, **values))
    assert source.count(old) == 1
    assert not verified(problem, chosen, range(6), ("random", "masked_nan", "mixed"), source=source.replace(old, new)).ok


def test_a_right_guess_is_taken(monkeypatch):
    """Launches that come late guess nothing wrong, so that none begins anew."""
    plan = type(KERNEL).plan
    monkeypatch.setattr(type(KERNEL), "plan", lambda *of: [step._replace(dependent=False) for step in plan(*of)])
    problem = Problem.parse("decode-bf16-b2-h4x4-q1-k400-d64-page16")
    source = simulator.host_source(problem, chosen := config(problem, block_n=16, num_warps=1, num_stages=2, pieces=64))
    assert source.count(ANEW) == 1
    trapped = source.replace(ANEW, "            __builtin_trap();\n        }")
    assert verified(problem, chosen, (0, 1), source=trapped).ok
    monkeypatch.undo()
    assert not verified(problem, chosen, range(8), ("random",), source=trapped).ok
