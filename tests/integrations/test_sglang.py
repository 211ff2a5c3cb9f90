"""The SGLang backend against the protocol recorded from SGLang's wheel, and its numbers. SGLang itself is not installed."""

import inspect
import re
import sys
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

torch = pytest.importorskip("torch")

from references import close, plain, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

from autotune.integrations import sglang_plugin  # noqa: E402

pytestmark = pytest.mark.slow

PROTOCOL = yaml.safe_load((Path(__file__).parents[1] / "data" / "sglang_protocol.yaml").read_text())
CONTEXT, REQUESTS, HEADS, HEADS_KV, DIM = 96, 4, 4, 2, 64
Kind = Enum("AttentionType", dict(DECODER="decoder", ENCODER_ONLY="encoder_only"))


class Mode:
    """ForwardMode: every question is answered with no, but those that are named."""

    def __init__(self, *true):
        for question in PROTOCOL["ForwardMode"]["methods"]:
            setattr(self, question, lambda *_, answer=question in true: answer)


DECODE, EXTEND = Mode("is_decode", "is_decode_or_idle"), Mode("is_extend")


class Pool:
    """MHATokenToKVPool: slots of one layer. What was never written is NaN."""

    def __init__(self, slots, dtype):
        self.buffers = [torch.full((slots, HEADS_KV, DIM), float("nan")).to(dtype) for _ in range(2)]

    def get_kv_buffer(self, layer_id):
        return tuple(self.buffers)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        self.write(loc_info.loc, cache_k, cache_v, k_scale, v_scale)

    def write(self, slots, *new_and_scales):
        for buffer, new, scale in zip(self.buffers, new_and_scales[:2], new_and_scales[2:]):
            buffer[slots] = (new.float() / (1 if scale is None else scale)).to(buffer.dtype)


