"""The vLLM backend against the protocol recorded from vLLM's wheel, and its numbers. vLLM itself is not installed."""

import inspect
import re
import sys
from enum import Enum
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

torch = pytest.importorskip("torch")

from references import close, plain, qkv  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

pytestmark = pytest.mark.slow

PROTOCOL = yaml.safe_load((Path(__file__).parents[1] / "data" / "vllm_protocol.yaml").read_text())
OURS = {
    "AttentionBackend": "AutotuneBackend",
    "AttentionImpl": "AutotuneImpl",
    "AttentionMetadataBuilder": "AutotuneMetadataBuilder",
    "FlashAttentionImpl": "AutotuneImpl",
     "FlashAttentionMetadataBuilder": "AutotuneMetadataBuilder"}


def protocol_class(name: str) -> type:
    """A class with the methods that vLLM's has, each of which says that it was not overridden."""
    def method(called):
        def missing(self, *args):
            if called != "__init__":
                raise NotImplementedError(called)
        return missing
    return type(name, (), {called.rstrip("*"): method(called.rstrip("*")) for called in PROTOCOL[name]["methods"]})


@pytest.fixture(name="vllm")
def stub(monkeypatch):
    """autotune.integrations.vllm, and what was registered, over a vllm of stubs."""
    registered = {}
    backend, registry = ModuleType("vllm.v1.attention.backend"), ModuleType("vllm.v1.attention.backends.registry")
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"):
        setattr(backend, name, protocol_class(name))
    backend.AttentionCGSupport = Enum(
    "AttentionCGSupport",
    dict(
        NEVER=0,
        UNIFORM_SINGLE_TOKEN_DECODE=1,
        UNIFORM_BATCH=2,
         ALWAYS=3))
    backend.AttentionType = Enum("AttentionType", dict(DECODER="decoder", ENCODER="encoder"), type=str)
    backend.MultipleOf = lambda base: SimpleNamespace(base=base)
    registry.AttentionBackendEnum = Enum("AttentionBackendEnum", dict(FLASH_ATTN=1, CUSTOM=2))
    registry.register_backend = lambda member, path: registered.update({member.name: path})
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.delitem(sys.modules, "autotune.integrations.vllm", raising=False)
    yield SimpleNamespace(module=import_module("autotune.integrations.vllm"), registered=registered)
    sys.modules.pop("autotune.integrations.vllm", None)


@pytest.mark.parametrize("theirs", OURS)
def test_methods_take_what_vllm_passes(vllm, theirs):
    cls, found = getattr(vllm.module, OURS[theirs]), 0
    for called, parameters in PROTOCOL[theirs]["methods"].items():
        own = cls.__dict__.get(called.rstrip("*"))
        if own is None:
            assert not called.endswith("*"), f"{called} is abstract"
            continue
        names = [name for name in inspect.signature(getattr(own, "__func__", own)).parameters if name not in ("self", "cls")]
        assert names[:len(parameters)] == parameters, called
        found += 1
    assert found


def test_fields_of_a_batch_are_vllms(vllm):
    source = inspect.getsource(vllm.module.AutotuneMetadataBuilder.build)
    used = set(re.findall(r"\bbatch\.(\w+)", source))
    assert len(used) == 8 and used <= set(PROTOCOL["CommonAttentionMetadata"]["fields"])


def test_the_plugin_names_the_backend(vllm):
    from autotune.integrations import vllm_plugin

    vllm_plugin.register()
    module, _, name = vllm.registered["CUSTOM"].rpartition(".")
    assert getattr(
    sys.modules[module],
     name) is vllm.module.AutotuneBackend and vllm.module.AutotuneBackend.get_name() == "CUSTOM"
    listed = {entry.name: entry.value for entry in metadata.entry_points(group="vllm.general_plugins")}
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert listed.get("autotune", "autotune.integrations.vllm_plugin:register") in declared


def test_what_it_says_of_itself(vllm):
    backend, builder = vllm.module.AutotuneBackend, vllm.module.AutotuneMetadataBuilder
    assert builder._cudagraph_support.name == "ALWAYS" and backend.supports_sink() and backend.supports_sliding_window()
    assert backend.supports_head_size(128) and not backend.supports_head_size(100) and not backend.supports_head_size(512)
    assert backend.supports_attn_type("decoder") and not backend.supports_attn_type("encoder")
    assert backend.get_supported_kernel_block_sizes()[0].base == 1
    assert backend.get_impl_cls() is vllm.module.AutotuneImpl and backend.get_builder_cls() is builder


