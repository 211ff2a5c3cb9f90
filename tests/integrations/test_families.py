"""Families of transformers with something of their own: a scale, values of another head dim, cross attention, biases that nobody
may drop. Each is right against eager, or refused in a sentence."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import ENCODER, SIZES, tokens  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

from autotune.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.slow

IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
SEQ2SEQ = dict(vocab_size=97, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
               decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, pad_token_id=0, bos_token_id=1, eos_token_id=2,
               decoder_start_token_id=1)
LATENT = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
              n_group=1, n_routed_experts=2, num_experts_per_tok=1, topk_group=1, moe_intermediate_size=32,
              first_k_dense_replace=2)
MASK = torch.ones(2, 11, dtype=torch.long)
MASK[0, :4] = 0
TEXT = dict(input_ids=tokens(2, 11), attention_mask=MASK)
BOTH = dict(TEXT, decoder_input_ids=tokens(2, 5, 3))
SOUND = dict(input_features=torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0)), decoder_input_ids=tokens(2, 5, 3))
SERVED = {
    "Granite": (dict(SIZES, attention_multiplier=0.3), TEXT),  # a scale that is not the head dim's
    "DeepseekV3": (dict(SIZES, **LATENT), TEXT),  # keys of 24, values of 16
    "Starcoder2": (dict(SIZES, sliding_window=6), TEXT),
    "GPTNeoX": ({name: size for name, size in SIZES.items() if name != "num_key_value_heads"}, TEXT),
    "Bart": (dict(SEQ2SEQ, max_position_embeddings=64), BOTH),  # a decoder across to a padded encoder
    "Whisper": (dict(SEQ2SEQ, num_mel_bins=8, max_source_positions=20, max_target_positions=32), SOUND),
}
REFUSED = {
    "Bloom": (dict(vocab_size=97, hidden_size=64, n_layer=1, n_head=4), "Bloom, which computes attention by itself"),
    "Longformer": (dict(ENCODER, attention_window=4), "Longformer, which computes attention by itself"),
    "T5": (dict(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0),
           "the argument position_bias"),
    "Llama4Text": (dict(SIZES, head_dim=16, num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=8),
                   "chunked attention"),
}


def model_of(name: str, values: dict, implementation: str):
    config = getattr(transformers, f"{name}Config")(**{**values, **(IDS if name not in ("Bart", "Whisper") else {})})
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Model")
    return kind._from_config(copy.deepcopy(config), attn_implementation=implementation, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def no_gradients():
    integration.register()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", SERVED)
def test_as_eager(torch_gpu, name):
    values, inputs = SERVED[name]
    eager, ours = (model_of(name, values, implementation) for implementation in ("eager", "autotune"))
    for parameter in eager.parameters():
        parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    ours.load_state_dict(eager.state_dict())
    out, expected = ours(**inputs)[0], eager(**inputs)[0]
    shown = MASK[..., None] if out.shape[1] == MASK.shape[1] else 1
    assert torch_gpu.calls and out.isfinite().all()
    torch.testing.assert_close(out * shown, expected * shown, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(torch_gpu, name):
    values, what = REFUSED[name]
    inputs = dict(TEXT, decoder_input_ids=TEXT["input_ids"]) if name == "T5" else TEXT
    with pytest.raises(NotImplementedError, match=f'does not serve {what}: load this model with attn_implementation="sdpa"'):
        model_of(name, values, "autotune")(**inputs)
    assert not torch_gpu.calls


@pytest.mark.parametrize("argument, match", [
    (dict(output_attentions=True), 'output_attentions.*"eager"'), (dict(cache=object()), "continuous batching"),
    (dict(block_table=torch.zeros(1)), "continuous batching"), (dict(indices=torch.zeros(1)), "the argument indices"),
    (dict(attention_bias=torch.zeros(1)), "the argument attention_bias")])
def test_what_is_not_understood_is_not_ignored(torch_gpu, argument, match):
    module = model_of("Granite", SERVED["Granite"][0], "autotune").layers[0].self_attn
    q = torch.randn(1, 4, 5, 16)
    with pytest.raises(NotImplementedError, match=match):
        integration.attention_forward(module, q, q, q, None, **argument)
    harmless = dict(position_ids=torch.zeros(1), num_items_in_batch=torch.ones(()), use_cache=True, output_attentions=False)
    assert integration.attention_forward(module, q, q, q, None, **harmless)[0].shape == (1, 5, 4, 16)


@pytest.mark.parametrize("records", [False, True])
def test_few_queries_of_a_training_step_have_gradients(torch_gpu, monkeypatch, records):
    """A decoder's across to an encoder: caches have no gradients, so those go another way."""
    module = model_of("Bart", SERVED["Bart"][0], "autotune").decoder.layers[0].encoder_attn
    went = []
    for name in ("attention", "attention_with_kvcache"):
        monkeypatch.setattr(integration, name, lambda q, *_, name=name, **__: went.append(name) or q)
    q, k = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 9, 16)
    with torch.set_grad_enabled(records):
        integration.attention_forward(module, q.requires_grad_(), k, k, None)
    assert went == ["attention" if records else "attention_with_kvcache"]
