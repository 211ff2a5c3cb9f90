"""compile and elf: every kernel for every arch it claims, what a cubin says of itself, the cache folder. Needs NVRTC, no GPU."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from autotune.cuda import compile as compiler
from autotune.cuda import elf
from autotune.core.gpu import catalogue
from autotune.kernels import KERNELS
from autotune.core.problem import Problem
from autotune.cuda.render import render

pytestmark = pytest.mark.slow

SMALL = 'extern "C" __global__ void f(float* x) { *x = 1; }'
SPILLING = """extern "C" __global__ void __launch_bounds__(1024, 2) f(float* x, const float* y) {
    float v[64];
    for (int i = 0; i < 64; ++i) v[i] = y[threadIdx.x + i * 1024];
    __syncthreads();
    for (int j = 0; j < 8; ++j) for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 1) % 64] + y[i];
    for (int i = 0; i < 64; ++i) x[threadIdx.x + i * 1024] = v[i];
}"""
BY_ARCH = {gpu.arch: gpu for gpu in catalogue().values()}
CLAIMED = [(name, arch) for name, kernel in KERNELS.items() for arch, gpu in BY_ARCH.items()
           if name.startswith("forward")
           and kernel.reject(Problem.parse("forward-fp16-b1-h2x1-q512-k512-d64-causal"), gpu) is None]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_archs_from_75_to_120_are_claimed():
    assert {arch for name, arch in CLAIMED if name == "forward_simt"} == {75, 80, 86, 89, 90, 100, 120}
    assert {arch for name, arch in CLAIMED if name == "forward_mma"} == {75, 80, 86, 89, 90, 100, 120}
    assert {arch for name, arch in CLAIMED if name == "forward_wgmma"} == {90}


@pytest.mark.parametrize("name, arch", CLAIMED)
def test_a_kernel_builds_for_every_arch_it_claims(name, arch):
    problem, kernel, gpu = Problem.parse("forward-fp16-b1-h2x1-q512-k512-d64-causal"), KERNELS[name], BY_ARCH[arch]
    binary = compiler.compile_source(render(problem.static, kernel.default(problem, gpu), kernel.target(gpu)), kernel.target(gpu))
    assert list(binary.entries) == [name] and 16 < binary.entries[name].registers <= 255
    assert binary.image[:4] == b"\x7fELF" and elf.whole(binary.image) == binary.image


def test_resources_do_not_depend_on_threads():
    sources = [SMALL.replace("1;", f"{n};") for n in range(8)] + [SPILLING]
    alone = [compiler.compile_source(source, "sm_80").entries for source in sources]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda source: compiler.compile_source(source, "sm_80").entries, sources)) == alone
    assert alone[0]["f"].spill_bytes == 0


def test_spills_are_a_flaw():
    binary = compiler.compile_source(SPILLING, "sm_80")
    assert binary.entries["f"].spill_bytes > 0
    outcome, message = compiler.flaw(binary)
    assert outcome == "spilled" and "f spills" in message
    assert compiler.flaw(compiler.compile_source(SMALL, "sm_80")) is None


COPYING = """extern "C" __global__ void f(const int* in, int* out) {
    extern __shared__ int tile[];
    unsigned to = unsigned(__cvta_generic_to_shared(tile + threadIdx.x * 4));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to ^ threadIdx.x % 2 * 16), "l"(in + threadIdx.x * 4));
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}"""


def test_an_instruction_that_the_gpu_does_not_know_is_a_flaw():
    binary = compiler.compile_source(COPYING, "sm_90")
    assert elf.count(binary.image, 0xFAE) == 1 and compiler.flaw(binary) is None
    _, begin, size, _ = elf._sections(binary.image)[".text.f"]
    at = next(at for at in range(begin, begin + size, 16) if binary.image[at] == 0xAE and binary.image[at + 1] & 0xF == 0xF)
    image = binary.image[:at + 1] + bytes([binary.image[at + 1] & 0xF0 | 0xD]) + binary.image[at + 2:]
    outcome, message = compiler.flaw(replace(binary, image=image))
    assert outcome == "miscompiled" and "1 asynchronous copies" in message


def test_a_source_that_is_wrong_names_the_line():
    with pytest.raises(compiler.CompileError, match="refused the source for sm_80: .*error") as caught:
        compiler.compile_source('extern "C" __global__ void f() { nonsense; }', "sm_80")
    assert "nonsense" in caught.value.log


def test_the_cache_is_used_and_holds_what_was_compiled(cache, monkeypatch):
    first = compiler.cached(SMALL, "sm_80")
    monkeypatch.setattr(compiler, "compile_source", lambda *_: pytest.fail("compiled twice"))
    assert compiler.cached(SMALL, "sm_80") == first
    folder, = cache.iterdir()
    assert (folder / "kernel.cu").read_text() == SMALL and (folder / "kernel.cubin").read_bytes() == first.image


@pytest.mark.parametrize("name, damage", [("kernel.cubin", b"\x7fELF torn"), ("kernel.cu", b"other"), ("binary.json", b"{"),
                                          ("binary.json", b"[]"), ("log.txt", None)])
def test_a_damaged_entry_is_compiled_anew(cache, name, damage):
    first = compiler.cached(SMALL, "sm_80")
    path = next(cache.iterdir()) / name
    path.unlink() if damage is None else path.write_bytes(damage)
    assert compiler.cached(SMALL, "sm_80").sha256 == first.sha256
    assert (next(cache.iterdir()) / "kernel.cubin").read_bytes() == first.image


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"text", b"\x7fELF" + bytes(60)])
def test_what_is_no_cubin_is_refused(image):
    with pytest.raises(ValueError):
        elf.entry_resources(image)
