"""Tensor maps and the binding of arrays to Params, with a driver that writes down what it is told."""

import struct

import pytest
from fake_arrays import GPU, decode_map, encode_map
from hypothesis import given
from hypothesis import strategies as st

from autotune.calls import binding
from autotune.calls.call import Call
from autotune.device import tensormap
from autotune.kernels import KERNELS
from autotune.kernels.base import Map, params_bytes, params_format
from autotune.kernels.forward.base import ForwardKernel
from autotune.core.problem import Problem
from autotune.device.tensormap import MAP_BYTES, MAX_STRIDE, TensorMapError, Unmappable, encode, unmappable

BOX = Map("k", 128, 64, 2)


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    monkeypatch.setattr(tensormap, "_encoder", lambda: encode_map)
    encode.cache_clear()
    yield
    encode.cache_clear()


@given(batch=st.integers(1, 9), rows=st.integers(1, 10**6), heads=st.integers(1, 64), columns=st.integers(2, 32),
       strides=st.tuples(*[st.integers(1, 2**30)] * 3))
def test_the_driver_is_told_sizes_strides_and_box(batch, rows, heads, columns, strides):
    columns, strides = 8 * columns, tuple(8 * stride for stride in strides)
    encoded = encode(BOX, "bf16", 1 << 20, columns, rows, heads, batch, *strides)
    pointer, shape, told, box, data_type = decode_map(encoded)
    assert len(encoded) == MAP_BYTES and (pointer, shape, box, data_type) == (1 << 20, (batch, rows, heads, columns), (128, 2), 9)
    for stride, size, bytes_told in zip(strides, (batch, rows, heads), told):
        assert bytes_told == 2 * stride if size > 1 else bytes_told % 16 == 0  # something legal stands in


def test_the_stride_of_a_single_element_may_be_anything():
    assert unmappable((1, 7, 1), (0, 64, -3)) is None
    assert decode_map(encode(BOX, "fp16", 0, 64, 7, 1, 1, 0, 64, -3))[1] == (1, 7, 1, 64)


@pytest.mark.parametrize("strides, reason", [
    ((0, 64, 64), "its batch stride is 0 elements"), ((640, -64, 64), "its row stride is -64 elements"),
    ((640, 64, MAX_STRIDE), f"its head stride is {MAX_STRIDE} elements")])
def test_what_has_no_map_is_refused_with_the_reason(strides, reason):
    with pytest.raises(Unmappable, match=reason):
        encode(BOX, "bf16", 0, 64, 7, 3, 2, *strides)
    assert unmappable((2, 7, 3), strides).startswith(reason)


def test_a_map_that_the_driver_refuses_names_the_tensor():
    with pytest.raises(TensorMapError, match=r"CUresult 1 for a bf16 tensor of shape \(2, 7, 3, 64\)"):
        encode(BOX, "bf16", 8, 64, 7, 3, 2, 640, 64, 64)  # an address that is no multiple of 16


def test_maps_are_kept_and_told_apart():
    first = encode(BOX, "bf16", 0, 64, 7, 3, 2, 640, 64, 64)
    assert encode(BOX, "bf16", 0, 64, 7, 3, 2, 640, 64, 64) is first
    assert decode_map(encode(BOX, "bf16", 16, 64, 7, 3, 2, 640, 64, 64))[0] == 16
    assert encode.cache_info().hits == 1


# Params

FORWARD = [kernel for kernel in KERNELS.values() if isinstance(kernel, ForwardKernel)]
PROBLEM = Problem(batch=2, heads_q=8, heads_kv=2, seqlen_q=300, seqlen_k=700, head_dim=128, head_dim_v=64, window_right=0)
STRIDES = {"q": (800, 808, 816), "k": (824, 832, 840), "v": (848, 856, 864), "out": (872, 880, 888)}


def call_of(problem):
    call = Call.of(problem, 0)
    call.seqlen_q, call.seqlen_k, call.scale = problem.seqlen_q, problem.seqlen_k, 0.5
    call.lent, call.counters, call.tickets = (), 0, 0
    call.lse = call.sink_dtype = 0
    for n, (tensor, strides) in enumerate(STRIDES.items()):
        setattr(call, tensor, 1024 << n)
        call.set_strides(tensor, *strides)
    return call


