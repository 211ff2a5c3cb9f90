"""Defaults are legal for whatever their kernels take, on every generation of GPUs."""

import random

import pytest

from autotune.core.gpu import by_name
from autotune.kernels import KERNELS
from autotune.core.problem import Problem, ProblemError

GPUS = [by_name(name) for name in ("nvidia-h200", "nvidia-a100-sxm-80gb", "nvidia-l4", "tesla-t4")]
DRAWN = 1500
KNOWN = [  # each was illegal once
    "forward-bf16-b1-h32x8-q1-k600-d64-causal-left511-sinks", "forward-bf16-b1-h1x1-q1-k512-d64-left511",
    "decode-bf16-b1-h4x4-q1-k700-d32x256", "decode-bf16-b1-h4x4-q1-k700-d32x256-kve4m3"]


def drawn(op, choose):
    """A problem of any sizes and features; None where they do not go together."""
    def one_of(*values):
        return choose.choice(values)

    heads_kv = one_of(1, 2, 4, 8, 16)
    queries = one_of(0, 1, 2, 5, 16) if op == "decode" else one_of(1, 17, 64, 512, 1024, 2048, 9000)
    text = f"{op}-{one_of('bf16', 'fp16')}-b{one_of(1, 2, 8, 33, 256, 1000)}"
    text += f"-h{heads_kv * one_of(1, 2, 4, 5, 7, 8, 16)}x{heads_kv}"
    text += f"-q{queries}-k{max(queries, one_of(1, 128, 600, 1024, 4096, 70000))}"
    text += f"-d{one_of(16, 32, 40, 64, 72, 80, 96, 104, 128, 160, 192, 256)}" + one_of("", "", "x64", "x128", "x256")
    text += one_of("", "-causal") + one_of("", "", "-left127", "-left1023") + one_of("", "", "-softcap30")
    text += one_of("", "", "-alibi") + one_of("", "-sinks")
    text += one_of("", "", "-page16", "-page3", "-page64") if op == "decode" else one_of("", "", "-page16", "-page64", "-varlen")
    text += one_of("", "", "-kve4m3") if op == "decode" else ""
    try:
        return Problem.parse(text)
    except ProblemError:
        return None


@pytest.mark.parametrize("name", KERNELS)
def test_defaults_are_legal(name):
    kernel, choose = KERNELS[name], random.Random(3)
    problems = [drawn(name.partition("_")[0], choose) for _ in range(DRAWN)]
    tried = 0
    for problem in [*map(Problem.parse, KNOWN), *filter(None, problems)]:
        for gpu in GPUS:
            if kernel.reject(problem, gpu) is None:
                config = kernel.default(problem, gpu)
                assert kernel.illegal(problem.static, config, gpu) is None, f"{problem} on {gpu.name}: {config}"
                assert kernel.plan(problem, config)
                tried += 1
    assert tried > DRAWN / 4