def batch_of(lengths, new, page_size=4):
    """(CommonAttentionMetadata of a batch, keys, values, queries): sequence b has lengths[b] keys, of which new[b] are new."""
    pages = max(lengths) // page_size + 1
    table = torch.randperm(len(lengths) * pages, generator=torch.Generator().manual_seed(1)).view(len(lengths), pages).int()
    starts = torch.tensor([0, *new]).cumsum(0).int()
    slots = torch.cat([torch.tensor([int(table[b, j // page_size]) * page_size + j % page_size for j in range(n - m, n)])
                       for b, (n, m) in enumerate(zip(lengths, new))])
    metadata = SimpleNamespace(
    num_actual_tokens=sum(new),
    max_query_len=max(new),
    max_seq_len=max(lengths),
    query_start_loc=starts,
    seq_lens=torch.tensor(lengths).int(),
    block_table_tensor=table,
    slot_mapping=slots,
     causal=True)
    return metadata, table.numel()


@pytest.mark.parametrize("options, reference", [
    ({}, {}), (dict(sliding_window=3), dict(window=(2, None))), (dict(logits_soft_cap=5.0), dict(softcap=5.0)),
    (dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])), dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))),
    (dict(kv_cache_dtype="fp8", sliding_window=30), dict(window=(29, None)))])
def test_a_mixed_batch(vllm, torch_gpu, options, reference):
    """A decode, a chunk of a prompt and a whole prompt, after the earlier keys have been written; also over a cache of 8 bits,
    which vLLM keeps as bytes, with numbers on the device that its layers have."""
    eight = "kv_cache_dtype" in options
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(2.0))
    lengths, new = [9, 40, 5], [1, 20, 5]
    before, count = batch_of([8, 20, 1], [8, 20, 1])
    batch, _ = batch_of(lengths, new)
    batch.block_table_tensor = before.block_table_tensor = torch.arange(33).view(3, 11).int()
    for one, (ns, ms) in ((before, ([8, 20, 0], [8, 20, 0])), (batch, (lengths, new))):
        one.slot_mapping = torch.cat([torch.arange(n - m, n) + 44 * b for b, (n, m) in enumerate(zip(ns, ms))])
    impl = vllm.module.AutotuneImpl(4, 64, 0.125, 2, **options)
    cache = torch.full((33, 2, 4, 128), float("nan")).to(torch.float8_e4m3fn if eight else torch.bfloat16)
    cache = cache.view(torch.uint8) if eight else cache
    keys = [qkv(batch=1, rows=n, keys=n, seed=b) for b, n in enumerate(lengths)]
    old = [torch.cat([keys[b][i][0, :n] for b, n in enumerate([8, 20, 0])]) for i in (1, 2)]
    impl.do_kv_cache_update(layer, *old, cache, before.slot_mapping)
    fresh = [torch.cat([keys[b][i][0, -m:] for b, m in enumerate(new)] + [torch.zeros_like(keys[0][i][0, :3])]) for i in range(3)]
    impl.do_kv_cache_update(layer, fresh[1], fresh[2], cache, batch.slot_mapping)
    made = vllm.module.AutotuneMetadataBuilder(None, [], None, None).build(0, batch)
    output = torch.full((sum(new) + 3, 4, 64), 3.0, dtype=torch.bfloat16)
    assert impl.forward(layer, *fresh, cache, made, output) is output
    begin = 0
    for b, m in enumerate(new):
        k, v = keys[b][1:]
        if eight:
            k, v = ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in ((k, 0.5), (v, 2.0)))
        close(output[None, begin:begin + m], plain(keys[b][0][:, -m:], k, v, causal=True, **reference))
        begin += m
    assert (output[begin:] == 3).all()  # rows behind the batch, of a padded graph, are left alone


def test_refusals_and_profiling(vllm):
    make, impl = vllm.module.AutotuneImpl, vllm.module.AutotuneImpl(4, 64, 0.125)
    with pytest.raises(NotImplementedError, match="--kv-cache-dtype auto or fp8"):
        make(4, 64, 0.125, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(NotImplementedError, match="FLASH_ATTN"):
        make(4, 64, 0.125, attn_type="encoder")
    output = torch.ones(3, 4, 64)
    assert impl.forward(None, None, None, None, None, None, output) is output and not output.any()
    with pytest.raises(NotImplementedError, match="output quantization"):
        impl.forward(None, None, None, None, None, None, output, output_scale=1)
    batch, _ = batch_of([3], [1])
    batch.causal = False
    builder = vllm.module.AutotuneMetadataBuilder(None, [], None, None)
    with pytest.raises(NotImplementedError, match="causal"):
        builder.build(0, batch)
    batch.causal = True
    made = builder.build(0, batch)
    other = builder.update_block_table(made, torch.ones(1, 1), torch.ones(1))
    assert other.batch.table.sum() == 1 and made.batch.table is batch.block_table_tensor
    assert other.batch.lengths is made.batch.lengths
