"""The forward kernels' defaults, rules and estimates: what compiles without spilling, what was measured, what is legal."""

import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

from autotune.cuda import compile
from autotune import simulator
from autotune.core.gpu import by_name, catalogue
from autotune.kernels import KERNELS, candidates, config_from_dict, config_from_text, default_config
from autotune.kernels.base import params_bytes
from autotune.core.problem import Problem
from autotune.cuda.render import render

pytestmark = pytest.mark.slow

H200, T4 = by_name("nvidia-h200"), by_name("tesla-t4")
WGMMA, MMA = KERNELS["forward_wgmma"], KERNELS["forward_mma"]
RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "forward-mma-h200.yaml"
MASKS = ("", "-causal", "-causal-left127", "-causal-left4095", "-left100-right50")


def problem(text: str) -> Problem:
    return Problem.parse(f"forward-{text}")


@pytest.mark.parametrize("gpu", catalogue().values(), ids=list(catalogue()))
def test_every_default_is_legal(gpu):
    for head_dim in range(8, 257, 8):
        for heads in ("h16x16", "h64x8", "h6x1"):
            for mask in MASKS:
                for sizes in ("q8192-k8192", "q1-k4096", "q512-k512"):
                    for dtype in ("bf16", "fp16"):
                        asked = problem(f"{dtype}-b2-{heads}-{sizes}-d{head_dim}{mask}")
                        for kernel in candidates(asked, gpu):
                            config = kernel.default(asked, gpu)
                            assert kernel.illegal(asked.static, config, gpu) is None, f"{config} for {asked} on {gpu.name}"


def test_hopper_is_served_by_its_own_kernel_and_others_are_not():
    causal = problem("bf16-b1-h32x8-q8192-k8192-d128-causal")
    chosen = {gpu.name: (default_config(causal, gpu).kernel, gpu.arch) for gpu in catalogue().values()}
    assert {kernel for kernel, arch in chosen.values() if arch == 90} == {"forward_wgmma"}
    assert {kernel for kernel, arch in chosen.values() if arch >= 80 and arch != 90} == {"forward_mma"}
    assert {kernel for kernel, arch in chosen.values() if arch == 75} == {"forward_simt"}  # bf16; half precision stands below
    assert "9.0" in WGMMA.reject(causal, by_name("nvidia-a100-sxm-80gb"))
    assert default_config(problem("fp32-b1-h1x1-q64-k64-d64"), H200).kernel == "forward_simt"


@pytest.mark.parametrize("text", [
    "bf16-b1-h16x16-q8192-k8192-d64-causal", "fp16-b1-h16x16-q8192-k8192-d128", "bf16-b1-h64x8-q8192-k8192-d64-causal-left127",
    "bf16-b1-h16x16-q8192-k8192-d256-causal", "bf16-b1-h8x8-q8192-k8192-d256-causal-left4095", "bf16-b1-h8x1-q512-k512-d192x128",
    "bf16-b1-h16x16-q8192-k8192-d64-softcap30", "bf16-b1-h16x16-q8192-k8192-d64-causal-softcap30-alibi",
    "bf16-b1-h64x8-q8192-k8192-d128-alibi", "bf16-b1-h64x8-q8192-k8192-d256-causal-alibi"])
def test_defaults_for_hopper_compile_without_a_flaw(text):
    asked = problem(text)
    with ThreadPoolExecutor(2) as pool:
        for binary in pool.map(lambda kernel: compile.build(asked.static, kernel.default(asked, H200), H200), (WGMMA, MMA)):
            assert compile.flaw(binary) is None


@pytest.mark.parametrize("features", ["d64-causal", "d128", "d40-causal-left127", "d192x128-causal", "d256-causal-left4095",
                                      "d256-causal-left127-softcap30-alibi", "d128-causal-varlen", "d256-causal-page16"])
def test_defaults_for_turing_compile_without_a_flaw(features):
    asked = problem(f"fp16-b1-h16x8-q8192-k8192-{features}")
    config = MMA.default(asked, T4)
    assert default_config(asked, T4) == config and config["turing"] and MMA.target(T4) == "sm_75"
    source = render(asked.static, config, "sm_75")
    assert compile.flaw(compile.compile_source(source, "sm_75")) is None
    with pytest.raises(compile.CompileError):  # the parameter decides, not the arch that is compiled for
        compile.compile_source(source.replace("TURING = true", "TURING = false"), "sm_75")
    assert "__CUDA_ARCH__" not in source


