"""A vLLM attention backend: `--attention-backend CUSTOM`, with autotune installed beside vLLM (`vllm_plugin` registers it).

Built against vLLM 0.33. One call serves a batch of prompts, chunks of prompts and decodes; lengths and pages are read on the
device, so every batch may be a full CUDA graph. Served: windows, softcap, ALiBi, sinks, any page size, 8-bit caches
(`--kv-cache-dtype fp8`, whose prompts run in pieces of few queries: `paged`). Not served: encoders, MLA, non-causal decoders,
context parallelism, prefix ranges of images.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from vllm.v1.attention.backend import (
    AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType, MultipleOf)

from ..calls.writing import write_kvcache
from . import paged

LEAST_CAPABILITY = 8
MOST_HEAD_DIM = 256
EIGHT_BITS = "fp8", "fp8_e4m3"  # vLLM keeps their bytes as uint8


class AutotuneBackend(AttentionBackend):
    """What autotune's attention can do, in vLLM's words."""

    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *EIGHT_BITS]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return AutotuneImpl

    @staticmethod
    def get_builder_cls():
        return AutotuneMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MOST_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        return capability.major >= LEAST_CAPABILITY


@dataclass
class AutotuneMetadata:
    """What layers of one kind must know of a batch. Tensors are vLLM's own, on the device."""

    num_actual_tokens: int
    batch: paged.Batch
    slot_mapping: torch.Tensor  # (tokens,)


class AutotuneMetadataBuilder(AttentionMetadataBuilder):
    """Hands on what vLLM says of a batch: nothing is planned ahead."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> AutotuneMetadata:
        """The metadata of a batch. Raises NotImplementedError for one that is not causal."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise NotImplementedError("autotune's vLLM backend serves causal batches only: choose --attention-backend FLASH_ATTN")
        sequences = paged.Batch(batch.query_start_loc, batch.seq_lens, batch.block_table_tensor, batch.max_query_len,
                                batch.max_seq_len)
        return AutotuneMetadata(batch.num_actual_tokens, sequences, batch.slot_mapping)

    def update_block_table(self, metadata, blk_table, slot_mapping) -> AutotuneMetadata:
        """The same batch over the pages of another kind of layer."""
        other = copy.copy(metadata)
        other.batch, other.slot_mapping = replace(metadata.batch, table=blk_table, _pieces=None), slot_mapping
        return other


class AutotuneImpl(AttentionImpl):
    """Attention of one layer."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
                 kv_sharing_target_layer_name=None, sinks=None):
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"autotune's vLLM backend serves decoder layers, not {attn_type} ones: choose "
                                      "--attention-backend FLASH_ATTN")
        if kv_cache_dtype not in AutotuneBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"autotune's vLLM backend does not serve a {kv_cache_dtype} cache: choose "
                                      "--kv-cache-dtype auto or fp8")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.window = (None if sliding_window is None else sliding_window - 1, None)
        self.softcap, self.sinks = float(logits_soft_cap or 0), sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Writes key and value (tokens or more, Hkv, D) of the batch into the cache; the slots say how many tokens there are."""
        tokens = slot_mapping.shape[0]
        write_kvcache(key[:tokens], value[:tokens], *self._pages(kv_cache), slot_mapping, **self._scales(layer))

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        """Attention of query (tokens, Hq, D) over the cache, into `output`. Without metadata (a profiling run) that is zeros."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("autotune's vLLM backend does not quantize its output: switch fused output quantization "
                                      "off")
        if self.alibi_slopes is not None:  # when vLLM profiles: no copy from the host may be captured
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        if attn_metadata is None:
            return output.fill_(0)
        tokens, shape = attn_metadata.num_actual_tokens, (-1, self.num_heads, self.head_size)
        paged.attend(query[:tokens].view(shape), *self._pages(kv_cache), attn_metadata.batch, window=self.window,
                     scale=self.scale, softcap=self.softcap, sinks=self.sinks, alibi_slopes=self.alibi_slopes,
                     out=output[:tokens].view(shape), **self._scales(layer))
        return output

    def _pages(self, kv_cache) -> tuple:
        """(keys, values), each (pages, page_size, Hkv, D), of vLLM's cache (pages, Hkv, page_size, 2 * D)."""
        if self.kv_cache_dtype in EIGHT_BITS:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def _scales(self, layer) -> dict:
        """What 8-bit keys and values are multiplied with: vLLM's float32 numbers on the device."""
        return dict(k_scale=layer._k_scale, v_scale=layer._v_scale) if self.kv_cache_dtype in EIGHT_BITS else {}
