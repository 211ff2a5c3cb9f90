"""The float64 gradients against finite differences of the forward reference, and the check against wrong kernels."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.check.checkers import check_launch, checker_of
from autotune.check.gradients import Gradients, expect_gradients, make_gradient_inputs, of_unit, units
from autotune.check.gradverdict import GradientChecker, compare_gradients
from autotune.check.inputs import KINDS
from autotune.check.numerics import bits, from_float32
from autotune.check.reference import expect
from autotune.core.problem import Problem

FEATURES = ("", "-causal", "-left5-right9", "-causal-left7", "-softcap2", "-alibi", "-sinks", "-causal-sinks-softcap3-alibi",
            "-causal-varlen", "-left6-varlen-sinks-alibi")


def loss(given, **changed) -> float:
    """sum(out * dout) + sum(lse * dlse) of the forward reference in float64."""
    inputs = replace(given.inputs, **changed)
    expected = expect(inputs)
    keep = ~expected.skip
    batch, rows, head = (np.broadcast_to(each, keep.shape)[keep] for each in expected.index)
    total = (expected.out[keep] * given.dout[batch, rows, head].astype(np.float64)).sum()
    lse = expected.lse[keep]
    seen = np.isfinite(lse)
    return total + (lse[seen] * given.dlse[batch, head, rows][seen].astype(np.float64)).sum()


def exact_gradients(given) -> dict[str, np.ndarray]:
    """The float64 gradients of all units, as whole arrays."""
    i = given.inputs
    whole = {name: np.zeros(array.shape) for name, array in (("dq", i.q), ("dk", i.k), ("dv", i.v))}
    if i.sinks is not None:
        whole["dsinks"] = np.zeros(i.sinks.shape)
    group = given.problem.group
    for sequence, head_kv in units(i, None):
        expected = expect_gradients(given, sequence, head_kv).gradients
        queries = slice(head_kv * group, (head_kv + 1) * group)
        for name, (values, _) in expected.items():
            if name == "dsinks":
                whole[name][queries] += values
            else:
                heads = queries if name == "dq" else slice(head_kv, head_kv + 1)
                of_unit(given.layout, whole[name], sequence, heads, name != "dq")[...] = values
    return whole


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("sizes", ["b2-h4x2-q13-k13-d16", "b2-h3x1-q20-k9-d16x24", "b2-h2x2-q7-k30-d24"])
def test_reference_is_the_derivative_of_the_forward_reference(features, sizes):
    given = make_gradient_inputs(Problem.parse(f"backward-fp32-{sizes}{features}"), "equal", seed=3)
    given = replace(given, inputs=replace(given.inputs, k=given.inputs.k + 0.3 * given.inputs.q.std() * np.sin(
        np.arange(given.inputs.k.size, dtype=np.float32)).reshape(given.inputs.k.shape)))
    gradients = exact_gradients(given)
    random = np.random.default_rng(5)
    for name, argument in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dsinks", "sinks")):
        array = getattr(given.inputs, argument)
        if array is None:
            continue
        direction = random.standard_normal(array.shape)
        step = 2.0**-9  # float32 arrays hold the moved values to 2^-24
        up, down = ((array + sign * step * direction).astype(np.float32) for sign in (1, -1))
        moved = (up.astype(np.float64) - down) / 2
        difference = (loss(given, **{argument: up}) - loss(given, **{argument: down})) / 2
        predicted = (gradients[name] * moved).sum()
        size = np.sqrt(((gradients[name] * moved)**2).sum()) + 1e-9
        assert abs(difference - predicted) <= 2e-3 * size, (name, difference, predicted)


def rounded(problem: Problem, whole: dict) -> Gradients:
    arrays = [from_float32(np, whole[name].astype(np.float32), problem.dtype) for name in ("dq", "dk", "dv")]
    return Gradients(*arrays, whole["dsinks"].astype(np.float32) if "dsinks" in whole else None)


def write(gradients: Gradients, values: Gradients, dtype: str) -> None:
    for name, target, source in zip(Gradients._fields, gradients, values):
        if target is not None:
            bits(target, "fp32" if name == "dsinks" else dtype)[...] = bits(source, "fp32" if name == "dsinks" else dtype)


@pytest.mark.parametrize("text", ["backward-bf16-b2-h4x2-q70-k100-d16-causal-sinks",
                                  "backward-fp16-b3-h2x1-q90-k90-d24x16-left30-varlen",
                                  "backward-bf16-b1-h2x1-q40-k70-d32-softcap4-alibi"])
def test_right_gradients_pass_on_every_kind(text):
    problem = Problem.parse(text)
    verdict = check_launch(lambda given, out, _: write(out, rounded(problem, exact_gradients(given)), problem.dtype), problem)
    assert verdict.ok and verdict.worst_ratio < 1, verdict.message


def mutant(problem: Problem, change):
    """A kernel that is right but for `change`, which is made to what it is given or to what it gives."""
    def run(given, out, _):
        changed = change(given)
        if isinstance(changed, dict):
            whole = changed
        else:
            whole = exact_gradients(changed)
        write(out, rounded(problem, whole), problem.dtype)

    return run


def masked(**window):
    return lambda given: replace(given, inputs=replace(given.inputs, problem=replace(given.problem, **window)))


def altered(name: str, change):
    def make(given):
        whole = exact_gradients(given)
        change(whole[name])
        return whole

    return make


def lost_tile(array):
    array[:, 16:32] *= 0.97  # of a sum over 64 tiles


MUTANTS = {
    "mask off by one": ("-causal", masked(window_right=1)),
    "window off by one": ("-left20-right0", masked(window_left=21)),
    "no gradient of the lse": ("", lambda given: replace(given, dlse=None)),
    "no derivative of the soft cap": ("-softcap2", masked(softcap=1e6)),
    "sink not in the lse": ("-sinks", lambda given: {**exact_gradients(replace(given, inputs=replace(given.inputs, sinks=None))),
                                                      "dsinks": exact_gradients(given)["dsinks"]}),
    "sinks without a gradient": ("-sinks", altered("dsinks", lambda array: array.fill(0))),
    "a sink's sign": ("-sinks", altered("dsinks", lambda array: np.negative(array, out=array))),
    "dq of some rows a little small": ("", altered("dq", lost_tile)),
    "dk of some keys a little small": ("-causal", altered("dk", lost_tile)),
    "dv of some keys a little small": ("", altered("dv", lost_tile)),
    "dk not scaled": ("", altered("dk", lambda array: np.multiply(array, 4, out=array))),
    "heads swapped": ("", altered("dk", lambda array: array.__setitem__(..., array[:, :, ::-1].copy()))),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_kernels_are_found(name):
    features, change = MUTANTS[name]
    problem = Problem.parse(f"backward-bf16-b2-h4x2-q70-k100-d16{features}")
    verdict = checker_of(problem, ["mixed", "needles", "equal", "random"])(mutant(problem, change))
    assert not verdict.ok, verdict


def test_what_is_not_written_or_written_outside_is_found():
    problem = Problem.parse("backward-bf16-b1-h2x1-q40-k50-d16-sinks")

    def run(given, out, _, skip=None, after=False):
        values = rounded(problem, exact_gradients(given))
        write(out, Gradients(*(getattr(out, name) if name == skip else value for name, value in zip(Gradients._fields, values))),
              problem.dtype)
        if after:
            np.lib.stride_tricks.as_strided(bits(out.dk, "bf16").reshape(-1), (out.dk.size + 1,), (2,))[-1] = 7

    for skip in Gradients._fields:
        message = check_launch(lambda *given: run(*given, skip=skip), problem, ["random"]).message
        assert f"{skip} was never written" in message
    assert "memory outside dk was written" in check_launch(lambda *given: run(*given, after=True), problem, ["random"]).message


def test_a_sample_has_the_longest_sequence_and_all_must_be_finite():
    problem = Problem.parse("backward-bf16-b6-h4x2-q40-k60-d16-varlen")
    given = make_gradient_inputs(problem, "mixed", 1)
    chosen = units(given.inputs, 1.0)
    assert len(chosen) == 2 and (int(np.argmax(given.layout.queries * given.layout.lengths)), 1) in chosen
    gradients = rounded(problem, exact_gradients(given))
    bits(gradients.dq, "bf16")[0, -1, 0, 0] = 0x7F80
    assert "dq is not finite" in compare_gradients(given, gradients, []).message


def test_kinds_are_those_of_the_forward():
    problem = Problem.parse("backward-bf16-b1-h1x1-q8-k8-d16")
    assert checker_of(problem).kinds == KINDS and isinstance(checker_of(problem), GradientChecker)


def test_flops_and_bytes():
    forward, backward = (Problem.parse(f"{op}-bf16-b2-h8x2-q100-k300-d64-causal") for op in ("forward", "backward"))
    assert backward.flops == 2.5 * forward.flops
    assert Problem.parse("backward-bf16-b1-h1x1-q10-k10-d192x128").flops == 2 * 100 * (3 * 192 + 2 * 128)
    queries, keys = 2 * 100 * 8, 2 * 300 * 2
    assert backward.compulsory_bytes == queries * (4 * 64 * 2 + 4) + keys * 4 * 64 * 2
    assert Problem.parse(backward.text) == backward and backward.text.startswith("backward-")
