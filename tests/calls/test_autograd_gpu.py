"""Gradients on a GPU: what torch's autograd gives for `attention` and `attention_varlen`, judged as kernels are; what broke
elsewhere."""

import numpy as np
import pytest

import autotune
from autotune.check.gradients import Gradients, expect_gradients, make_gradient_inputs, units
from autotune.check.gradverdict import compare_gradients
from autotune.check.numerics import array_dtype
from autotune.core.gpu import detect
from autotune.core.problem import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]
torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def able():
    if detect().arch < 80:
        pytest.skip("gradients need compute capability 8.0")


def tensor(array, dtype):
    import cupy

    word = {2: cupy.int16, 4: cupy.int32}[array.dtype.itemsize]
    return torch.as_tensor(array.view(word), device="cuda").view({"bf16": torch.bfloat16, "fp16": torch.float16,
                                                                  "fp32": torch.float32}[dtype])


def graph(given):
    """(out, lse, the inputs that require grad) of a call on `given`'s arrays."""
    inputs, problem = given.inputs, given.problem
    arrays = [tensor(array, problem.dtype).requires_grad_() for array in (inputs.q, inputs.k, inputs.v)]
    sinks = None if inputs.sinks is None else tensor(inputs.sinks, "fp32").requires_grad_()
    slopes = None if inputs.alibi_slopes is None else tensor(inputs.alibi_slopes, "fp32")
    options = dict(**problem.bounds.arguments, softcap=problem.softcap, sinks=sinks,
                   alibi_slopes=slopes, return_lse=True)
    if problem.packed:
        starts = [torch.as_tensor(given.layout.device_starts(name), device="cuda") for name in ("query", "key")]
        out, lse = autotune.attention_varlen(*(array[0] for array in arrays), *starts, problem.seqlen_q, problem.seqlen_k,
                                             **options)
        out, lse = out[None], lse[None]
    else:
        out, lse = autotune.attention(*arrays, **options)
    return out, lse, arrays + ([] if sinks is None else [sinks])


def differentiate(given, dout=None):
    out, lse, inputs = graph(given)
    dout = tensor(given.dout, given.problem.dtype) if dout is None else dout
    results, grads = ([out], [dout]) if given.dlse is None else ([out, lse], [dout, tensor(given.dlse, "fp32")])
    return torch.autograd.grad(results, inputs, grads)


def as_gradients(found, problem) -> Gradients:
    import cupy

    torch.cuda.synchronize()
    whole = [cupy.asarray(each.contiguous().view(torch.int16)).view(array_dtype(problem.dtype)) for each in found[:3]]
    return Gradients(*whole, cupy.asarray(found[3]) if len(found) > 3 else None)


@pytest.mark.parametrize("kind", ["random", "mixed", "needles"])
@pytest.mark.parametrize("text", [
    "backward-bf16-b2-h4x2-q300-k500-d64-causal", "backward-fp16-b1-h6x2-q513-k200-d128-causal-sinks",
    "backward-bf16-b1-h8x1-q700-k700-d64-left127-right0-sinks", "backward-bf16-b2-h4x4-q200-k333-d80-softcap20-alibi",
    "backward-bf16-b5-h4x2-q300-k400-d128-causal-varlen-sinks", "backward-fp16-b4-h4x1-q200-k200-d96-left30-right5-varlen",
    "backward-bf16-b1-h2x1-q300-k300-d256-causal", "backward-bf16-b1-h2x2-q257-k300-d192x128-causal",
    "backward-fp16-b2-h5x1-q100-k170-d72x40",
    "backward-bf16-b2-h4x2-q300-k500-d64-causal-prefix333", "backward-bf16-b5-h4x2-q300-k400-d128-causal-prefix130-varlen"])
def test_gradients_are_right(text, kind):
    import cupy

    problem = Problem.parse(text)
    given = make_gradient_inputs(problem, kind, 3, cupy)
    expected = [expect_gradients(given, *unit) for unit in units(given.inputs, None)]
    verdict = compare_gradients(given, as_gradients(differentiate(given), problem), expected)
    assert verdict.ok, verdict.message


