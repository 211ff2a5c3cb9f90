"""torch.ops.autotune: what tracing sees is what a launch gives, graphs have no breaks, numbers are those of plain attention."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from references import close, plain, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu, forget_tensors  # noqa: E402, F401

import autotune  # noqa: E402
from autotune.calls import autograd  # noqa: E402
from autotune.calls.arguments import AttentionError  # noqa: E402
from autotune.device import workspaces  # noqa: E402
from autotune.integrations import ops  # noqa: E402

pytestmark = pytest.mark.slow

OPS = torch.ops.autotune


def test_fullgraph_with_sizes_that_change(torch_gpu):
    def model(q, k, v, sinks):
        return autotune.attention(q * 2, k, v, causal=True, window=(3, None), softcap=5.0, sinks=sinks) + 1

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows in (5, 6, 9, 14):
        q, k, v = qkv(rows=rows, keys=rows)
        sinks = torch.randn(4)
        close(compiled(q, k, v, sinks) - 1, plain(q * 2, k, v, causal=True, window=(3, None), softcap=5.0, sinks=sinks))
    assert len(graphs) == 1 and len(torch_gpu.calls) == 4
    assert [node for node in graphs[0].graph.nodes if node.target == OPS.attention.default]


def test_a_prefix_is_a_number_of_the_graph(torch_gpu):
    compiled = torch.compile(lambda q, k, v, prefix: autotune.attention(q, k, v, causal=True, prefix=prefix), fullgraph=True,
                             dynamic=True, backend="aot_eager")
    q, k, v = qkv(rows=8, keys=8)
    for prefix in (3, 5, 6):
        out = compiled(q, k, v, prefix)
        close(out, autotune.attention(q, k, v, causal=True, prefix=prefix).double())
        close(out[:, :prefix], plain(q[:, :prefix], k[:, :prefix], v[:, :prefix]))  # the first queries see just the prefix
    assert torch_gpu.calls[-1]["prefix"] == 6


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_a_fresh_process_needs_no_eager_call_before(torch_gpu, dynamic):
    """Dynamo meets a library that was never seen."""
    forget_tensors()
    q, k, v = qkv()
    compiled = torch.compile(lambda q: autotune.attention(q, k, v, return_lse=True), fullgraph=True, dynamic=dynamic,
                             backend="aot_eager")
    out, lse = compiled(q)
    close(out, plain(q, k, v))
    assert lse.shape == (2, 4, 5) and lse.isfinite().all()


def test_out_is_written_inside_a_graph(torch_gpu):
    q, k, v = qkv()
    out = torch.zeros_like(q)

    def model(q, k, v, out):
        autotune.attention(q, k, v, out=out)
        return out + 1

    result = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, out)
    close(out, plain(q, k, v))
    close(result - 1, plain(q, k, v))


def test_packed_and_cached_calls_in_a_graph(torch_gpu):
    q, k, v = qkv(batch=1, rows=9, keys=9)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = torch.tensor([7], dtype=torch.int32)

    def model(q, k, v, starts, lengths):
        packed = autotune.attention_varlen(q[0], k[0], v[0], starts, starts, 5, 5, causal=True)
        return packed, autotune.attention_with_kvcache(q[:, :2], k, v, cache_seqlens=lengths)

    packed, cached = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, starts, lengths)
    close(packed[:4][None], plain(q[:, :4], k[:, :4], v[:, :4], causal=True))
    close(packed[4:][None], plain(q[:, 4:], k[:, 4:], v[:, 4:], causal=True))
    close(cached, plain(q[:, :2], k[:, :7], v[:, :7], causal=True))


def test_export_keeps_the_operator(torch_gpu):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return autotune.attention(q, k, v, causal=True)

    q, k, v = qkv(rows=6, keys=6)
    rows = torch.export.Dim("rows", min=2, max=512)
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({1: rows},) * 3)
    assert any(node.target == OPS.attention.default for node in program.graph.nodes)
    q, k, v = qkv(rows=11, keys=11)
    close(program.module()(q, k, v), plain(q, k, v, causal=True))


def test_make_fx_sees_the_operator_of_an_eager_call(torch_gpu):
    q, k, v = qkv()
    graph = make_fx(lambda q, k, v: autotune.attention(q, k, v))(q, k, v)
    assert any(node.target == OPS.attention.default for node in graph.graph.nodes)
    close(graph(q * 2, k, v), plain(q * 2, k, v))


def test_fake_tensors_of_cuda_where_there_is_none():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 8, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        out, lse = autotune.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and out.device == q.device and out.dtype == q.dtype and out.stride() == q.stride()
    assert lse.shape == (2, 4, 8) and lse.dtype == torch.float32 and lse.device == q.device
    assert autotune.attention(q, k, v).shape == q.shape  # outside of the mode


CASES = list(itertools.product((0, 1, 5), (1, 7), ((4, 2), (3, 3)), (64, 128), (False, True)))


@pytest.mark.parametrize("rows, keys, heads, dim_v, lse", CASES)
def test_what_tracing_sees_is_what_a_launch_gives(torch_gpu, rows, keys, heads, dim_v, lse):
    q, k, v = qkv(rows=rows, keys=keys, heads=heads[0], heads_kv=heads[1], dim_v=dim_v)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    starts_q, starts_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (rows, keys))
    flat = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    for name, inputs in (("attention", (q, k, v)), ("attention_varlen", (*flat, starts_q, starts_k, max(rows, 1), keys)),
                         ("attention_with_kvcache", (q, k, v)),
                         ("attention_with_kvcache", (flat[0], k, v, None, None, starts_q))):
        operator = getattr(OPS, name).default
        real = operator(*inputs, return_lse=lse)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs), return_lse=lse)
        for one, other in zip(real, fake):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), name


@pytest.mark.parametrize("name", ["attention", "attention_out", "attention_varlen", "attention_with_kvcache", "write_kvcache"])
def test_opcheck(torch_gpu, name):
    q, k, v = qkv()
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    inputs = {"attention": (q, k, v), "attention_out": (torch.zeros_like(q), q, k, v),
              "attention_varlen": (q[0], k[0, :5], v[0, :5], starts, starts, 5, 5),
              "attention_with_kvcache": (q, k, v, torch.tensor([3, 7], dtype=torch.int32)),
              "write_kvcache": (k[0], v[0], torch.zeros(3, 4, 2, 64, dtype=k.dtype), torch.zeros(3, 4, 2, 64, dtype=k.dtype),
                                torch.tensor([9, 3, -1, 4, 0, 11, 6]))}[name]
    keywords = {} if name == "write_kvcache" else dict(causal=True, return_lse=True)
    torch.library.opcheck(getattr(OPS, name).default, inputs, keywords)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_lowers_float32(torch_gpu, dtype):
    q, k, v = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out = autotune.attention(q, k, v)
    assert out.dtype == dtype and len(torch_gpu.calls) == 1
    close(out, plain(q, k, v))
    assert autotune.attention(q, k, v).dtype == torch.float32


def test_gradients_pass_through_autocast(torch_gpu, monkeypatch):
    def differentiate(library, q, k, v, out, lse, dout, *_):
        assert q.dtype == dout.dtype == torch.bfloat16
        return torch.ones_like(q), 2 * torch.ones_like(k), 3 * torch.ones_like(v), None

    monkeypatch.setattr(autograd.gradients, "differentiate", differentiate)
    monkeypatch.setattr(autograd, "_must_be_served", lambda *_: None)
    q, k, v = (array.requires_grad_() for array in qkv(dtype=torch.float32))
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        out = autotune.attention(q, k, v, causal=True)
        packed = autotune.attention_varlen(q[0], k[0, :5], v[0, :5], starts, starts, 5, 5)
    close(out.detach(), plain(q.detach(), k.detach(), v.detach(), causal=True))
    out.sum().backward()
    assert [float(array.grad.max()) for array in (q, k, v)] == [1, 2, 3] and q.grad.dtype == torch.float32
    packed.sum().backward()
    assert float(q.grad.max()) == 2


@pytest.mark.parametrize("which", ["q", "sinks", "out"])
def test_gradients_over_a_cache_are_refused_while_tracing_too(torch_gpu, which):
    q, k, v = qkv()
    arrays = {"q": q, "sinks": torch.zeros(4), "out": torch.zeros_like(q)}
    arrays[which] = arrays[which].requires_grad_()
    none = dict.fromkeys(("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "k_scale", "v_scale",
                          "num_splits", "scale", "alibi_slopes"))
    with pytest.raises(AttentionError, match=f"{which} requires grad"):
        ops.attention_with_kvcache(arrays["q"], k, v, **none, causal=True, window=(None, None), softcap=0.0,
                                   sinks=arrays["sinks"], return_lse=False, out=arrays["out"], prefix=0)


def test_eager_calls_do_not_go_through_the_dispatcher(torch_gpu, monkeypatch):
    monkeypatch.setattr(ops, "attention", None)
    q, k, v = qkv()
    close(autotune.attention(q, k, v), plain(q, k, v))


@pytest.mark.parametrize("capturing", [False, True])
def test_workspaces_come_from_torch_where_a_stream_has_none(torch_gpu, monkeypatch, capturing):
    taken = []
    monkeypatch.setattr(workspaces, "MOST_BYTES", workspaces.MOST_BYTES if capturing else 0)
    monkeypatch.setattr(torch_gpu.tensors, "workspace",
                        lambda like, floats, capturing: taken.append(floats) or like.new_empty(floats, dtype=torch.float32))
    q, k, v = qkv(batch=1, rows=1, keys=4096)
    chosen = autotune.lookup("decode-bf16-b1-h4x2-q1-k4096-d64", "nvidia-h200").config
    config = chosen.text.replace("cluster_merges=true", "cluster_merges=false")  # parts that a cluster merges need no workspace
    for torch_gpu.capturing in (False, capturing):  # the first loads
        autotune.attention_with_kvcache(q, k, v, num_splits=40, config=config)
    assert len(taken) == (1 if capturing else 2)
