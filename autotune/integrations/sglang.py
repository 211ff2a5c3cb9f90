"""An SGLang attention backend: `--attention-backend autotune`, with autotune installed beside SGLang.

`sglang_plugin` registers it. Built against SGLang 0.5.23. Lengths and pages are read on the device, so decodes may be replayed
from CUDA graphs. Served: prompts, chunks, mixed batches and decodes; windows (also with a cache of their own), softcap, sinks,
8-bit caches, encoders, any page size. Refused with a sentence: MLA, cross and chunked attention, speculative decoding, unified
memory, FP4 caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from . import paged

DTYPES = torch.float16, torch.bfloat16, torch.float8_e4m3fn  # of a cache


class AutotuneAttnBackend(AttentionBackend):
    """Attention of a model runner's layers."""

    def __init__(self, model_runner):
        super().__init__()
        model = model_runner.model_config
        refused = {"latent attention (MLA)": model_runner.use_mla_backend, "cross attention": model.is_encoder_decoder,
                   "chunked attention": model.is_local_attention_model,
                   "unified memory": model_runner.kv_index_translator.is_translating,
                   f"a cache of {model_runner.kv_cache_dtype}": model_runner.kv_cache_dtype not in DTYPES}
        _refuse(next((what for what, asked in refused.items() if asked), None))
        self.pool, self.page_size = model_runner.token_to_kv_pool, model_runner.page_size
        self.kv_index_translator = model_runner.kv_index_translator
        self.tokens = model_runner.req_to_token_pool.req_to_token  # (requests, context): which slot each token has
        self.longest = model.context_len
        self.own_window_pool = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        self.forward_metadata: Metadata | None = None
        self._static: Metadata | None = None  # what captured graphs point into

    def init_forward_metadata(self, forward_batch) -> None:
        """Before a batch that no graph holds. Raises NotImplementedError for speculative decoding."""
        self.forward_metadata = self._describe(forward_batch, self._longest_k(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes what graphs of up to so many requests and tokens point into."""
        pages = -(-self.longest // self.page_size)

        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=self.tokens.device)

        def batch():
            return paged.Batch(zeros(max_bs + 1), zeros(max_bs), zeros(max_bs, pages), 1, self.longest)

        self._static = Metadata(batch(), batch() if self.own_window_pool else None, zeros(max_num_tokens, dtype=torch.int64))

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """Before a batch is captured or replayed: puts its lengths and pages where the graph reads them."""
        made = self._describe(forward_batch, self._longest_k(forward_batch))
        requests, static = forward_batch.batch_size, self._static
        views = []
        for batch, kept in ((made.batch, static.batch), (made.window_batch, static.window_batch)):
            if batch is not None:
                starts, lengths, table = kept.starts[:requests + 1], kept.lengths[:requests], kept.table[:requests]
                starts.copy_(batch.starts)
                lengths.copy_(batch.lengths)
                table[:, :batch.table.shape[1]].copy_(batch.table)
                longest_q = 1 if forward_batch.forward_mode.is_decode_or_idle() else forward_batch.positions.shape[0]
                batch = paged.Batch(starts, lengths, table, longest_q, self.longest)
            views.append(batch)
        slots = None
        if made.window_slots is not None:
            slots = static.window_slots[:made.window_slots.shape[0]]
            slots.copy_(made.window_slots)
        self.forward_metadata = Metadata(*views, slots)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that only fill a graph's batch."""
        return 1

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, *, sinks=None, **more):
        """out (requests, Hq * Dv) for q (requests, Hq * D): one token a request."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, *, sinks=None, **more):
        """out (tokens, Hq * Dv) for q (tokens, Hq * D): new tokens of each request, behind what the cache has of it."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def support_triton(self) -> bool:
        """Whether SGLang may use kernels of Triton for what surrounds attention: asked of the backend."""
        return True

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache: bool, sinks, more: dict):
        kind = layer.attn_type.value
        _refuse(next((name for name, value in more.items() if value is not None and value is not False), None)
                or ("cross attention" if layer.is_cross_attention else None)
                or ("a temperature that grows with length" if layer.xai_temperature_len > 0 else None)
                or ("a cap other than tanh" if layer.logit_cap and layer.logit_capping_method != "tanh" else None))
        made = self.forward_metadata
        windowed = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        if save_kv_cache and k is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=made.window_slots)
            self.pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        batch = made.window_batch if windowed and made.window_batch is not None else made.batch
        pages = [buffer.view(-1, self.page_size, *buffer.shape[1:]) for buffer in self.pool.get_kv_buffer(layer.layer_id)]
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim)) if out is None else out
        causal = kind == "decoder"
        reach = layer.sliding_window_size if windowed else None  # of keys before a query: SGLang's windows do not count it
        scales = dict(k_scale=layer.k_scale, v_scale=layer.v_scale) if pages[0].element_size() == 1 else {}
        paged.attend(q, *pages, batch, causal=causal, window=(reach, None if causal else reach), scale=layer.scaling,
                     softcap=layer.logit_cap, sinks=sinks, out=out.view(-1, layer.tp_q_head_num, layer.v_head_dim), **scales)
        return out

    def _describe(self, forward_batch, longest_k: int) -> Metadata:
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        _refuse("speculative decoding" if forward_batch.spec_info is not None or mode.is_target_verify()
                or mode.is_draft_extend_v2() or mode.is_dllm_extend() else None)
        lengths = forward_batch.seq_lens[:requests].to(torch.int32)
        if mode.is_decode_or_idle():
            starts, longest_q = torch.arange(requests + 1, dtype=torch.int32, device=lengths.device), 1
        else:
            new = forward_batch.extend_seq_lens[:requests]
            starts = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
            known = forward_batch.extend_seq_lens_cpu
            longest_q = max(known) if known else forward_batch.positions.shape[0]
        slots = self.tokens[forward_batch.req_pool_indices[:requests], :longest_k:self.page_size]
        batch = paged.Batch(starts, lengths, (slots // self.page_size).to(torch.int32), longest_q, longest_k)
        if not self.own_window_pool:
            return Metadata(batch, None, None)
        own = self.pool.translate_loc_from_full_to_swa(slots.long()).clamp(min=0)  # tokens left of all windows have none
        table = (own // self.page_size).to(torch.int32)
        written = forward_batch.out_cache_loc
        return Metadata(batch, paged.Batch(starts, lengths, table, longest_q, longest_k),
                        None if written is None else self.pool.translate_loc_from_full_to_swa(written))

    def _longest_k(self, forward_batch) -> int:
        """Of the batch's lengths, as far as the host knows them."""
        known = forward_batch.seq_lens_cpu
        return self.longest if known is None or not known.numel() else max(int(known.max()), 1)


@dataclass
class Metadata:
    """What layers must know of a batch."""

    batch: paged.Batch
    window_batch: paged.Batch | None  # the same in the cache that layers with a window have of their own, if they do
    window_slots: torch.Tensor | None  # where new tokens go in that cache


def _refuse(what: str | None) -> None:
    if what:
        raise NotImplementedError(f"autotune's SGLang backend does not serve {what}: choose --attention-backend fa3 or triton")
