"""The backward kernels: legal defaults, no spills, and right on the simulator with every feature."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from autotune import simulator
from autotune.check.gradients import make_gradient_inputs
from autotune.core.gpu import by_name, catalogue
from autotune.core.problem import Problem
from autotune.cuda import compile
from autotune.cuda.render import render
from autotune.kernels import KERNELS, candidates, default_config

pytestmark = pytest.mark.slow

H200 = by_name("nvidia-h200")
FUSED, WGMMA, MMA = (KERNELS[f"backward_{name}"] for name in ("fused", "wgmma", "mma"))
MASKS = ("", "-causal", "-left100-right50", "-causal-softcap30-alibi", "-causal-left127-varlen", "-softcap20-varlen-alibi")


def problem(text: str) -> Problem:
    return Problem.parse(f"backward-{text}").simplified()


@pytest.mark.parametrize("gpu", catalogue().values(), ids=list(catalogue()))
def test_every_default_is_legal(gpu):
    for head_dim in range(8, 257, 8):
        for head_dim_v in {head_dim, 16, 128, 256}:
            for mask in MASKS:
                asked = problem(f"bf16-b2-h8x2-q500-k500-d{head_dim}x{head_dim_v}{mask}")
                for kernel in candidates(asked, gpu):
                    config = kernel.default(asked, gpu)
                    assert kernel.illegal(asked.static, config, gpu) is None, f"{config} for {asked} on {gpu.name}"


def test_who_serves_what():
    causal = problem("bf16-b1-h8x8-q512-k512-d128-causal")
    assert default_config(causal, H200).kernel == "backward_wgmma"  # few keys a query: sums of dQ cost more than two products
    assert default_config(problem("bf16-b1-h8x8-q4096-k4096-d128-causal"), H200).kernel == "backward_fused"
    assert default_config(problem("bf16-b1-h8x8-q65536-k65536-d64-left127-right0"), H200).kernel == "backward_wgmma"
    same_bits = replace(causal, deterministic=True)
    assert default_config(same_bits, H200).kernel == "backward_wgmma" and "order" in FUSED.reject(same_bits, H200)
    assert same_bits == Problem.parse(same_bits.text) and same_bits.text.endswith("-deterministic")
    assert default_config(causal, by_name("nvidia-a100-sxm-80gb")).kernel == "backward_mma"
    assert "fp32" in MMA.reject(problem("fp32-b1-h1x1-q64-k64-d64"), H200)
    assert "multiples of 8" in MMA.reject(problem("bf16-b1-h1x1-q64-k64-d20"), H200)
    assert "forward" in MMA.reject(Problem.parse("forward-bf16-b1-h1x1-q64-k64-d64"), H200)
    assert "paged" in MMA.reject(problem("bf16-b1-h1x1-q64-k64-d64-page16"), H200)
    assert "8.0" in MMA.reject(causal, by_name("tesla-t4"))


@pytest.mark.parametrize("kernel, gpu, text", [
    *(("backward_wgmma", "nvidia-h200", text) for text in
      ("bf16-b1-h16x16-q4096-k4096-d64-causal", "fp16-b1-h16x16-q4096-k4096-d128", "bf16-b1-h8x8-q4096-k4096-d256-causal",
       "bf16-b1-h16x16-q4096-k4096-d192x128-causal", "bf16-b1-h64x8-q4096-k4096-d64-causal-left127",
       "bf16-b4-h16x4-q4096-k4096-d128-causal-varlen", "bf16-b1-h16x4-q4096-k4096-d80-softcap30")),
    *(("backward_fused", "nvidia-h200", text) for text in
      ("bf16-b1-h16x16-q4096-k4096-d64-causal", "fp16-b1-h16x16-q4096-k4096-d128", "bf16-b4-h16x4-q4096-k4096-d64-causal-varlen",
       "bf16-b1-h16x16-q4096-k4096-d80-causal-left1023", "bf16-b1-h16x4-q4096-k4096-d64-softcap30")),
    *(("backward_mma", gpu, text) for gpu in ("nvidia-h200", "nvidia-a100-sxm-80gb") for text in
      ("bf16-b1-h16x16-q4096-k4096-d64-causal", "fp16-b1-h16x16-q4096-k4096-d128", "bf16-b1-h8x8-q4096-k4096-d256-causal",
       "bf16-b4-h16x4-q4096-k4096-d128-causal-varlen-alibi"))])
def test_defaults_compile_without_a_flaw(kernel, gpu, text):
    asked, gpu = problem(text), by_name(gpu)
    config = KERNELS[kernel].default(asked, gpu)
    assert compile.flaw(compile.build(asked.static, config, gpu)) is None, config


SIMULATED = [
    "bf16-b2-h3x1-q90-k70-d64-left20-right9-sinks",
    "fp16-b1-h2x2-q100-k130-d72x40-softcap20-alibi",
    "bf16-b3-h2x1-q100-k150-d32-causal-sinks-varlen",
    "bf16-b1-h2x1-q130-k40-d16x24-causal-sinks",
    "bf16-b3-h4x2-q70-k70-d64-left17-varlen-alibi-softcap5",
    "bf16-b1-h5x1-q60-k150-d128-causal",
    "fp16-b1-h1x1-q65-k90-d256-left30",
]


@pytest.mark.parametrize("kernel", [FUSED, WGMMA, MMA], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("text", SIMULATED)
def test_right_on_the_simulator(kernel, text):
    asked = problem(text)
    if reason := kernel.reject(asked, H200):
        pytest.skip(reason)
    config = kernel.default(asked, H200)
    verdict = simulator.verify(asked, config, seeds=range(2), kinds=["mixed", "masked_nan", "large"])
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("values", [dict(key_stages=1, query_stages=1),
                                    dict(key_rows=128, key_queries=16, query_rows=128, query_keys=96),
                                    dict(column_parts=2, key_queries=32)])
def test_mma_parameters_on_the_simulator(values):
    asked = problem("bf16-b1-h2x1-q150-k140-d80-causal-sinks")
    config = MMA.config(asked.static, {**MMA.default(asked, H200).values, **values})
    assert MMA.illegal(asked.static, config, H200) is None
    assert (verdict := simulator.verify(asked, config, seeds=range(2), kinds=["mixed", "needles"])).ok, verdict.message


@pytest.mark.parametrize("values", [dict(key_groups=1, query_groups=1, key_stages=1, query_stages=1, ahead=0),
                                    dict(key_queries=16, query_groups=3, query_keys=32, key_stages=3, query_stages=3, ahead=2),
                                    dict(roles=2, key_queries=48, key_stages=2, query_stages=2, query_keys=112, ahead=1)])
def test_wgmma_parameters_on_the_simulator(values):
    asked = problem("bf16-b1-h2x1-q210-k200-d72-causal-sinks")
    config = WGMMA.config(asked.static, {**WGMMA.default(asked, H200).values, **values})
    assert WGMMA.illegal(asked.static, config, H200) is None
    assert (verdict := simulator.verify(asked, config, seeds=range(2), kinds=["mixed"])).ok, verdict.message


def roles_of(asked, **values):
    shared = {"roles": 2, "key_stages": 2, "key_queries": 32}
    return WGMMA.config(asked.static, {**WGMMA.default(asked, H200).values, **shared, **values})


@pytest.mark.parametrize("text", ["fp16-b1-h1x1-q70-k65-d256-softcap20", "bf16-b2-h2x1-q90-k60-d136x200-left30-varlen-alibi"])
def test_roles_share_keys_of_wide_heads(text):
    asked = problem(text)
    assert WGMMA.default(asked, H200)["roles"] == 2
    assert (verdict := simulator.verify(asked, WGMMA.default(asked, H200), kinds=["mixed", "masked_nan"])).ok, verdict.message


def test_a_handover_without_its_barrier_is_found():
    asked = problem("bf16-b1-h1x1-q200-k64-d32")
    config, given = roles_of(asked), make_gradient_inputs(asked, "random", 0)
    source, line = simulator.host_source(asked, config), "named_barrier_sync(FILLED + buffer, THREADS);"
    assert source.count(line) == 1
    mutant = source.replace(line, line.replace("_sync", "_arrive"))  # P is read before it is there
    found = [simulator.simulate(asked, config, given, given.empty_gradients(), None, seed, source=mutant) for seed in range(3)]
    assert any(not simulation.ok for simulation in found)


def test_buffers_of_a_handover_are_read_before_they_are_written_again():
    asked = problem("bf16-b1-h2x1-q300-k64-d16")
    given = make_gradient_inputs(asked, "random", 0)
    for seed in range(6):
        simulation = simulator.simulate(asked, roles_of(asked), given, given.empty_gradients(), None, seed)
        assert simulation.ok, simulation.findings[0]
    assert "key_stages of 2" in WGMMA.illegal(asked.static, roles_of(asked, key_stages=3), H200)


@pytest.mark.parametrize("values", [dict(key_groups=1, dq_parts=1, key_stages=1, ahead=0), dict(dq_parts=1, ahead=1),
                                    dict(dq_parts=2, key_stages=3, ahead=2)])
def test_fused_parameters_on_the_simulator(values):
    asked = problem("bf16-b1-h2x1-q210-k200-d72-causal-sinks")
    config = FUSED.config(asked.static, {**FUSED.default(asked, H200).values, **values})
    assert FUSED.illegal(asked.static, config, H200) is None
    assert (verdict := simulator.verify(asked, config, seeds=range(2), kinds=["mixed"])).ok, verdict.message


def test_three_groups_take_turns():
    asked = problem("bf16-b1-h2x1-q300-k250-d32-causal")
    config = FUSED.config(asked.static, {**FUSED.default(asked, H200).values, "key_groups": 3, "dq_parts": 1})
    assert FUSED.illegal(asked.static, config, H200) is None
    assert (verdict := simulator.verify(asked, config, seeds=range(3), kinds=["mixed"])).ok, verdict.message


@pytest.mark.parametrize("text", ["bf16-b1-h1x1-q0-k20-d64", "bf16-b1-h1x1-q20-k0-d64-sinks"])
def test_nothing_to_do(text):
    asked = problem(text)
    assert (verdict := simulator.verify(asked, default_config(asked, H200), kinds=["random"])).ok, verdict.message


def test_results_are_the_same_bits_every_time():
    asked = problem("bf16-b2-h4x2-q100-k150-d64-causal-sinks-varlen")
    given = make_gradient_inputs(asked, "mixed", 1)
    for kernel in (WGMMA, MMA):
        seen = set()
        for seed in range(3):
            gradients = given.empty_gradients()
            assert simulator.simulate(asked, kernel.default(asked, H200), given, gradients, None, seed).ok
            seen.add(b"".join(np.ascontiguousarray(array).tobytes() for array in gradients))
        assert len(seen) == 1, kernel.name


def test_a_feature_that_is_lacking_leaves_no_trace():
    for kernel in (FUSED, WGMMA, MMA):
        plain = problem("bf16-b1-h2x1-q100-k100-d64-causal")
        source = render(plain.static, kernel.default(plain, H200), kernel.target(H200))
        for word in ("softcap", "slack", "alibi", "slope", "cu_seqlens", "p.window_left"):
            assert word not in source, (kernel.name, word)


def test_half_of_the_space_at_most_spills():
    """A few configs at random: rules let through little that does not compile."""
    asked = problem("bf16-b1-h8x8-q4096-k4096-d128-causal")
    random = np.random.default_rng(7)
    for kernel in (FUSED, WGMMA, MMA):
        space = kernel.space(asked, H200)
        chosen = [space[n] for n in random.choice(len(space), 6, replace=False)]
        with ThreadPoolExecutor(2) as pool:
            flaws = list(pool.map(lambda config: compile.flaw(compile.build(asked.static, config, H200)), chosen))
        assert sum(flaw is not None for flaw in flaws) <= 3, list(zip(chosen, flaws))
