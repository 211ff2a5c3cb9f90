"""Tiny models of random weights, of every kind that autotune's attention says it serves."""

from functools import cache

import torch
import transformers

from autotune.integrations import transformers as integration

SIZES = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128)
DECODERS = {
    "llama": (transformers.LlamaConfig, dict(SIZES)),
    "qwen3": (transformers.Qwen3Config, dict(SIZES, head_dim=32)),
    "mistral": (transformers.MistralConfig, dict(SIZES, sliding_window=6, head_dim=16)),
    "gemma2": (transformers.Gemma2Config, dict(SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=16,
                                               layer_types=["sliding_attention", "full_attention"], attn_logit_softcapping=2.0)),
    "gemma3": (transformers.Gemma3TextConfig, dict(SIZES, head_dim=16, sliding_window=6, query_pre_attn_scalar=16,
                                                   layer_types=["sliding_attention", "full_attention"])),
    "gpt_oss": (transformers.GptOssConfig, dict(SIZES, head_dim=16, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
                                                layer_types=["sliding_attention", "full_attention"])),
}
ENCODER = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
ENCODERS = {
    "bert": (transformers.BertConfig, dict(ENCODER, max_position_embeddings=128)),
    "modernbert": (transformers.ModernBertConfig, dict(ENCODER, max_position_embeddings=128, local_attention=8, pad_token_id=0,
                                                       layer_types=["full_attention", "sliding_attention"])),
}


@cache
def pair(kind: str, dtype=torch.float32):
    """(the model with eager attention, the same weights with autotune's), in eval mode; made once, so to be left as they are"""
    integration.register()
    torch.manual_seed(0)
    config_type, values = (DECODERS | ENCODERS)[kind]
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None) if kind in DECODERS else {}
    auto = transformers.AutoModelForCausalLM if kind in DECODERS else transformers.AutoModel
    eager = auto.from_config(config_type(**{**values, **ids}), attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    ours = auto.from_config(config_type(**{**values, **ids}), attn_implementation="autotune", dtype=dtype).eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens(batch: int, rows: int, seed: int = 0):
    return torch.randint(3, 97, (batch, rows), generator=torch.Generator().manual_seed(seed))
