"""The mask of prefix LMs, on the simulator: every kernel is right, and one that ignores the prefix is found wrong."""

import pytest

from autotune import kernels, simulator
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.cuda.compile import CompilerMissing
from autotune.simulator.shrink import tile_of

pytestmark = pytest.mark.slow

GPU = by_name("nvidia-h200")
KINDS = ("needles", "masked_nan")  # a weight on each edge; nothing from beyond it

# Shapes for each kernel: most share a program. A prefix of no tile's length, of one key, of all keys and more, beyond the keys of
# some sequences, more queries than keys, groups of heads.
DENSE = ("h2x1-q150-k200", 90), ("h1x1-q70-k50", 1), ("h2x2-q100-k100", 130), ("h3x1-q5-k333", 331)
CASES = [
    *((kernel, "forward-fp16-b2-{}-d64-causal-prefix{}", DENSE) for kernel in ("forward_wgmma", "forward_mma", "forward_simt")),
    ("forward_wgmma", "forward-fp16-b4-{}-d64-causal-prefix{}-varlen", (("h2x1-q150-k200", 90), ("h1x1-q90-k90", 1))),
    ("forward_mma", "forward-fp16-b3-{}-d64-causal-prefix{}-page16", (("h2x1-q90-k200", 100), ("h1x1-q40-k70", 400))),
    ("decode_mma", "decode-fp16-b4-{}-d64-causal-prefix{}", (("h4x1-q4-k300", 100), ("h2x2-q16-k90", 77), ("h5x1-q3-k40", 64))),
    ("decode_mma", "decode-fp16-b4-{}-d64-causal-prefix{}-page16-packed", (("h4x1-q4-k300", 100), ("h2x2-q9-k90", 400))),
    *((kernel, "backward-fp16-b1-{}-d64-causal-prefix{}" + kv, (("h2x1-q150-k200", 90), ("h1x1-q70-k50", 33)))
      for kernel, kv in (("backward_mma", "-varlen"), ("backward_wgmma", ""))),
]


def verified(problem, config, **options):
    try:
        return simulator.verify(problem, config, (0,), KINDS if problem.op != "backward" else ("random",), **options)
    except CompilerMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kernel, text, shapes", CASES, ids=[kernel + text.partition("prefix{}")[2] for kernel, text, _ in CASES])
def test_the_simulator_finds_every_kernel_right(kernel, text, shapes):
    for shape, prefix in shapes:
        problem = Problem.parse(text.format(shape, prefix))
        assert problem.mask == "prefix" and kernels.KERNELS[kernel].reject(problem, GPU) is None
        verdict = verified(problem, kernels.KERNELS[kernel].default(problem, GPU))
        assert verdict.ok, f"{problem}: {verdict.message}"


@pytest.mark.parametrize("kernel, text", [
    ("forward_wgmma", "forward-fp16-b1-h8x2-q8192-k8192-d64-causal-prefix300"),
    ("forward_mma", "forward-fp16-b1-h8x2-q2048-k8192-d64-causal-prefix6500"),
    ("forward_simt", "forward-fp16-b1-h8x2-q8192-k4096-d64-causal-prefix300"),
    ("decode_mma", "decode-fp16-b16-h8x2-q4-k8192-d64-causal-prefix300-page16"),
])
def test_a_kernel_that_ignores_the_prefix_is_found_at_the_sizes_that_are_simulated(kernel, text):
    problem = Problem.parse(text)
    config = kernels.KERNELS[kernel].default(problem, GPU)
    small = simulator.shrunk(problem, config)
    assert small.mask == "prefix" and small == simulator.shrunk(small, config)
    source = simulator.host_source(small, config)
    assert source.count("p.prefix") >= 1 and source.count("int prefix;") == 1
    verdict = verified(small, config, source=source.replace("p.prefix", "0"))
    assert not verdict.ok, f"{small} of {tile_of(config)} shows nothing"
