"""Programmatic dependent launch without a GPU: the driver's structs, which launches ask for it, what the simulator reports."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_arrays import fake_gpu, qkv  # noqa: F401 (a fixture)
from simulator_probes import finding, run
from test_launch import FIELDS, binary, fake_cuda, launch  # noqa: F401 (a fixture)

import autotune
from autotune.device import attributes
from autotune import simulator
from autotune.core.gpu import by_name
from autotune.kernels import KERNELS
from autotune.kernels.base import Step, params_format
from autotune.device.launch import LaunchError, load, ready
from autotune.core.problem import Problem
from autotune.cuda.render import render

pytestmark = pytest.mark.slow

H200, A100 = by_name("nvidia-h200"), by_name("nvidia-a100-sxm-80gb")
KERNEL = KERNELS["decode_mma"]
EARLY, PLAIN = Step("entry", 70000, 128, 100_000, dependent=True), Step("entry", 70000, 128, 100_000)


def config(problem, **values):
    without = {} if values.get("dependent_launch", True) else {"prefetch_tiles": 0, "trigger_tiles": 0}
    config = KERNEL.config(problem.static, {**KERNEL.default(problem, H200).values, **without, **values})
    assert KERNEL.illegal(problem.static, config, H200) is None
    return config


# The driver's structs


@pytest.fixture(name="build")
def fixture_build(tmp_path):
    """A function that compiles C++ that includes cuda.h, with these flags, to a file."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include", *Path("/usr/local").glob("cuda*/include"),
               *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include")]
    include = next((folder for folder in folders if (folder / "cuda.h").is_file()), None)
    if include is None or not shutil.which("g++"):
        pytest.skip("it needs cuda.h and g++")

    def build(text, *flags):
        (tmp_path / "program.cpp").write_text("#include <cuda.h>\n#include <cstddef>\n#include <cstdio>\n" + text)
        subprocess.run(["g++", *flags, f"-I{include}", "program.cpp", "-o", "program"], cwd=tmp_path, check=True)
        return tmp_path / "program"

    return build


def offsets(layout: struct.Struct, values: tuple) -> list[int]:
    """Where each of the different nonzero `values` stands when they are packed."""
    packed = layout.pack(*values)
    return [packed.index(struct.pack("@P" if value > 2**32 else "@I", value)) for value in values]


def test_sizes_and_offsets_are_those_of_the_header(build):
    config = "gridDimX gridDimY gridDimZ blockDimX blockDimY blockDimZ sharedMemBytes hStream attrs numAttrs".split()
    attribute = ["id", "value", "value.programmaticStreamSerializationAllowed"]
    numbers = ["sizeof(CUlaunchConfig)", "sizeof(CUlaunchAttribute)", "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
               *(f"offsetof(CUlaunchConfig, {name})" for name in config),
               *(f"offsetof(CUlaunchAttribute, {name})" for name in attribute)]
    program = build("int main() { " + " ".join(f'printf("%d ", int({number}));' for number in numbers) + " }")
    printed = list(map(int, subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()))
    assert printed[:3] == [attributes.CONFIG.size, attributes.ATTRIBUTE.size, attributes.PROGRAMMATIC_STREAM_SERIALIZATION]
    assert printed[3:13] == offsets(attributes.CONFIG, (*range(11, 18), 2**40 + 1, 2**40 + 2, 18))
    at_id, at_value = offsets(attributes.ATTRIBUTE, (21, 22))
    assert printed[13:] == [at_id, at_value, at_value]


DRIVER = """
static int calls;
extern "C" CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** params, void** extra) {
    const bool right = c->gridDimX == 70000 && c->gridDimY == 1 && c->gridDimZ == 1 && c->blockDimX == 128 && c->blockDimY == 1
        && c->blockDimZ == 1 && c->sharedMemBytes == 100000 && c->hStream == (CUstream)0x7f0000000123 && c->numAttrs == 1
        && c->attrs->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        && c->attrs->value.programmaticStreamSerializationAllowed == 1 && f == (CUfunction)0x7f0012345678
        && **(long long**)params == 42 && extra == nullptr;
    ++calls;
    return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
extern "C" int count() { return calls; }
"""


def test_a_driver_in_c_sees_what_was_asked_for(build, monkeypatch):
    library = ctypes.CDLL(str(build(DRIVER, "-shared", "-fPIC")))
    monkeypatch.setattr(attributes, "_driver_launch", lambda: library.cuLaunchKernelEx)
    statuses = []
    launch = attributes.launcher(SimpleNamespace(check_status=statuses.append), early=True)
    value = ctypes.c_longlong(42)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(value))
    shape = (70000, 1, 1, 128, 1, 1, 100_000)
    for _ in range(3):
        launch(0x7F0012345678, *shape, 0x7F0000000123, ctypes.addressof(params), 0)
    assert library.count() == 3 and statuses == []
    launch(0x7F0012345678, *shape, 0, ctypes.addressof(params), 0)
    assert statuses == [1]


# Which launches ask for it