def test_instructions_of_turing_are_chosen_by_a_parameter():
    half, brain = problem("fp16-b1-h8x8-q512-k512-d64-causal"), problem("bf16-b1-h8x8-q512-k512-d64-causal")
    turing = MMA.default(half, T4)
    ampere = MMA.config(half.static, {**turing.values, "turing": False})
    assert MMA.illegal(half.static, turing, H200) is None and MMA.illegal(half.static, ampere, H200) is None
    assert MMA.illegal(half.static, ampere, T4) == "without turing it needs compute capability 8.0, the GPU has 7.5"
    assert MMA.illegal(brain.static, turing, H200) == "with turing it computes fp16, not bf16"
    assert MMA.reject(half, T4) is None and MMA.reject(brain, T4) == "on compute capability 7.5 it computes fp16, not bf16"
    assert config_from_text(turing.text) == turing
    assert config_from_text(ampere.text.replace(" turing=false", "")) == ampere  # configs from before there was a choice
    for gpu in (T4, H200):
        space = MMA.space(half, gpu)
        assert {config["turing"] for config in space} == {gpu is T4} and MMA.default(half, gpu) in set(space)


def test_the_body_for_hopper_is_what_its_config_says():
    asked = problem("bf16-b1-h16x16-q8192-k8192-d128-causal")
    config = WGMMA.default(asked, H200)
    body = render(asked.static, config, WGMMA.target(H200))
    assert WGMMA.target(H200) == "sm_90a" and "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in body
    assert f"SMEM_BYTES = {config['smem_bytes']};" in body and "setmaxnreg" in body
    struct = re.search(r"struct Params \{\n(.*?)\};", body, re.S)[1].splitlines()
    assert [line.split(";")[0].strip() for line in struct[:3]] == [f"TensorMap {name}_map" for name in "qkv"]
    assert params_bytes(WGMMA.fields) <= 4096


# Rules: what proved good stays legal

GOOD = [  # (D and mask, config) that were fastest on an H200
    ("d128-causal", "num_warpgroups=2 block_heads=1 block_n=128 num_stages=3 q_stages=1 overlap=true ping_pong=false"),
    ("d128-causal", "num_warpgroups=3 block_heads=1 block_n=80 num_stages=3 q_stages=1 overlap=true ping_pong=false"),
    ("d128", "num_warpgroups=2 block_heads=1 block_n=176 num_stages=2 q_stages=1 overlap=true ping_pong=true"),
    ("d64-causal", "num_warpgroups=3 block_heads=1 block_n=128 num_stages=2 q_stages=1 overlap=true ping_pong=true"),
    ("d64-causal-left127", "num_warpgroups=3 block_heads=8 block_n=80 num_stages=2 q_stages=2 overlap=false ping_pong=false"),
    ("d64-causal-left127", "num_warpgroups=1 block_heads=8 block_n=48 num_stages=3 q_stages=2 overlap=true ping_pong=false"),
]


@pytest.mark.parametrize("features, text", GOOD)
def test_what_was_fastest_on_an_h200_is_legal(features, text):
    static = problem(f"bf16-b1-h64x8-q8192-k8192-{features}").static
    pairs = dict(pair.split("=") for pair in text.split())
    values = {name: value == "true" if value in ("true", "false") else int(value) for name, value in pairs.items()}
    launch = next(iter(WGMMA.launch_combinations({"split_keys": False})))
    for slack in (-1, 8):
        config = WGMMA.config(static, {**values, "rescale_slack": slack, "integer_max": slack > 0, "min_blocks_per_sm": 1,
                                       **launch})
        assert config_from_text(config.text) == config and WGMMA.illegal(static, config, H200) is None


