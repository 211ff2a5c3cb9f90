"""Finite inputs never give NaN (G1), also where ptxas fuses a product into the subtraction that follows it, and where the sum of
products q.k is beyond float32."""

import re
from dataclasses import replace

import numpy as np
import pytest

from autotune.check.inputs import make_inputs
from autotune.check.numerics import from_float32, to_float32
from autotune.core.gpu import by_name
from autotune.core.problem import Problem
from autotune.cuda.compile import CompilerMissing
from autotune.kernels import candidates
from autotune.simulator import compiler, host_source
from autotune.simulator.job import simulate

pytestmark = pytest.mark.slow

H200 = by_name("nvidia-h200")
PROBLEMS = [Problem.parse(text) for text in (
    "forward-bf16-b1-h2x1-q5-k70-d64", "forward-bf16-b1-h2x1-q70-k70-d64-causal",
    "forward-fp16-b1-h1x1-q5-k70-d64", "decode-bf16-b1-h2x1-q1-k70-d64", "decode-bf16-b1-h2x1-q1-k70-d64-page16")]
CASES = [pytest.param(kernel, problem, id=f"{kernel.name}-{problem}") for problem in PROBLEMS
         for kernel in candidates(problem, H200)]


@pytest.fixture(scope="module", autouse=True)
def _needs_fma():
    try:
        compiler.compiler(), compiler.contracting_flags()
    except CompilerMissing as missing:
        pytest.skip(str(missing))


def outcome(kernel, problem, logits, source=None, contract=True):
    """Output and LSE of a launch all of whose scaled scores are `logits` (in fp16 as near as it gets), in float32."""
    config = kernel.default(problem, H200)
    inputs = make_inputs(problem, "random")
    side = np.sqrt(abs(logits) / problem.head_dim / inputs.scale)
    side = min(side, 6e4) if problem.dtype == "fp16" else side
    q, k = (from_float32(np, np.full(array.shape, value, np.float32), problem.dtype)
            for array, value in ((inputs.q, side), (inputs.k, np.copysign(side, logits))))
    inputs = replace(inputs, q=q, k=k)
    out = np.zeros_like(q)
    lse = np.zeros((problem.batch, problem.heads_q, problem.seqlen_q), np.float32)
    simulation = simulate(problem, config, inputs, out, lse, source=source, contract=contract)
    assert simulation.ok, simulation.findings[0]
    return to_float32(out, problem.dtype), lse


@pytest.mark.parametrize("logits", [-1.4e11, 1.4e11, 1e39])
@pytest.mark.parametrize("kernel, problem", CASES)
def test_g1_equal_logits_however_large_give_the_mean_of_v(kernel, problem, logits):
    out, lse = outcome(kernel, problem, logits)
    small, _ = outcome(kernel, problem, 1.0)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    np.testing.assert_array_equal(out, small)


@pytest.mark.parametrize("contract", [True, False])
@pytest.mark.parametrize("kernel, problem", [case for case in CASES if case.values[0].name != "forward_simt"])
def test_g1_without_its_remedy_is_found_by_contraction_and_by_nothing_else(kernel, problem, contract):
    """The limit beyond which large scores are treated apart is put where no score comes to."""
    source, limits = re.subn(r"\b(LARGE|ENORMOUS) = [^,;]+", r"\1 = 3.4e38f", host_source(problem, kernel.default(problem, H200)))
    assert limits
    small, _ = outcome(kernel, problem, 1.0)
    out, lse = outcome(kernel, problem, 1.4e11, source, contract)
    right = np.isfinite(lse).all() and np.array_equal(out, small)
    assert right != contract