def test_only_steps_that_say_so_are_launched_early(cuda):
    loaded = load(binary(), 0)
    plain, early = loaded.bound(PLAIN), loaded.bound(EARLY)
    assert plain is not early and plain.handle == early.handle and loaded.bound(EARLY) is early
    packed = struct.pack(params_format(FIELDS), 0xABCD, -3, 7, 0.5)
    launch(plain, PLAIN, packed, stream=77)
    assert cuda.dependent == 0
    launch(early, EARLY, packed, stream=77)
    assert cuda.dependent == 1 and cuda.launches[0] == cuda.launches[1]


def test_ready_knows_the_two_apart(cuda):
    load(binary(), 0).bound(PLAIN)
    assert ready(binary(), 0, [PLAIN]) and not ready(binary(), 0, [EARLY])


def test_failures_are_sentences_with_the_drivers_status(cuda, monkeypatch):
    bound = load(binary(), 0).bound(EARLY)
    cuda.fail = "launch"
    with pytest.raises(LaunchError, match="launch of entry with 70000 blocks of 128 threads .*OUT_OF_RESOURCES") as caught:
        launch(bound, EARLY, b"\0" * 8)
    assert caught.value.status == 701

    def missing():
        raise RuntimeError("the CUDA driver has no cuLaunchKernelEx (too old); one of CUDA 11.8 or newer has")

    monkeypatch.setattr(attributes, "_driver_launch", missing)
    with pytest.raises(LaunchError, match="cannot be used on CUDA device 0: the CUDA driver has no cuLaunchKernelEx"):
        load(binary("b" * 64), 0).bound(EARLY)


def test_calls_launch_decode_kernels_as_their_config_says(gpu):
    q, k, v = qkv()
    autotune.attention_with_kvcache(q, k, v)
    assert gpu.calls[-1]["kernel"] == "decode_mma" and gpu.dependent == 1
    autotune.attention(q, k, v, causal=True)
    assert gpu.dependent == 1


def test_it_needs_sm_90_and_leaves_no_trace_elsewhere():
    problem = Problem.parse("decode-bf16-b1-h32x8-q1-k4096-d128-page16")
    assert KERNEL.default(problem, H200)["dependent_launch"] and not KERNEL.default(problem, A100)["dependent_launch"]
    early, plain = config(problem), config(problem, dependent_launch=False, speculative_start=False)
    assert KERNEL.illegal(problem.static, early, A100) == "dependent_launch needs compute capability 9.0, the GPU has 8.0"
    words = re.compile("griddepcontrol|wait_for_dep|launch_dep|dependent_launch|prefetch_|guess", re.I)
    assert words.search(render(problem.static, early, "sm_90")) and not words.search(render(problem.static, plain, "sm_80"))


@pytest.mark.parametrize("value", [True, False])
def test_both_steps_of_a_plan_are_launched_alike(value):
    problem = Problem.parse("decode-bf16-b1-h32x8-q1-k4096-d128")
    steps = KERNEL.plan(problem, config(problem, dependent_launch=value, last_block_merges=False))
    assert [step.entry for step in steps] == ["decode_mma", "decode_combine"]
    assert [step.dependent for step in steps] == [value, value]


# On the simulator

WAIT = "wait_for_dependencies();\n"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("body", [
    WAIT + "p.out[thread_id()] = p.in[thread_id()];",
    "sync_block();\n" + WAIT + "sync_block(); p.out[thread_id()] = p.in[thread_id()];",
    "if (warp_id() == 0) " + WAIT + "sync_block(); p.out[thread_id()] = load_global_4(p.in + thread_id());",
    "if (thread_id() == 3) " + WAIT + "sync_block(); launch_dependents(); p.out[thread_id()] = p.in[thread_id()];"])
def test_what_comes_after_the_wait_is_right(seed, body):
    for early in (True, False):
        out, simulation = run(body, threads=64, seed=seed, grid=3, dependent=early)
        assert simulation.findings == () and (out == range(64)).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("body, words", [
    ("u32 x = p.in[thread_id()];" + WAIT + "p.out[thread_id()] = x;", "uses a pointer to byte"),
    ("u32 x = load_global_4(p.in + thread_id());" + WAIT + "p.out[thread_id()] = x;", "of in before it has waited"),
    ("copy_async_16(smem_base() + thread_id() * 16, p.in, true);" + WAIT, "of in before it has waited"),
    ("take_ticket(p.out, 3);" + WAIT, "writes byte 0 of out before it has waited"),
    ("if (thread_id() == 37) { p.out[1] = 3; }" + WAIT, "warp 1 lane 5 uses a pointer to byte 4 of out"),
    ("if (warp_id() == 0) { " + WAIT + "}\nif (warp_id() == 1) store_global_16(p.out + lane_id() * 4, Chunk{});",
     "of out before it has waited for the kernels before this one"),
    ("p.n == 3 ? p.out[0] = 1 : 0;", "the block ended and has not waited"),
    ("if (block_id() == 1) return;" + WAIT, "block 1: the block ended and has not waited"),
])
def test_what_comes_before_it_is_found(seed, body, words):
    found = finding(body, threads=64, seed=seed, grid=3, out_words=128, dependent=True)
    assert found.kind == "dependency" and words in found.message


