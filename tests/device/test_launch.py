import ctypes
import itertools
import struct
import threading
import time
from types import SimpleNamespace

import pytest
from fake_cuda import FakeCuda

from autotune.device import attributes, launch as launching
from autotune.core.gpu import by_name
from autotune.kernels import candidates
from autotune.kernels.base import Field, Step, params_bytes, params_format
from autotune.device.launch import PARAMS_LIMIT_BYTES, LaunchError, load, ready
from autotune.core.problem import Problem


@pytest.fixture(name="cuda")
def fake_cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(launching, "_cupy", lambda: (fake, fake))
    monkeypatch.setattr(launching, "_loaded", {})
    monkeypatch.setattr(attributes, "_driver_launch", lambda: fake.launchKernelEx)
    fake.setDevice(0)
    return fake


def binary(sha="a" * 64):
    return SimpleNamespace(sha256=sha, image=b"\x7fELF", target="sm_90")


def launch(bound, step, packed, stream=0):
    """With Params that are packed already."""
    bound.launch(step.grid, stream, struct.Struct(f"{len(packed)}s"), (packed,))


FIELDS = (Field("const void *", "q"), Field("long long", "stride"), Field("int", "heads"), Field("float", "scale"))


def test_launch_passes_grid_block_smem_stream_and_params(cuda):
    packed = struct.pack(params_format(FIELDS), 0xABCD, -3, 7, 0.5)
    step = Step("entry", grid=70000, block=128, smem_bytes=100_000)
    bound = load(binary(), 0).bound(step)
    launch(bound, step, packed, stream=77)
    context, handle, *shape, params = cuda.launches[0]
    assert (context, handle, shape) == (1000, 100, [70000, 1, 1, 128, 1, 1, 100_000, 77])
    assert params[:params_bytes(FIELDS)] == packed
    assert cuda.attributes == [(100, 8, 100_000)]  # allowed the shared memory, once
    bound.launch(3, 5, struct.Struct(params_format(FIELDS)), (1, 2, 3, 4.0))
    assert cuda.launches[1][-1][:params_bytes(FIELDS)] == struct.pack(params_format(FIELDS), 1, 2, 3, 4.0)


def test_one_module_for_each_device_and_the_callers_device_is_restored(cuda):
    step = Step("entry", 1, 32, 0)
    first, again, other = load(binary(), 0), load(binary(), 0), load(binary(), 1)
    assert first is again and first is not other
    assert first.bound(step) is again.bound(step)
    launch(other.bound(step), step, b"\0" * 8)
    assert cuda.modules == [1000, 1001]
    assert cuda.launches[0][0] == 1001 and cuda.ctxGetCurrent() == 1000 and cuda.getDevice() == 0


def test_a_thread_without_a_context_gets_one_for_the_launch(cuda):
    step = Step("entry", 1, 32, 0)
    bound = load(binary(), 0).bound(step)
    seen = []

    def work():
        seen.append(cuda.ctxGetCurrent())
        launch(bound, step, b"\0" * 8)
        seen.append(cuda.ctxGetCurrent())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 0] and cuda.launches[0][0] == 1000


def test_carveouts_of_one_binary_do_not_share_a_function(cuda):
    loaded = load(binary(), 0)
    handles = {loaded.bound(Step("entry", 1, 32, 0, carveout)).handle for carveout in (-1, 50, 100)}
    assert len(handles) == 3
    assert [a for a in cuda.attributes if a[1] == 9] == [(200, 9, 50), (300, 9, 100)]


def test_small_shared_memory_needs_no_attribute(cuda):
    load(binary(), 0).bound(Step("entry", 1, 32, 48 * 1024))
    assert cuda.attributes == []


def test_ready_says_whether_a_launch_would_load(cuda):
    step = Step("entry", 1, 32, 0)
    assert not ready(binary(), 0, [step])
    load(binary(), 0)
    assert not ready(binary(), 0, [step])
    load(binary(), 0).bound(step)
    assert ready(binary(), 0, [step]) and not ready(binary(), 1, [step])


def test_unload_frees_modules_and_forgets(cuda):
    loaded = load(binary(), 0)
    loaded.bound(Step("entry", 1, 32, 0))
    loaded.bound(Step("entry", 1, 32, 0, 50))
    loaded.unload()
    assert cuda.unloaded == [1, 2] and load(binary(), 0) is not loaded


