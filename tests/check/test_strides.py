"""Forms of arrays: the same numbers, NaN between them, writes into gaps are seen, and every kernel is right on every form."""

import numpy as np
import pytest

from autotune.check.verdict import Checker
from autotune.core.gpu import by_name
from autotune.check.inputs import KINDS, make_inputs
from autotune.kernels import KERNELS, candidates
from autotune.check.numerics import bits
from autotune.core.problem import Problem
from autotune.check.strides import FORMS, GapWritten, laid_out, unreadable, written_as

H200 = by_name("nvidia-h200")
PROBLEM = Problem.parse("forward-bf16-b2-h4x2-q70-k90-d32x48-causal-left60-sinks")


@pytest.mark.parametrize("kind", ["random", "masked_nan"])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "shared"])
def test_a_form_holds_the_same_numbers(form, kind):
    plain, moved = make_inputs(PROBLEM, kind, 3), laid_out(form)(PROBLEM, kind, 3)
    for name in ("q", "k", "v"):
        ours, theirs = (bits(getattr(inputs, name), "bf16") for inputs in (moved, plain))
        assert (ours == theirs).all() and ours.strides[3] == 2
    changed = [name for name in ("q", "k", "v") if getattr(moved, name).strides != getattr(plain, name).strides]
    assert changed == ([] if form == "packed" else ["q", "k"] if form == "unlike" else ["q", "k", "v"])


def test_shared_batch_entries_are_one():
    inputs = laid_out("shared")(PROBLEM, "random", 3)
    assert [array.strides[0] for array in (inputs.q, inputs.k, inputs.v)] == [0, 0, 0]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("packed", "shared", "reversed")])
def test_gaps_are_nan_and_a_write_into_one_is_seen(form):
    shape = 2, 70, 4, 48
    seen = {}

    def run(inputs, out, lse):
        seen["strides"] = out.strides
        out[...] = 1
        if lse is not None:  # one element beyond the last row of the first head
            beyond = np.lib.stride_tricks.as_strided(out[0, -1, 0, :1], (2, 1), (out.strides[1], 2))
            assert np.isnan(beyond[1].astype(np.float32)).all()
            beyond[1] = 0

    out = np.empty(shape, make_inputs(PROBLEM, "random").q.dtype)
    inputs = make_inputs(PROBLEM, "random")
    written_as(form, run)(inputs, out, None)
    assert (out.astype(np.float32) == 1).all() and seen["strides"] != out.strides
    with pytest.raises(GapWritten, match=form):
        written_as(form, run)(inputs, out, out)


@pytest.mark.parametrize("name", KERNELS)
def test_what_a_kernel_cannot_read_in_place(name):
    kernel = KERNELS[name]
    refused = {form for form in FORMS if unreadable(form, PROBLEM, kernel)}
    by_tensor_map = dict.fromkeys(("forward_wgmma", "backward_wgmma", "backward_fused"), {"odd", "shared", "reversed"})
    assert refused == {"forward_simt": set(), **by_tensor_map}.get(name, {"odd"})


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_kernel_reads_every_form(form):
    from autotune.cuda.compile import CompilerMissing
    from autotune.simulator import simulate

    for kernel in candidates(PROBLEM, H200):
        if unreadable(form, PROBLEM, kernel):
            continue
        config = kernel.default(PROBLEM, H200)

        def run(inputs, out, lse, config=config):
            simulation = simulate(PROBLEM, config, inputs, out, lse, seed=1)
            assert simulation.ok, simulation.findings[0]

        try:
            verdict = Checker(PROBLEM, [KINDS[0], "masked_nan"], make=laid_out(form))(written_as(form, run))
        except CompilerMissing as error:
            pytest.skip(str(error))
        assert verdict.ok, verdict.message