GUESS = "const int* in = reinterpret_cast<const int*>(p.in); const int guess = load_guess(in + thread_id());\n"


def test_l2_may_fetch_before_the_wait_and_of_guesses_none_few_or_many_are_wrong():
    body = GUESS + "prefetch_l2(p.in + (guess & 7) * 4, 144); prefetch_l2(p.out, 16);\n" + WAIT + \
        "p.out[thread_id()] = guess; p.out[32 + thread_id()] = load_guess(in + thread_id());"
    wrong, near = [], 0
    for seed in range(40):
        out, simulation = run(body, seed=seed, dependent=True)
        assert simulation.findings == () and (out[32:] == range(32)).all()
        away = abs(out[:32].view(np.int32).astype(int) - range(32))
        wrong.append((away > 0).sum())
        near += ((0 < away) & (away <= 16)).sum()
    assert 5 < wrong.count(0) and any(0 < count < 3 for count in wrong) and max(wrong) > 4 and 0 < near < sum(wrong)
    out, _ = run(body)
    assert (out == [*range(32), *range(32)]).all()


@pytest.mark.parametrize("body, words", [
    ("prefetch_l2(p.in + thread_id() * 4, 16);", "after the end of in"),
    ("prefetch_l2(p.in - 4, 16);", "prefetches 16 bytes at 16 bytes before in"),
    ("prefetch_l2(p.in + 1, 16);", "prefetches 16 bytes at byte 4 of in"),
    ("prefetch_l2(p.in, 24);", "24 bytes are prefetched"),
    (GUESS + "prefetch_l2(p.in + u32(guess & 4095) * 4, 16);", "prefetches 16 bytes at"),
    ("load_guess(reinterpret_cast<const int*>(p.in) + 64 + thread_id());", "of in"),
])
def test_what_l2_must_not_fetch_is_found(body, words):
    found = finding(body + WAIT, dependent=True)
    assert found.kind in ("out of bounds", "misaligned") and words in found.message


@pytest.mark.parametrize("text", ["decode-bf16-b3-h8x2-q1-k700-d64", "decode-bf16-b3-h8x2-q3-k700-d64-causal-left100-page16"])
def test_what_is_prefetched_changes_nothing(text):
    problem = Problem.parse(text)
    for tiles, left in ((0, 0), (1, 0), (2, 4), (8, 1)):
        chosen = config(problem, prefetch_tiles=tiles, trigger_tiles=left, pieces=64)
        found = simulator.verify(problem, chosen, (0, 1, 2), ("random",))
        assert found.ok, found


def test_prefetches_come_with_dependent_launches_only():
    problem = Problem.parse("decode-bf16-b1-h32x8-q1-k16384-d64")
    early = KERNEL.default(problem, H200)
    assert early["block_n"] == 32 and early["prefetch_tiles"] == early["trigger_tiles"] == 2
    assert early["pieces"] == 132 and early["min_blocks_per_sm"] == 2
    plain = KERNEL.config(problem.static, {**early.values, "dependent_launch": False})
    assert KERNEL.illegal(problem.static, plain, H200) == "prefetch_tiles is 2; without dependent_launch it must be 0"
    plain = KERNEL.config(problem.static, {**plain.values, "prefetch_tiles": 0})
    assert KERNEL.illegal(problem.static, plain, H200) == "trigger_tiles is 2; without dependent_launch it must be 0"
    assert KERNEL.illegal(problem.static, config(problem, prefetch_tiles=0), H200) is None


CASES = [("decode-bf16-b2-h8x1-q3-k300-d64-causal-page16", dict(num_warps=2, pieces=64, speculative_start=False), 1),
         ("decode-bf16-b2-h8x1-q3-k300-d64-causal-page16", dict(num_warps=2, pieces=64, speculative_start=True), 1),
         ("decode-bf16-b2-h8x1-q1-k300-d64", dict(num_warps=2, pieces=64), 1),
         ("decode-fp16-b2-h10x2-q4-k300-d40", dict(block_m=32, num_warps=2, q_in_registers=False, last_block_merges=False), 2)]


@pytest.mark.parametrize("text, values, waits", CASES)
def test_every_wait_of_decode_kernels_is_needed(text, values, waits):
    """Each that a case executes, taken away, is missed; what is left is right."""
    problem = Problem.parse(text)
    chosen = config(problem, dependent_launch=True, **values)
    assert simulator.verify(problem, chosen, (0, 2), ("random",)).ok
    source = simulator.host_source(problem, chosen)
    places = [match.span() for match in re.finditer(r"wait_for_dependencies\([^;]*\);", source)
              if match.start() > source.index("using Element =")]
    found = [simulator.verify(problem, chosen, (0,), ("random",), source=source[:begin] + ";" + source[end:]).message
             for begin, end in places]
    assert len(places) == (2 if chosen["speculative_start"] else 3)
    assert [message.startswith("dependency") for message in found].count(True) == waits, found