def test_the_benchmark_of_forward_mma_runs_what_its_result_says_and_that_is_legal():
    spec = importlib.util.spec_from_file_location("forward_mma_benchmark", RESULT.parents[1] / "forward_mma.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    result = yaml.safe_load(RESULT.read_text())
    assert script.configs() == {Problem.parse(text): config_from_dict(entry["config"], text)
                                for text, entry in result["problems"].items()}
    assert len(script.configs()) == 4 and result["command"] == "python benchmarks/forward_mma.py --out " + \
        RESULT.relative_to(RESULT.parents[2]).as_posix()
    for asked, config in script.configs().items():
        assert config.kernel == "forward_mma" and MMA.illegal(asked.static, config, H200) is None


def test_rules_refuse_what_cannot_fit():
    static = problem("bf16-b1-h8x8-q64-k64-d256").static
    searched = dict(num_warpgroups=3, block_heads=1, block_n=32, num_stages=2, q_stages=1, overlap=True, ping_pong=True,
                    rescale_slack=8, integer_max=False, min_blocks_per_sm=1, longest_first=True, head_group=1,
                    persistent=False)
    for change, said in ((dict(), "registers a thread are live"), (dict(num_warpgroups=1), "two groups to take turns"),
                         (dict(num_warpgroups=2, block_n=256), "bytes of shared memory"),
                         (dict(num_warpgroups=2, min_blocks_per_sm=2), "one group each")):
        assert said in WGMMA.illegal(static, WGMMA.config(static, {**searched, **change}), H200)


def test_no_more_heads_share_a_block_than_share_keys():
    for heads, most in (("h2x2", 1), ("h6x2", 4), ("h16x2", 8)):
        asked = problem(f"bf16-b1-{heads}-q512-k512-d256-causal")
        for kernel in (WGMMA, MMA):
            space = kernel.space(asked, H200)
            assert max(config["block_heads"] for config in space) == most and kernel.default(asked, H200) in set(space)


# Estimates

TIMES = yaml.safe_load((Path(__file__).parents[1] / "data" / "forward_times.yaml").read_text())


def ranks(values) -> np.ndarray:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


@pytest.mark.parametrize("measured", TIMES, ids=lambda measured: measured["problem"])
def test_the_estimate_ranks_configs_as_an_h200_does(measured):
    asked, kernel = Problem.parse(measured["problem"]), KERNELS[measured["kernel"]]
    default = kernel.default(asked, H200)
    times, estimates = [], []
    for time_us, registers, text in measured["times"]:
        pairs = dict(pair.split("=") for pair in text.split())
        values = {name: value == "true" if value in ("true", "false") else int(value) for name, value in pairs.items()}
        config = kernel.config(asked.static, {**default.values, **values})
        times.append(time_us)
        estimates.append(kernel.estimate_us(asked, config, H200, registers))
    correlation = np.corrcoef(ranks(times), ranks(estimates))[0, 1]
    assert correlation > 0.6 and 0.7 < np.median(np.array(estimates) / np.array(times)) < 1.3


def test_estimates_compare_kernels():
    """What the search and predictions go by: on Hopper, wgmma before mma.sync before the CUDA cores."""
    asked = problem("bf16-b1-h16x16-q8192-k8192-d128-causal")
    times = [kernel.estimate_us(asked, kernel.default(asked, H200), H200, 168) for kernel in candidates(asked, H200)]
    assert times == sorted(times) and times[0] < 500 < 700 < times[1] < 1200 < times[2]


@pytest.mark.parametrize("sizes", ["b1-h1x1-q1-k1", "b1-h64x8-q1-k100000", "b64-h8x8-q1-k1", "b1-h1x1-q100000-k1"])
def test_estimates_of_extreme_sizes_are_finite_and_positive(sizes):
    for mask in MASKS:
        asked = problem(f"bf16-{sizes}-d64{mask}").simplified()
        for kernel in candidates(asked, H200):
            time_us = kernel.estimate_us(asked, kernel.default(asked, H200), H200, 128)
            assert np.isfinite(time_us) and time_us > 1


@pytest.mark.parametrize("kernel", ["forward_wgmma", "forward_mma", "forward_simt"])
def test_a_large_softcap_changes_little(kernel):
    """tanh of a small argument keeps its digits: at a cap of a million the scores are those of no cap."""
    problem = Problem.parse("forward-bf16-b1-h2x1-q70-k90-d32-causal-softcap1000000")
    verdict = simulator.verify(problem, KERNELS[kernel].default(problem, by_name("nvidia-h200")), seeds=(0,), kinds=("large",))
    assert verdict.ok, verdict.message


def test_the_accumulators_of_one_multiply_fit_what_a_thread_begins_with():
    """ptxas: "(C7602) Insufficient registers (128) to compile instruction ... register target of 158"."""
    static = Problem.parse("forward-bf16-b1-h8x4-q4096-k4096-d256-causal").static
    values = {**WGMMA.default(Problem.parse("forward-bf16-b1-h8x4-q4096-k4096-d256-causal"), H200).values, "num_warpgroups": 1,
              "block_n": 32, "ping_pong": False}
    assert WGMMA.illegal(static, WGMMA.config(static, {**values, "min_blocks_per_sm": 1}), H200) is None
    assert "158" in WGMMA.illegal(static, WGMMA.config(static, {**values, "min_blocks_per_sm": 2}), H200)
