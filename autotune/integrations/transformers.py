"""Hugging Face transformers: `attn_implementation="autotune"`.

    from autotune.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="autotune")

`register` gives transformers two functions: one computes attention, the other says what a padding mask means to it. Without the
second transformers drops masks in silence.

Nothing here waits for the device. Where a row of a padded batch begins and ends is read there (`spans`), and packed rows and
padded ones reach a kernel as sequences of their own (`layout`): nothing is unpadded, and a captured graph serves other paddings.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils import TransformersKwargs

from ..calls.dense import attention
from ..calls.kvcache import attention_with_kvcache
from ..calls.varlen import attention_varlen
from ..kernels.decode.base import MAX_QUERIES
from . import layout

NAME = "autotune"
TOKENS_A_SEQUENCE = 16  # of packed rows, on average, at least: how many sequences a row may hold is fixed before they are counted
LEAST_SEQUENCES = 32
PAGE_KEYS = 16  # of the pages that a padded decode step reads: as serving engines have them, so records and `prepare` know them
_PLAIN = (causal_mask_function, bidirectional_mask_function)
_KNOWN = {"and_masks", "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
          "packed_sequence_mask_function", "sliding_window_bidirectional_overlay", "remap_positions_for_packed_sequence"}
_HARMLESS = {*TransformersKwargs.__annotations__, "position_ids", "cache_position"}  # tensors that say nothing of scores


def register() -> None:
    """Makes "autotune" an attention implementation of transformers, with its masks. May be called again."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def mask(batch_size: int, q_length: int, kv_length: int, q_offset=0, kv_offset: int = 0, mask_function=causal_mask_function,
         attention_mask=None, use_vmap: bool = False, config=None, device=None, **_):
    """What `attention_forward` must know of a forward's masks, once for all layers: `layout.spans`, `layout.starts` or None.

    Called by transformers. Raises NotImplementedError for masks that are neither causal, bidirectional, of a window, packed nor
    of padding, and for models that compute attention by themselves, which would add these to scores. A row's True values of
    `attention_mask` (B, seen + q_length) must stand together: that is asserted on the device.
    """
    if config is not None and not may_be_replaced(type(config)):
        name = type(config).__name__.removesuffix("Config")
        raise NotImplementedError(_unserved(f"{name}, which computes attention by itself"))
    packed = attention_mask is None and q_length > 1 and q_length == kv_length and mask_function not in _PLAIN
    if use_vmap or getattr(config, "attention_chunk_size", None):
        raise NotImplementedError(_unserved("a mask function of its own" if use_vmap else "chunked attention"))
    if mask_function not in _PLAIN and not torch.compiler.is_compiling():
        packed &= "packed_sequence_mask_function" in _parts(mask_function)
    if packed:
        most = max(LEAST_SEQUENCES, batch_size * q_length // TOKENS_A_SEQUENCE)
        return layout.starts(mask_function, batch_size, q_length, most, device)
    if attention_mask is None and not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length:
        return None
    if attention_mask is None and mask_function is bidirectional_mask_function:
        return None
    return layout.spans(attention_mask, batch_size, kv_length, q_offset, kv_offset, device)


def attention_forward(module, query, key, value, attention_mask, *, dropout: float = 0.0, scaling: float | None = None,
                      is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None, s_aux=None,
                      cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, max_length_k=None, **more):
    """(out (B, S, Hq, Dv), None) for query (B, Hq, S, D), key and value (B, Hkv, Sk, D or Dv); as transformers calls it.

    Raises NotImplementedError for dropout, attention weights to give back, masks that `mask` did not make, continuous batching,
    and any other tensor (a bias, chosen keys): what is not understood is not ignored.
    """
    if dropout:
        raise NotImplementedError("autotune's attention drops nothing: call model.eval(), or set attention_dropout to 0")
    if more:
        _refuse(more)
    causal = module.is_causal if is_causal is None else is_causal
    dtype = target_dtype(module, query)
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
    reach = None if sliding_window is None else sliding_window - 1
    rest = dict(causal=causal, window=(reach, None if causal else reach), scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        return _packed(q, k, v, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, rest), None
    records = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)  # caches have no gradients
    if attention_mask is None:
        few = q.shape[1] <= MAX_QUERIES and k.shape[1] > q.shape[1] and not records
        return (attention_with_kvcache if few else attention)(q, k, v, **rest), None
    if attention_mask.dim() != 4 or attention_mask.dtype != torch.int32:
        raise NotImplementedError(_unserved(f"an attention mask of {attention_mask.dtype} and shape "
                                            f"{tuple(attention_mask.shape)}"))
    if attention_mask.shape[1] == 1:
        starts = attention_mask.flatten()
        return _packed(q, k, v, starts, starts, q.shape[1], q.shape[1], rest), None
    if q.shape[1] == 1 and not records:
        return _decoded(q, k, v, attention_mask, rest), None
    if records:  # rows that overlap have gradients that torch adds up one by one
        k, v = k.contiguous(), v.contiguous()
    return _padded(q, k, v, attention_mask, sliding_window is not None, rest), None


def target_dtype(module, query):
    """The dtype to compute in: a model of 16 bits may have float32 norms, and so float32 queries."""
    if query.dtype != torch.float32:
        return query.dtype
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    return next((part.weight.dtype for part in module.modules() if isinstance(part, torch.nn.Linear)
                 and part.weight.is_floating_point()), query.dtype)


def _packed(q, k, v, starts_q, starts_k, longest_q, longest_k, rest: dict):
    """Rows of several sequences each."""
    out = attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts_q, starts_k,
                           longest_q or q.shape[1], longest_k or k.shape[1], **rest)
    return out.unflatten(0, q.shape[:2])


