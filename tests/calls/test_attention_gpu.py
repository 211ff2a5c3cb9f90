"""attention() on a real GPU gives the right result, for arrays of CuPy and torch in any layout."""

import numpy as np
import pytest
from gpu_arrays import call, cupy_fixture, names, problem_of, to_torch, torch_fixture, verdict  # noqa: F401 (fixtures)

import autotune
from autotune.check.verdict import compare
from autotune.check.inputs import make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.calls.plans.UntunedWarning")]

# (Sq, Sk) that broke other implementations: one row, one key, more queries than keys, tails of one, several tiles
LENGTHS = [(1, 1), (1, 3), (2, 1), (64, 128), (239, 1), (3, 799), (113, 203), (108, 256), (307, 256), (1, 339), (1023, 1024)]
MASKS = [{}, dict(window_right=0), dict(window_left=127, window_right=0), dict(window_left=40, window_right=24),
         dict(window_left=0), dict(window_right=7), dict(window_right=0, prefix=199)]


COVER = [
    *(problem_of(lengths=lengths, window_right=0) for lengths in LENGTHS),
    *(problem_of(lengths=(300, 417), **mask) for mask in MASKS),
    *(problem_of(dtype=dtype, head_dim=d, lengths=(130, 257), window_right=0)
      for dtype in ("bf16", "fp16") for d in (64, 128, 256)),
    *(problem_of(dtype="fp32", head_dim=d, lengths=(70, 131), window_right=0) for d in (40, 64, 128)),
    *(problem_of(heads=heads, lengths=(65, 190), window_right=0) for heads in ((1, 1), (8, 8), (28, 4), (6, 1))),
    *(problem_of(sinks=True, lengths=lengths, window_left=127, window_right=0, heads=(16, 2))
      for lengths in ((257, 500), (40, 7))),
    problem_of(head_dim=128, head_dim_v=64, window_right=0),
    problem_of(head_dim=72, head_dim_v=200),
    *(problem_of(dtype=dtype, head_dim=d, lengths=lengths, alibi=True, softcap=softcap, **mask)
      for dtype, d, lengths, softcap, mask in (
          ("bf16", 64, (300, 417), 0.0, MASKS[0]), ("fp16", 128, (257, 500), 0.0, MASKS[1]),
          ("fp32", 64, (70, 131), 0.0, MASKS[3]),
          ("bf16", 256, (130, 257), 30.0, MASKS[2]), ("fp16", 80, (307, 256), 20.0, MASKS[5]))),
    problem_of(sinks=True, alibi=True, heads=(16, 2), lengths=(257, 500), window_left=127, window_right=0),
]


@pytest.mark.parametrize("problem", COVER, ids=names)
def test_cupy_arrays_give_the_right_result(cupy, problem):
    result = verdict(problem, cupy)
    assert result.ok, result.message


