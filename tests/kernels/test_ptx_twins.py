"""Every wrapper in lib/ptx/ against its twin in the simulator, on the same random data.

On a GPU the results are compared; anywhere, the probes must run on the simulator without findings and, if there is NVRTC,
compile for the arch that they need, and no wrapper may be without twin or probe.
"""

import re
import struct
from dataclasses import replace

import numpy as np
import pytest
import simulator_probes
from ptx_probes import BOX, PROBES, RAW_WORDS, TENSOR

from autotune.cuda import compile
from autotune.core.gpu import by_name, detect
from autotune.kernels.base import Map, Step
from autotune.kernels.forward.wgmma import ForwardWgmma
from autotune.core.problem import Problem
from autotune.cuda.render import HOST_TWINS, TEMPLATES
from autotune.simulator.job import launch as simulate
from autotune.simulator.memory import Memory, tensor_map

pytestmark = pytest.mark.slow

SEEDS = (0, 1, 2)


def source(probe, twins: bool) -> str:
    more, values = [], {}
    for header in probe.headers:
        if header == "tile":
            more.append("lib/tile/smem.cuh")
        else:
            more += [f"lib/ptx/{file}.cuh.j2" for file in ("wgmma", "wgmma_shapes", "wgmma_shared")]
            values = operands(header.split()[1])
    maps = "TensorMap load, store; " if probe.mapped else ""
    params = simulator_probes.PARAMS.replace("struct Params { ", "struct Params { " + maps)
    text = simulator_probes.headers(HOST_TWINS if twins else TEMPLATES, *more, **values)
    return "\n".join([text, "using Element = bf16;", params % (probe.threads, probe.body)])


def operands(dtype: str) -> dict[str, object]:
    """What wgmma.cuh.j2 asks for, for S with 48 columns and O with 72, and the multiplies of further shapes."""
    kernel = ForwardWgmma()
    static = Problem.parse(f"forward-{dtype}-b1-h1x1-q64-k64-d64x72").static
    values = {p.name: p.values[0] for p in kernel.parameters if not p.derived}
    config = kernel.config(static, {**values, "block_n": 48})
    operands = kernel.operands(static, config)
    return {**operands, "ds": operands["pv"], "more_qk": [], "more_pv": []}