def packed(bound, call):
    """The fields of Params."""
    bound.pack(call, params := bytearray(bound.packer.size))
    return bound.packer.unpack(params)


def resident(sms):
    return lambda blocks_per_sm: blocks_per_sm * sms


@pytest.mark.slow
@pytest.mark.parametrize("kernel", FORWARD, ids=[kernel.name for kernel in FORWARD])
def test_params_are_what_fields_say(kernel):
    for config in {config["split_keys"]: config for config in kernel.space(PROBLEM, GPU)}.values() if kernel.draws else \
            [kernel.default(PROBLEM, GPU)]:
        bound, params, call = binding.bind(PROBLEM, config, resident(GPU.sms)), kernel.params(PROBLEM.static,
                                                                                              config), call_of(PROBLEM)
        grids = bound.sized(call)
        for name, _ in call.lent:
            setattr(call, name, 640)
        named = dict(zip([field.name for field in params], packed(bound, call)))
        assert kernel.mapped == bool(kernel.maps(PROBLEM, config))
        assert all(named[f"{tensor}_{axis}_stride"] == stride for tensor, strides in STRIDES.items()
                   for axis, stride in zip(("batch", "row", "head"), strides))
        assert [named[tensor] for tensor in STRIDES] == [1024, 2048, 4096, 8192] and named["window_right"] == 0
        limits = (step.blocks_per_sm * GPU.sms or step.grid for step in kernel.plan(PROBLEM, config))
        assert grids == tuple(min(step.grid, limit) for step, limit in zip(kernel.plan(PROBLEM, config), limits))
        assert bound.packer.format == params_format(params) and len(bound.packer.pack(*named.values())) == params_bytes(params)
        assert bool(call.counters) == (grids != tuple(step.grid for step in kernel.plan(PROBLEM, config)))


def test_each_map_of_forward_wgmma_is_of_its_tensor():
    kernel = KERNELS["forward_wgmma"]
    config = kernel.default(PROBLEM, GPU)
    values = packed(binding.bind(PROBLEM, config, resident(GPU.sms)), call_of(PROBLEM))
    wanted = {"q": (1024, (2, 300, 8, 128)), "k": (2048, (2, 700, 2, 128)), "v": (4096, (2, 700, 2, 64)),
              "out": (8192, (2, 300, 8, 64))}
    maps = kernel.maps(PROBLEM, config)
    assert [field.name for field in kernel.fields if field.type == "TensorMap"] == [f"{shape.tensor}_map" for shape in maps]
    for shape, encoded in zip(maps, values):
        strides = tuple(2 * stride for stride in STRIDES[shape.tensor])
        assert decode_map(encoded) == (*wanted[shape.tensor], strides, (shape.rows, shape.heads), 9)


@pytest.mark.slow
@pytest.mark.parametrize("blocks_per_sm", [1, 2])
def test_a_grid_that_goes_round_has_as_many_blocks_as_the_gpu_has_room_for(blocks_per_sm):
    kernel = KERNELS["forward_wgmma"]
    like = Problem(heads_q=8, heads_kv=2, head_dim=64)
    config = next(c for c in kernel.space(like, GPU) if c["persistent"] and c["min_blocks_per_sm"] == blocks_per_sm)
    sized = binding.bind(like, config, resident(10)).sized
    for batch, wanted in ((1, None), (100, 10 * blocks_per_sm)):
        problem = Problem(batch=batch, heads_q=8, heads_kv=2, head_dim=64, seqlen_q=1, seqlen_k=64)
        call = call_of(problem)
        (blocks,), (step,) = sized(call), kernel.plan(problem, config)
        assert step.blocks_per_sm == blocks_per_sm and blocks == (wanted or step.grid)
        assert bool(call.counters) == (wanted is not None) and (wanted is None or step.grid > wanted)


def test_params_format_has_the_layout_of_the_struct():
    assert params_format(KERNELS["forward_wgmma"].fields).startswith("@128s128s128s")
    assert struct.calcsize("@128s128s128sQ") == 3 * MAP_BYTES + 8
