"""attention_varlen on a real GPU: every kernel, lengths of 0 and 1, wrong starts, graphs that replay with other lengths, repeats
bit for bit."""

import random
from dataclasses import replace

import numpy as np
import pytest
from gpu_arrays import cupy_fixture, names, to_torch, torch_fixture  # noqa: F401 (fixtures)

import autotune
from autotune.check.checkers import check_launch
from autotune.check.verdict import compare
from autotune.core.gpu import detect
from autotune.check.inputs import make_inputs
from autotune.kernels import KERNELS
from autotune.core.problem import Problem
from autotune.check.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]

COVER = [Problem.parse(f"forward-{text}-varlen") for text in (
    "bf16-b7-h32x8-q1500-k1500-d128-causal", "fp16-b5-h16x16-q700-k900-d64", "bf16-b65-h8x2-q300-k300-d64-causal-left127-sinks",
    "bf16-b9-h6x1-q400-k1200-d128-causal-softcap30", "fp16-b3-h5x5-q333-k77-d80-left40-right8-alibi",
    "bf16-b4-h8x2-q900-k900-d192x128-causal", "bf16-b4-h4x2-q700-k700-d256-causal", "bf16-b1-h14x2-q513-k1025-d64-causal-alibi",
    "fp16-b300-h4x1-q40-k60-d96-causal", "fp32-b4-h4x2-q200-k200-d64-causal", "bf16-b3-h4x4-q150-k150-d40x24-sinks",
    "bf16-b6-h8x2-q700-k900-d128-causal-prefix257")]


def call(inputs, convert=lambda array: array, **keywords):
    problem, layout = inputs.problem, inputs.layout
    return autotune.attention_varlen(
        *(convert(array[0]) for array in (inputs.q, inputs.k, inputs.v)), convert(layout.device_starts("query")),
        convert(layout.device_starts("key")), problem.seqlen_q, problem.seqlen_k, scale=inputs.scale,
        **problem.bounds.arguments, softcap=problem.softcap, sinks=convert(inputs.sinks),
        alibi_slopes=convert(inputs.alibi_slopes), return_lse=True, **keywords)


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("problem", COVER, ids=names)
def test_calls_are_right(cupy, request, problem, library):
    convert = to_torch(request.getfixturevalue("torch")) if library == "torch" else lambda array: array

    def run(inputs, out, lse):
        target = convert(out[0])
        result, log = call(inputs, convert, out=target)
        assert result is target
        lse[0] = cupy.from_dlpack(log)

    result = check_launch(run, problem, xp=cupy, sample=300)
    assert result.ok, result.message


@pytest.mark.parametrize("source", ["varlen", "page16", "page64", "page19"])
@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("forward")])
def test_every_kernel_is_right_with_its_default_and_drawn_configs(cupy, name, source):
    gpu, kernel, choose = detect(), KERNELS[name], random.Random(name + source)
    problem = Problem.parse(f"forward-bf16-b6-h8x2-q500-k1100-d128-causal-{source}")
    if reason := kernel.reject(problem, gpu):
        pytest.skip(reason)
    checked = 0
    for config in (kernel.default(problem, gpu), *choose.sample(kernel.space(problem, gpu), 8)):
        result = verify(problem, config, gpu)
        assert result.ok or result.message.startswith("spilled"), f"{config}: {result.message}"
        checked += result.ok
    assert checked >= 3


def test_a_captured_call_replays_with_other_lengths(cupy):
    problem = Problem.parse("forward-bf16-b4-h8x2-q700-k700-d64-causal-varlen")
    lengths = [[(300, 300), (1, 5), (0, 40), (99, 55)], [(100, 45), (100, 200), (200, 100), (0, 55)],
               [(400, 400), (0, 0), (0, 0), (0, 0)]]
    every = [make_inputs(problem, "random", 3, cupy, sequences) for sequences in lengths]
    live = every[0]
    starts = [live.layout.device_starts(of) for of in ("query", "key")]
    originals = [start.copy() for start in starts]
    call(live)  # compiles and loads
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        out, lse = call(live)
        graph = stream.end_capture()
        for inputs in (*every, every[0]):
            new = originals if inputs is live else [inputs.layout.device_starts(of) for of in ("query", "key")]
            for start, value in zip(starts, new):
                start[...] = value
            out.view("u2").fill(0xFFFF)
            graph.launch(stream)
            stream.synchronize()
            verdict = compare(problem, replace(inputs, q=live.q, k=live.k, v=live.v), out[None], lse[None])
            assert verdict.ok, verdict.message


def test_a_call_repeats_bit_for_bit_and_calls_on_two_streams_do_not_meet(cupy):
    inputs = make_inputs(COVER[0], "random", 1, cupy)
    cupy.cuda.Device().synchronize()
    first, first_lse = call(inputs)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = []
    cupy.cuda.Device().synchronize()
    for turn in range(20):
        with streams[turn % 2]:
            results.append(call(inputs))
    cupy.cuda.Device().synchronize()
    for out, lse in results:
        assert (out.view("u2") == first.view("u2")).all() and (lse == first_lse).all()


@pytest.mark.parametrize("starts", [(0, 40, 1000, 2000), (0, 80, 30, 100), (-50, -20, 30, 100), (0, 2**31 - 1, 5, -2**31)])
def test_wrong_starts_do_no_harm(cupy, starts):
    q, kv = cupy.zeros((100, 4, 64), cupy.float16), cupy.ones((100, 2, 64), cupy.float16)
    wrong = cupy.asarray(np.array(starts, np.int64).astype(np.int32))
    autotune.attention_varlen(q, kv, kv, wrong, wrong, 100, 100, causal=True)
    cupy.cuda.Device().synchronize()
    right = cupy.asarray([0, 50, 100], cupy.int32)
    assert (autotune.attention_varlen(q, kv, kv, right, right, 50, 50) == 1).all()