def _padded(q, k, v, spans, windowed: bool, rest: dict):
    """Several queries a row: every row is up to four sequences, of which one has what is not padding."""
    batch, rows = q.shape[:2]
    k, v, gap = layout.as_rows(k, v, batch)
    starts_q, starts_k = layout.sequences(spans, rows, k.shape[1], gap, rest["causal"], windowed)
    out = attention_varlen(q.flatten(0, 1), layout.joined(k), layout.joined(v), starts_q, starts_k, rows, k.shape[1], **rest)
    return out.unflatten(0, (batch, rows))


def _decoded(q, k, v, spans, rest: dict):
    """One query a row: the keys are a cache, of pages that begin at a row's first token where rows may begin with padding."""
    if spans.shape[1] == 2:
        return attention_with_kvcache(q, k, v, cache_seqlens=layout.lengths(spans, rest["causal"]), **rest)
    k, v, gap = layout.as_rows(k, v, q.shape[0])
    rows_k, rows_v = layout.joined(k), layout.joined(v)
    size = PAGE_KEYS if rows_k.shape[0] >= PAGE_KEYS else 1
    table, lengths = layout.pages(spans, k.shape[1], gap, rest["causal"], size)
    return attention_with_kvcache(q, layout.overlapping(rows_k, size), layout.overlapping(rows_v, size), cache_seqlens=lengths,
                                  page_table=table, **rest)


@torch.compiler.assume_constant_result
def may_be_replaced(config_type: type) -> bool:
    """Whether models of this config call the attention function that they are told to, as far as transformers can say."""
    return _may_be_replaced(config_type)


@lru_cache(maxsize=256)
def _may_be_replaced(config_type: type) -> bool:
    waiting = [PreTrainedModel]
    for kind in waiting:
        waiting += kind.__subclasses__()
    models = [kind for kind in waiting if kind.__dict__.get("config_class") is config_type]
    return all(kind._can_set_attn_implementation() for kind in models if hasattr(kind, "_can_set_attn_implementation"))


def _refuse(more: dict) -> None:
    """Raises NotImplementedError for the first argument that would change a result, or that asks for another one."""
    if more.get("output_attentions"):
        raise NotImplementedError("autotune's attention keeps no weights: for output_attentions load this model with "
                                  "attn_implementation=\"eager\"")
    for name, value in more.items():
        if value is not None and name in ("cache", "block_table"):
            raise NotImplementedError(_unserved("continuous batching (generate_batch)"))
        if isinstance(value, torch.Tensor) and name not in _HARMLESS:
            raise NotImplementedError(_unserved(f"the argument {name}"))


def _parts(function) -> set[str]:
    """Names of the functions of transformers.masking_utils that made a mask function. Raises NotImplementedError for others."""
    name = getattr(function, "__qualname__", repr(function)).partition(".")[0]
    if name not in _KNOWN:
        raise NotImplementedError(_unserved(f"the mask function {name}"))
    found = {name}
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        for one in inner if isinstance(inner, tuple) else (inner,):
            if callable(one) and not isinstance(one, torch.Tensor):
                found |= _parts(one)
    return found


def _unserved(what: str) -> str:
    return f"autotune's attention does not serve {what}: load this model with attn_implementation=\"sdpa\""