def test_failures_are_sentences_with_the_drivers_status(cuda):
    step = Step("entry", 5, 64, 0)
    bound = load(binary(), 0).bound(step)
    cuda.fail = "launch"
    with pytest.raises(LaunchError, match="launch of entry with 5 blocks of 64 threads .*OUT_OF_RESOURCES") as caught:
        launch(bound, step, b"\0" * 8)
    assert caught.value.status == 701
    cuda.fail = "load"
    with pytest.raises(LaunchError, match="for sm_90 cannot be used on CUDA device 0: CUDA_ERROR_NO_BINARY"):
        load(binary("b" * 64), 0).bound(step)


def test_the_parameters_of_every_kernel_can_be_passed():
    gpu = by_name("nvidia-h200")
    for op, softcap, alibi in itertools.product(("forward", "decode"), (0.0, 30.0), (False, True)):
        problem = Problem(op, seqlen_q=1, seqlen_k=10**5, head_dim=64, softcap=softcap, alibi=alibi)
        for kernel in candidates(problem, gpu):
            fields = kernel.params(problem.static, kernel.default(problem, gpu))
            assert 0 < params_bytes(fields) <= PARAMS_LIMIT_BYTES


def test_parameter_buffers_are_not_shared_between_threads(cuda):
    """Each launch must see its own bytes although launches of several threads overlap."""
    step = Step("entry", 1, 32, 0)
    bound = load(binary(), 0).bound(step)
    wrong = []

    def slow(*arguments):
        pointer = ctypes.c_void_p.from_address(arguments[9]).value
        before = ctypes.string_at(pointer, 8)
        time.sleep(0.001)
        if ctypes.string_at(pointer, 8) != before:
            wrong.append(before)

    bound._launch = slow
    threads = [threading.Thread(target=lambda n=n: [launch(bound, step, struct.pack("q", n * 100 + i)) for i in range(10)])
               for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(launching.free) <= 9


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", None)
    monkeypatch.setattr(launching, "_loaded", {})
    with pytest.raises(LaunchError, match="pip install 'cupy-cuda13x"):
        load(binary(), 0)


@pytest.mark.gpu
def test_a_real_kernel_runs_on_a_real_gpu():
    """The whole path, with a kernel of four lines: parameters by value, dynamic shared memory above 48 KB, a stream."""
    import cupy
    from cupy.cuda import nvrtc

    source = """
    struct Params { int *out; long long offset; int count; float unused; };
    extern "C" __global__ void fill(const __grid_constant__ Params p) {
        extern __shared__ int shared[];
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        shared[15000 + threadIdx.x] = i;  // past 48 KB
        __syncthreads();
        if (i < p.count) p.out[p.offset + i] = shared[15000 + threadIdx.x];
    }"""
    arch = cupy.cuda.Device(0).compute_capability
    program = nvrtc.createProgram(source, "fill.cu", (), ())
    nvrtc.compileProgram(program, (f"-arch=sm_{arch}",))
    image = nvrtc.getCUBIN(program) + b"\0"
    real = SimpleNamespace(sha256="fill-test", image=image, target=f"sm_{arch}")
    fields = (Field("int *", "out"), Field("long long", "offset"), Field("int", "count"), Field("float", "unused"))
    out = cupy.full(70000 * 32 + 8, -1, cupy.int32)
    step = Step("fill", grid=70000, block=32, smem_bytes=64 * 1024, carveout=100)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()
    loaded = load(real, 0)
    try:
        launch(loaded.bound(step), step, struct.pack(params_format(fields), out.data.ptr, 8, 70000 * 32, 0.0), stream.ptr)
        stream.synchronize()
        assert (out[:8] == -1).all() and (out[8:] == cupy.arange(70000 * 32)).all()
        with pytest.raises(LaunchError) as caught:
            too_many = Step("fill", 1, 2048, 0)
            launch(loaded.bound(too_many), too_many, struct.pack(params_format(fields), 0, 0, 0, 0.0), stream.ptr)
        assert caught.value.status == 1  # invalid value: not sticky
        done = []

        def elsewhere():
            launch(loaded.bound(step), step, struct.pack(params_format(fields), out.data.ptr, 0, 8, 0.0), stream.ptr)
            done.append(True)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        stream.synchronize()
        assert done and (out[:8] == cupy.arange(8)).all()
    finally:
        cupy.cuda.Device(0).synchronize()
        loaded.unload()