def test_expanded_and_transposed_gradients():
    import cupy

    problem = Problem.parse("backward-bf16-b2-h4x2-q100-k100-d64-causal")
    given = make_gradient_inputs(problem, "random", 1, cupy)
    ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(2, 100, 4, 64)
    for dout in (ones, tensor(given.dout, "bf16").transpose(1, 2).contiguous().transpose(1, 2)):
        for mine, contiguous in zip(differentiate(given, dout), differentiate(given, dout.contiguous())):
            assert (mine - contiguous).abs().max() <= 0.02 * contiguous.abs().max()


@pytest.mark.parametrize("text", ["backward-bf16-b2-h8x2-q500-k500-d128-causal",
                                  "backward-bf16-b6-h4x2-q300-k300-d64-causal-varlen-sinks"])
def test_the_same_bits_every_time_under_load(text):
    import cupy

    given = make_gradient_inputs(Problem.parse(text), "mixed", 2, cupy)
    busy, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        wanted = differentiate(given)
        for n in range(1000):
            if n % 10 == 0:
                with torch.cuda.stream(busy):
                    matrix @ matrix
            assert all(torch.equal(mine, first) for mine, first in zip(differentiate(given), wanted)), n
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", [((0, 0, 1023), (0, 1, 2043)), ((76, 34, 146), (1, 1, 1)), ((0, 5, 0), (7, 0, 3)),
                                     ((1,), (1,))])
def test_sequences_without_queries_or_keys(lengths):
    import cupy

    queries, keys = lengths
    problem = Problem(op="backward", batch=len(queries), heads_q=4, heads_kv=2, seqlen_q=max(queries), seqlen_k=max(keys),
                      head_dim=64, window_right=0, kv="varlen")
    given = make_gradient_inputs(problem, "random", 0, cupy, list(zip(queries, keys)))
    expected = [expect_gradients(given, *unit) for unit in units(given.inputs, None)]
    verdict = compare_gradients(given, as_gradients(differentiate(given), problem), expected)
    assert verdict.ok, verdict.message


def test_rows_of_no_sequence_have_no_gradient():
    torch.manual_seed(0)
    q, k, v = (torch.randn(100, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.tensor([10, 40, 60], device="cuda", dtype=torch.int32)
    out = autotune.attention_varlen(q, k, v, starts, starts, 30, 30, causal=True)
    found = torch.autograd.grad(out[10:60].float().pow(2).sum(), (q, k, v))
    for gradient in found:
        assert torch.isfinite(gradient).all() and not gradient[:10].any() and not gradient[60:].any() and gradient[10:60].any()


def test_a_captured_step_replays_with_other_lengths():
    torch.manual_seed(0)
    q, k, v = (torch.randn(90, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    starts = torch.tensor([0, 30, 90], device="cuda", dtype=torch.int32)

    def step():
        return torch.autograd.grad(autotune.attention_varlen(q, k, v, starts, starts, 90, 90, causal=True).float().pow(2).sum(),
                                   (q, k, v))

    torch.use_deterministic_algorithms(True)
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = step()
        for lengths in ([0, 30, 90], [0, 70, 90], [0, 0, 90]):
            starts.copy_(torch.tensor(lengths, dtype=torch.int32))
            captured.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(mine, eager) for mine, eager in zip(found, step()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_host_spends_little():
    """One step costs at most 1.3 times what SDPA's does, as the faster of 200."""
    from time import perf_counter

    q, k, v = (torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    transposed = [array.detach().transpose(1, 2).requires_grad_() for array in (q, k, v)]

    def best(step) -> float:
        times = []
        for _ in range(200):
            torch.cuda.synchronize()
            begun = perf_counter()
            step()
            times.append(perf_counter() - begun)
        return float(np.min(times))

    ours = best(lambda: torch.autograd.grad(autotune.attention(q, k, v, causal=True), (q, k, v), grad))
    theirs = best(lambda: torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(
        *transposed, is_causal=True).transpose(1, 2), transposed, grad))
    assert ours <= 1.3 * theirs, f"{1e6 * ours:.0f} us, SDPA {1e6 * theirs:.0f} us"
