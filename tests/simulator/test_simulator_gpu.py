"""On a GPU: the same problems, configs and inputs give what the simulator gives, within what rounding may differ."""

import numpy as np
import pytest
from test_simulator import cases, launched

from autotune.cuda import compile
from autotune import kernels
from autotune.check.verdict import Guarded, compare
from autotune.core.gpu import detect
from autotune.check.inputs import make_inputs
from autotune.check.numerics import bits, to_float32
from autotune.check.reference import expect, sampled_blocks

pytestmark = pytest.mark.slow

CASES = 6  # of each kernel


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(CASES))
@pytest.mark.parametrize("name", [name for name in kernels.KERNELS if kernels.KERNELS[name].op != "backward"])
def test_the_gpu_gives_what_the_simulator_gives(name, number):
    import cupy

    from autotune.check import verify

    problem, config = cases(name)[number]
    gpu = detect()
    if reason := kernels.KERNELS[name].reject(problem, gpu) or kernels.KERNELS[name].illegal(problem.static, config, gpu):
        pytest.skip(reason)
    binary = compile.build(problem.static, config, gpu)
    if flaw := compile.flaw(binary):
        pytest.skip(": ".join(flaw))
    for kind in ("random", "needles"):
        inputs = make_inputs(problem, kind, number)
        out, lse, simulation = launched(problem, config, inputs, number)
        assert simulation.findings == () and compare(problem, inputs, out, lse).ok
        on_gpu = [Guarded(cupy, array.shape, dtype).array for array, dtype in ((out, problem.out_dtype), (lse, "fp32"))]
        verify.runner(problem, config, binary, 0)(make_inputs(problem, kind, number, cupy), *on_gpu)
        gpu_out, gpu_lse = (array.get() for array in on_gpu)

        expected = expect(inputs, sampled_blocks(inputs.layout, None, 0))
        as_float = [to_float32(bits(array, problem.out_dtype)[expected.index].view(array.dtype), problem.out_dtype)
                    for array in (gpu_out, out)]
        difference = np.abs(as_float[0] - as_float[1]).max((1, 2))
        assert (difference <= expected.allowed).all()
        finite = np.isfinite(lse)
        assert (np.isfinite(gpu_lse) == finite).all() and np.abs(gpu_lse[finite] - lse[finite]).max(initial=0) < 2e-3