def on_simulator(probe, data: np.ndarray, seed: int) -> np.ndarray:
    out = fresh_output(probe)
    memory = Memory(at_end=False)
    memory.add("in", data, writable=False)
    memory.add("out", out, writable=True)
    maps = b""
    if probe.mapped:
        shape = Map("q", **BOX)
        places = (data, memory.address["in"]), (out[RAW_WORDS:], memory.address["out"] + 4 * RAW_WORDS)
        for tensor, address in ((as_tensor(array), address) for array, address in places):
            strides = tuple(stride // tensor.itemsize for stride in tensor.strides[:3])
            maps += tensor_map(shape, tensor.itemsize, address, tensor.shape, strides)
    params = maps + struct.pack("QQii", memory.address["in"], memory.address["out"], data.size, 0) + b"\0" * 40
    simulation = simulate(source(probe, True), [probe_step(probe)], memory, params, seed)
    assert simulation.findings == ()
    return out


def on_gpu(probe, data: np.ndarray, gpu) -> np.ndarray:
    import cupy

    from autotune.device import launch

    target = "sm_90a" if gpu.arch == 90 else f"sm_{gpu.arch}"
    bound = launch.load(compile.cached(source(probe, False), target), 0).bound(probe_step(probe))
    given, out = cupy.asarray(data), cupy.asarray(fresh_output(probe))
    maps = b""
    if probe.mapped:
        from autotune.device.tensormap import encode

        batch, rows, heads, columns = TENSOR
        strides = rows * heads * columns, heads * columns, columns
        maps = b"".join(encode(Map("q", **BOX), "bf16", pointer, columns, rows, heads, batch, *strides)
                        for pointer in (given.data.ptr, out.data.ptr + 4 * RAW_WORDS))
    params = maps + struct.pack("QQii", given.data.ptr, out.data.ptr, data.size, 0) + b"\0" * (40 if probe.mapped else 0)
    bound.launch(probe.grid, cupy.cuda.get_current_stream().ptr, struct.Struct(f"{len(params)}s"), (params,))
    return out.get()


def probe_step(probe) -> Step:
    return Step("probe", probe.grid, probe.threads, probe.smem_bytes, cluster=probe.cluster)


def fresh_output(probe) -> np.ndarray:
    return np.zeros(probe.out_words, np.uint32)


def as_tensor(data: np.ndarray) -> np.ndarray:
    return data.view(np.uint16).reshape(TENSOR)


def assert_same(probe, gpu: np.ndarray, twin: np.ndarray) -> None:
    if not probe.floats:
        wrong = np.flatnonzero(gpu != twin)
        assert not wrong.size, f"word {wrong[0]}: GPU {gpu[wrong[0]]:#x}, twin {twin[wrong[0]]:#x}"
        return
    a, b = gpu.view(np.float32).astype(np.float64), twin.view(np.float32).astype(np.float64)
    finite = np.isfinite(b)
    scale = np.abs(b[finite]).max(initial=0) if probe.float_error > 0 else np.abs(b)  # below 0: relative to each value
    with np.errstate(invalid="ignore"):
        allowed = np.broadcast_to(abs(probe.float_error) * scale, a.shape)
        same = (np.abs(a - b) <= allowed) | (a == b) | (np.isnan(a) & np.isnan(b))
    wrong = np.flatnonzero(~same)
    assert not wrong.size, f"{wrong.size} words differ, first {wrong[0]}: GPU {a[wrong[0]]!r}, twin {b[wrong[0]]!r}"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("probe", PROBES, ids=str)
def test_the_gpu_and_the_twin_agree(probe, seed):
    gpu = detect()
    if gpu.arch < probe.arch or (probe.arch == 90 and gpu.arch != 90):
        pytest.skip(f"it needs compute capability {probe.arch / 10}, the GPU has {gpu.arch / 10}")
    data = probe.data(np.random.default_rng([seed, len(probe.name)]))
    assert_same(probe, on_gpu(probe, data, gpu), on_simulator(probe, data, seed))


@pytest.mark.parametrize("probe", PROBES, ids=str)
def test_probes_run_on_the_simulator_and_depend_on_their_data(probe):
    first = on_simulator(probe, probe.data(np.random.default_rng(1)), 0)
    assert_same(probe, on_simulator(probe, probe.data(np.random.default_rng(1)), 4), first)
    if "p.in" in probe.body:
        assert (on_simulator(probe, probe.data(np.random.default_rng(2)), 0) != first).any()


def test_a_store_that_begins_before_its_tensor_is_found():
    probe = next(probe for probe in PROBES if probe.name == "boxes of a tensor")
    wrong = replace(probe, body=probe.body.replace("max_of(at[n][0], 0)", "at[n][0]"))
    with pytest.raises(AssertionError, match="begins before its tensor"):
        on_simulator(wrong, wrong.data(np.random.default_rng(0)), 0)


@pytest.mark.parametrize("probe", PROBES, ids=str)
def test_probes_compile_for_their_arch_and_for_hopper(probe):
    for target in sorted({f"sm_{probe.arch}" + "a" * (probe.arch == 90), "sm_90a"}):
        try:
            binary = compile.cached(source(probe, False), target)
        except compile.CompilerMissing as missing:
            pytest.skip(str(missing))
        assert "probe" in binary.entries and (compile.flaw(binary) or ("fine",))[0] != "miscompiled"


def test_every_wrapper_has_a_twin():
    wrappers, twins = (simulator_probes.wrappers(folder) for folder in (TEMPLATES, HOST_TWINS))
    missing = {file: sorted(names - twins.get(file, set())) for file, names in wrappers.items() if names - twins.get(file, set())}
    assert not missing, f"wrappers without a twin in {HOST_TWINS}: {missing}"
    assert "flushed" in twins["math.cuh"]  # a helper of the twins that is no wrapper


def test_every_wrapper_has_a_probe():
    wrappers = set().union(*simulator_probes.wrappers(TEMPLATES).values())
    covered = {name for probe in PROBES for name in probe.covers}
    assert not wrappers - covered, f"wrappers without a probe in tests/ptx_probes.py: {sorted(wrappers - covered)}"
    assert not covered - wrappers, f"probes of what is no wrapper: {sorted(covered - wrappers)}"


@pytest.mark.parametrize("probe", PROBES, ids=str)
def test_probes_call_what_they_cover(probe):
    assert [name for name in probe.covers if not re.search(rf"\b{name}\b", probe.body)] == []


def test_the_base_header_has_twins():
    def names(folder):
        text = (folder / "lib" / "base.cuh").read_text()
        return set(re.findall(r"\b(?:DEVICE|EVERYWHERE) [\w:<>* ]*?\b(\w+)\(", text)) | set(re.findall(r"\bstruct (\w+)", text))

    assert names(TEMPLATES) - names(HOST_TWINS) - {"pointer"} == set()
    assert by_name("nvidia-h200").arch == 90