class WindowPool(Pool):
    """SWAKVPool: layers with a window have slots of their own."""

    swa_layer_nums = 1

    def __init__(self, slots, dtype):
        super().__init__(slots, dtype)
        self.mapping = torch.cat([torch.randperm(slots // 4, generator=torch.Generator().manual_seed(3)).repeat_interleave(4) * 4
                                  + torch.arange(4).repeat(slots // 4), torch.tensor([-1])])

    def translate_loc_from_full_to_swa(self, kv_indices):
        return self.mapping[kv_indices]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None):
        self.write(loc_info.swa_loc if layer.sliding_window_size >= 0 else loc_info.loc, cache_k, cache_v, k_scale, v_scale)


class KVWriteLoc:
    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
        return SimpleNamespace(loc=forward_batch.out_cache_loc, swa_loc=swa_loc)


@pytest.fixture(name="sglang")
def stub(monkeypatch):
    """autotune.integrations.sglang, and what its plugin registered, over an sglang of stubs."""
    chosen, made = [], {}
    methods = {called: lambda self, *_: None for called in PROTOCOL["AttentionBackend"]["methods"] if not called.startswith("_")}
    parts = {
        "sglang.srt.layers.attention.base_attn_backend": dict(AttentionBackend=type("AttentionBackend", (), methods)),
        "sglang.srt.mem_cache.memory_pool": dict(KVWriteLoc=KVWriteLoc),
        "sglang.srt.mem_cache.swa_memory_pool": dict(SWAKVPool=WindowPool),
        "sglang.srt.arg_groups.choices": dict(ATTENTION_BACKEND_CHOICES=chosen, add_attention_backend_choices=chosen.extend),
        "sglang.srt.layers.attention.attention_registry": dict(
            register_attention_backend=lambda name: lambda make: made.update({name: make}))}
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        for depth in range(name.count(".")):
            above = name.rsplit(".", depth + 1)[0]
            monkeypatch.setitem(sys.modules, above, sys.modules.get(above) or ModuleType(above))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "autotune.integrations.sglang", raising=False)
    yield SimpleNamespace(module=import_module("autotune.integrations.sglang"), chosen=chosen, made=made)
    sys.modules.pop("autotune.integrations.sglang", None)


def runner_of(page_size=4, dtype=torch.bfloat16, pool=Pool, **model):
    """A ModelRunner whose requests' tokens lie in pages of a shuffled order."""
    pages = torch.randperm(REQUESTS * CONTEXT // page_size, generator=torch.Generator().manual_seed(1)) * page_size
    tokens = (pages[:, None] + torch.arange(page_size)).view(REQUESTS, CONTEXT).int()
    config = dict(is_encoder_decoder=False, is_local_attention_model=False, context_len=CONTEXT) | model
    return SimpleNamespace(model_config=SimpleNamespace(**config), use_mla_backend=False, kv_cache_dtype=dtype,
                           kv_index_translator=SimpleNamespace(is_translating=False), page_size=page_size,
                           token_to_kv_pool=pool(REQUESTS * CONTEXT, dtype),
                           req_to_token_pool=SimpleNamespace(req_to_token=tokens))


def layer_of(**more):
    return SimpleNamespace(**dict(
        tp_q_head_num=HEADS, tp_k_head_num=HEADS_KV, tp_v_head_num=HEADS_KV, qk_head_dim=DIM, v_head_dim=DIM, head_dim=DIM,
        scaling=0.125, layer_id=0, logit_cap=0.0, logit_capping_method="tanh", sliding_window_size=-1, is_cross_attention=False,
        attn_type=Kind.DECODER, k_scale=None, v_scale=None, xai_temperature_len=-1) | more)


def batch_of(runner, requests, lengths, new, mode, known=True):
    slots = torch.cat([runner.req_to_token_pool.req_to_token[r, n - m:n] for r, n, m in zip(requests, lengths, new)]).long()
    return SimpleNamespace(
        forward_mode=mode, batch_size=len(requests), req_pool_indices=torch.tensor(requests), seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths) if known else None, out_cache_loc=slots, spec_info=None,
        extend_seq_lens=torch.tensor(new), extend_seq_lens_cpu=new if known else None, positions=torch.zeros(sum(new)))


def compare(sglang, runner, layer, reference, sinks=None, steps=None):
    """Two prompts, a chunk of one beside a new prompt, a decode step: each against plain attention over all keys so far."""
    backend, texts = sglang.module.AutotuneAttnBackend(runner), [qkv(1, 96, 96, seed=seed) for seed in range(REQUESTS)]
    eight = runner.kv_cache_dtype == torch.float8_e4m3fn
    for requests, lengths, new, mode in steps or (([2, 0], [30, 7], [30, 7], EXTEND), ([2, 1], [55, 20], [25, 20], EXTEND),
                                                  ([2, 1, 0], [56, 21, 8], [1, 1, 1], DECODE)):
        backend.init_forward_metadata(batch := batch_of(runner, requests, lengths, new, mode, known=len(requests) != 3))
        q, k, v = (torch.cat([texts[r][i][0, n - m:n] for r, n, m in zip(requests, lengths, new)]) for i in range(3))
        run = backend.forward_decode if mode is DECODE else backend.forward_extend
        out = run(q.flatten(1), k, v, layer, batch, True, sinks=sinks).view(-1, HEADS, DIM)
        begin = 0
        for r, n, m in zip(requests, lengths, new):
            q1, k1, v1 = texts[r][0][:, n - m:n], *(x[:, :n] for x in texts[r][1:])
            if eight:
                k1, v1 = ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale
                          for x, scale in ((k1, layer.k_scale), (v1, layer.v_scale)))
            close(out[None, begin:begin + m], plain(q1, k1, v1, **{"causal": True, **reference}))
            begin += m
    return backend


@pytest.mark.parametrize("options, sinks, page_size", [
    ({}, None, 1), (dict(sliding_window_size=5), None, 4), (dict(logit_cap=5.0), torch.tensor([0.5, -1.0, 2.0, 0.0]), 16)])
def test_prompts_chunks_and_steps(sglang, torch_gpu, options, sinks, page_size):
    reference = dict(window=(options.get("sliding_window_size"), None), softcap=options.get("logit_cap", 0.0), sinks=sinks)
    compare(sglang, runner_of(page_size), layer_of(**options), reference, sinks)


def test_a_cache_of_8_bits(sglang, torch_gpu):
    """Prompts run in pieces of as many queries as a decode kernel takes."""
    layer = layer_of(k_scale=torch.tensor(0.5), v_scale=torch.tensor(2.0))
    compare(sglang, runner_of(4, torch.float8_e4m3fn), layer, {})
    assert {call["kernel"] for call in torch_gpu.calls} == {"decode_mma"}


def test_layers_with_a_window_have_a_cache_of_their_own(sglang, torch_gpu):
    runner = runner_of(4, pool=WindowPool)
    compare(sglang, runner, layer_of(sliding_window_size=5), dict(window=(5, None)))
    for buffer in runner.token_to_kv_pool.buffers:
        buffer.fill_(float("nan"))
    compare(sglang, runner, layer_of(), {})


def test_an_encoder_sees_both_sides(sglang, torch_gpu):
    steps = [([2, 0], [30, 7], [30, 7], EXTEND)]
    compare(sglang, runner_of(), layer_of(attn_type=Kind.ENCODER_ONLY, sliding_window_size=3),
            dict(causal=False, window=(3, 3)), steps=steps)


@pytest.mark.parametrize("pool", [Pool, WindowPool])
def test_a_captured_graph_reads_the_lengths_and_pages_of_each_replay(sglang, torch_gpu, pool):
    runner = runner_of(pool=pool)
    layer = layer_of(sliding_window_size=50)  # further than any of these reach
    backend = compare(sglang, runner, layer, {}, steps=[([2, 1], [40, 9], [40, 9], EXTEND)])
    backend.init_cuda_graph_state(3, 3)
    texts = [qkv(1, 96, 96, seed=seed) for seed in range(REQUESTS)]
    addresses = set()
    for capturing, lengths in ((True, [1, 1]), (False, [41, 10]), (False, [42, 11])):
        batch = batch_of(runner, [2, 1], lengths, [1, 1], DECODE)
        backend.init_forward_metadata_out_graph(batch, in_capture=capturing)
        q, k, v = (torch.cat([texts[r][i][0, n - 1:n] for r, n in zip((2, 1), lengths)]) for i in range(3))
        out = backend.forward_decode(q.flatten(1), k, v, layer, batch)
        launched = torch_gpu.calls[-1]
        addresses.add((launched["cache_seqlens"] if "cache_seqlens" in launched else launched["lengths"], launched["page_table"]))
        for i, (r, n) in enumerate(zip((2, 1), lengths)):
            if not capturing:
                close(out[i].view(1, 1, HEADS, DIM), plain(q[None, i:i + 1], *(x[:, :n] for x in texts[r][1:]), causal=True))
    assert len(addresses) == 1 and backend.get_cuda_graph_seq_len_fill_value() == 1


def test_methods_take_what_sglang_passes(sglang):
    cls = sglang.module.AutotuneAttnBackend
    for theirs in ("AttentionBackend", "FlashAttentionBackend"):
        for called, parameters in PROTOCOL[theirs]["methods"].items():
            own = cls.__dict__.get(called)
            if own is not None:
                ours = inspect.signature(own).parameters
                positional = [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD and name != "self"]
                assert positional == parameters[:len(positional)], called
                assert "more" in ours or len(positional) == len(parameters), called
    raising = {"init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "forward_decode", "forward_extend"}  # in theirs
    assert raising <= set(vars(cls))


def test_what_is_read_of_sglangs_objects_exists(sglang):
    source = inspect.getsource(sglang.module)
    for name, pattern in (("ForwardBatch", r"\bforward_batch\.(\w+)"), ("RadixAttention", r"\blayer\.(\w+)"),
                          ("ForwardMode", r"\bmode\.(\w+)"), ("SWAKVPool", r"self\.pool\.(\w+)\("),
                          ("KVWriteLoc", r"\bKVWriteLoc\.(\w+)")):
        used = set(re.findall(pattern, source))
        known = set(PROTOCOL[name].get("fields", ())) | set(PROTOCOL[name].get("methods", ()))
        assert used and used <= known, (name, used - known)


def test_the_plugin_names_the_backend(sglang, torch_gpu):
    sglang_plugin.register()
    sglang_plugin.register()
    assert sglang.chosen == ["autotune"]
    assert type(sglang.made["autotune"](runner_of())) is sglang.module.AutotuneAttnBackend
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"sglang.srt.plugins"]\nautotune = "autotune.integrations.sglang_plugin:register"' in declared


@pytest.mark.parametrize("change, match", [
    (dict(use_mla_backend=True), "MLA"), (dict(kv_cache_dtype=torch.uint8), "a cache of torch.uint8"),
    (dict(kv_index_translator=SimpleNamespace(is_translating=True)), "unified memory")])
def test_what_a_server_asks_for_and_is_not_served(sglang, change, match):
    runner = runner_of()
    vars(runner).update(change)
    with pytest.raises(NotImplementedError, match=f"{re.escape(match)}.*--attention-backend fa3 or triton"):
        sglang.module.AutotuneAttnBackend(runner)


def test_what_a_batch_or_a_layer_asks_for_and_is_not_served(sglang, torch_gpu):
    runner = runner_of()
    backend = sglang.module.AutotuneAttnBackend(runner)
    batch = batch_of(runner, [0], [3], [3], EXTEND)
    backend.init_forward_metadata(batch)
    q, k, v = (x[0, :3] for x in qkv(1, 3, 3))
    for layer, more, match in ((layer_of(), dict(q_rope=q), "q_rope"), (layer_of(), dict(return_lse=True), "return_lse"),
                               (layer_of(is_cross_attention=True), {}, "cross attention"),
                               (layer_of(xai_temperature_len=8), {}, "temperature")):
        with pytest.raises(NotImplementedError, match=match):
            backend.forward_extend(q, k, v, layer, batch, **more)
    for change in (dict(forward_mode=Mode("is_target_verify", "is_extend")), dict(spec_info=object())):
        with pytest.raises(NotImplementedError, match="speculative decoding"):
            backend.init_forward_metadata(SimpleNamespace(**vars(batch) | change))
    assert not torch_gpu.calls