@pytest.mark.parametrize("problem", COVER[::3], ids=names)
def test_torch_tensors_give_the_right_result(cupy, torch, problem):
    result = verdict(problem, cupy, to_torch(torch))
    assert result.ok, result.message


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_sinks_of_any_float_dtype(cupy, torch, dtype):
    problem = problem_of(sinks=True, window_right=0)
    inputs = make_inputs(problem, "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device="cuda")  # exact in every dtype
    wanted = autotune.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    given = sinks.to(getattr(torch, dtype))
    got = autotune.attention(q, k, v, causal=True, sinks=given, return_lse=True)
    spread = torch.stack([given, given], 1)[:, 0]  # stride 2
    again = autotune.attention(q, k, v, causal=True, sinks=spread, return_lse=True)
    for out, lse in (got, again):
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_slopes_of_any_float_dtype_and_of_each_batch_entry(cupy, torch, dtype):
    inputs = make_inputs(problem_of(alibi=True), "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    slopes = torch.tensor([[0.5, 0.25, 1.0, 0.0], [0.125, 2.0, 0.0, -0.25]], device="cuda")  # exact in every dtype
    wanted = [autotune.attention(q[b:b + 1], k[b:b + 1], v[b:b + 1], alibi_slopes=slopes[b]) for b in range(2)]
    given = slopes.to(getattr(torch, dtype))
    for array in (given, torch.stack([given, given], 2)[..., 0]):
        assert torch.equal(autotune.attention(q, k, v, alibi_slopes=array), torch.cat(wanted))


def test_a_scale_may_be_anything_finite(cupy, torch):
    inputs = make_inputs(problem_of(), "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    assert torch.equal(autotune.attention(q, k, v, scale=-0.125), autotune.attention(-q, k, v, scale=0.125))
    average = v.float().mean(1).repeat_interleave(2, 1)[:, None].expand(-1, q.shape[1], -1, -1)
    torch.testing.assert_close(autotune.attention(q, k, v, scale=0).float(), average, atol=0.01, rtol=0.02)
    cupy_out = autotune.attention(inputs.q, inputs.k, inputs.v, scale=-0.125)
    assert torch.equal(to_torch(torch)(cupy_out), autotune.attention(q, k, v, scale=-0.125))


# Layouts


def layouts(torch, array):
    """(name, a tensor equal to `array`, whether a kernel that wants alignment copies it)"""
    b, s, h, d = array.shape

    def fill(view):
        view.copy_(array)
        return view

    def new(*shape):
        return array.new_empty(shape)

    yield "heads before rows", fill(new(b, h, s, d).transpose(1, 2)), False
    yield "rows before batch", fill(new(s, b, h, d).transpose(0, 1)), False
    yield "part of a fused projection", fill(new(b, s, h + 3, d)[:, :, 1:h + 1]), False
    yield "last stride 2", fill(new(b, s, h, 2 * d)[..., ::2]), True
    yield "address of 2 bytes", fill(new(b * s * h * d + 8)[1:b * s * h * d + 1].view(b, s, h, d)), True
    yield "odd strides", fill(new(b, s, h, d + 4)[..., :d]), True
    yield "dims reversed", fill(new(d, h, s, b).permute(3, 2, 1, 0)), True


def test_any_strides_give_the_same_result(cupy, torch):
    inputs = make_inputs(problem_of(), "random", xp=cupy)
    plain = dict(zip("qkv", map(to_torch(torch), (inputs.q, inputs.k, inputs.v))))
    wanted = autotune.attention(**plain, causal=True)
    for name in "qkv":
        for layout, tensor, copied in layouts(torch, plain[name]):
            given = {**plain, name: tensor}
            assert torch.equal(autotune.attention(**given, causal=True), wanted), (name, layout)
            copies = autotune.explain(**given, causal=True).copies
            assert len(copies) == copied and all(copy.startswith(f"{name} is copied") for copy in copies), (name, layout, copies)
            if not copied:
                continue
            as_cupy = (cupy.from_dlpack(t.view(torch.int16)).view(inputs.q.dtype) for t in given.values())
            assert torch.equal(to_torch(torch)(autotune.attention(*as_cupy, causal=True)), wanted), (name, layout, "cupy")
    for layout, out, _ in layouts(torch, wanted):
        out.fill_(float("nan"))
        assert autotune.attention(**plain, causal=True, out=out) is out
        assert torch.equal(out, wanted), ("out", layout)


def test_a_cache_shared_by_the_whole_batch(cupy, torch):
    """Strides of 0: one prompt for many sequences. Tensor maps have none, so another kernel runs, which rounds elsewhere."""
    inputs = make_inputs(problem_of(batch=3), "random", xp=cupy)
    q, k, v = map(to_torch(torch), (inputs.q, inputs.k, inputs.v))
    k, v = k[:1], v[:1]
    wanted = autotune.attention(q, k.repeat(3, 1, 1, 1), v.repeat(3, 1, 1, 1), causal=True)
    result = autotune.attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), causal=True)
    torch.testing.assert_close(result, wanted, rtol=2**-6, atol=2**-8)


@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty_inputs(cupy, torch, sizes):
    batch, rows, keys = sizes
    for xp, make in (("torch", lambda *s: torch.ones(s, device="cuda", dtype=torch.bfloat16)),
                     ("cupy", lambda *s: cupy.ones(s, cupy.float16))):
        q, k, v = make(batch, rows, 4, 64), make(batch, keys, 2, 64), make(batch, keys, 2, 32)
        sinks = make(4)
        for given, level in ((None, -np.inf), (sinks, 1.0)):
            out, lse = autotune.attention(q, k, v, causal=True, sinks=given, return_lse=True)
            assert tuple(out.shape) == (batch, rows, 4, 32) and tuple(lse.shape) == (batch, 4, rows), xp
            assert type(out) is type(q) and bool((out == 0).all()) and bool((lse == level).all()), xp
    cupy.cuda.runtime.deviceSynchronize()


def test_a_bf16_sink_of_an_empty_cupy_call(cupy):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = cupy.array([0x3F80, 0xC000], "uint16")  # 1 and -2
    q, kv = cupy.ones((1, 3, 2, 64), cupy.float16), cupy.ones((1, 0, 2, 64), cupy.float16)
    _, lse = autotune.attention(q, kv, kv, sinks=bits.view(ml_dtypes.bfloat16), return_lse=True)
    assert lse.get().tolist() == [[[1.0] * 3, [-2.0] * 3]]


def test_a_large_problem_is_right_where_offsets_pass_32_bits(cupy):
    """2.5e9 elements of K: element offsets of the last batch entry need more than 32 bits."""
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    problem = problem_of(batch=4, heads=(8, 8), lengths=(128, 600000), head_dim=128, window_left=1000, window_right=0)
    inputs = make_inputs(problem, "random", xp=cupy)
    out, lse = call(problem, inputs, return_lse=True)
    result = compare(problem, inputs, out, lse, blocks=64)
    assert result.ok, result.message
