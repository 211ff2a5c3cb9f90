"""The steps of drop_in.py. Each fills a dict with what it found; times stand beside those of torch's own in the same process."""

from __future__ import annotations

import statistics
import time
import warnings
from functools import partial

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention as sdpa

import autotune
from autotune.integrations import transformers as integration

DEVICE = "cuda"
ROWS, PADS = 4096, 300  # tokens of a prompt, and of padding before a shorter one
PROMPTS, PROMPT, NEW = 8, 1024, 256  # of generate
LAYERS = dict(num_hidden_layers=4, pad_token_id=0, bos_token_id=1, eos_token_id=None)
HYBRID = dict(layer_types=["sliding_attention", "full_attention"] * 2)
CONFIGS = {
    "llama-3-8b": (transformers.LlamaConfig, dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=8192, rope_theta=500000.0)),
    "qwen-3-8b": (transformers.Qwen3Config, dict(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960)),
    "gemma-2-9b": (transformers.Gemma2Config, dict(
        HYBRID, hidden_size=3584, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
        vocab_size=256000, query_pre_attn_scalar=256, sliding_window=4096, max_position_embeddings=8192)),
    "gpt-oss-20b": (transformers.GptOssConfig, dict(
        HYBRID, hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        vocab_size=201088, num_local_experts=32, num_experts_per_tok=4, sliding_window=128)),
}
WITHOUT_SDPA = "gemma-2-9b", "gpt-oss-20b"  # a soft cap and sinks: compared with eager


def prepare() -> None:
    """Registers autotune with transformers, and an attention that computes nothing, which shows the share of the others."""
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    integration.register()
    transformers.AttentionInterface.register("nothing", lambda module, q, k, v, mask, **_: (
        q.new_zeros(()).expand(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).contiguous(), None))
    transformers.AttentionMaskInterface.register("nothing", lambda *_, **__: None)


def versions() -> dict:
    return dict(torch=str(torch.__version__), transformers=transformers.__version__,
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none")


def run(name: str, result: dict) -> None:
    with torch.no_grad():
        STEPS[name](result)


def build(name: str, implementation: str = "eager"):
    torch.manual_seed(0)
    kind, values = CONFIGS[name]
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(kind(**LAYERS, **values), dtype=torch.bfloat16,
                                                              attn_implementation=implementation)
    return model.eval().requires_grad_(False)


def tokens(batch: int, rows: int, seed: int = 0):
    return torch.randint(3, 90, (batch, rows), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def hidden(model, implementation: str, x, **more):
    model.set_attn_implementation(implementation)
    return model.model(x, use_cache=False, **more)[0]


def median_ms(call, times: int = 10) -> float:
    """Of one call, by events, after two that are not counted."""
    samples = []
    for index in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples += [begin.elapsed_time(end)] if index > 1 else []
    return round(statistics.median(samples), 4)


def host_us(call, times: int = 300) -> float:
    """Of one call, as the host sees it: least of five runs of calls without a wait."""
    found = []
    for _ in range(5):
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - begin) / times * 1e6)
        torch.cuda.synchronize()
    return round(min(found), 2)


def timed_s(call) -> tuple:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, round(time.perf_counter() - begin, 3)


def model_step(name: str, result: dict) -> None:
    """Outputs of a prompt against eager in float32, as far away as eager in bf16 is; padded as unpadded; time of a prompt."""
    model, x = build(name), tokens(1, ROWS)
    ours, plain = hidden(model, "autotune", x).float(), hidden(model, "eager", x).float()
    rows = ROWS // 4
    short, mask = tokens(1, rows - PADS, seed=1), torch.ones(2, rows, dtype=torch.long, device=DEVICE)
    mask[0, :PADS] = 0
    batch = torch.cat([torch.nn.functional.pad(short, (PADS, 0)), tokens(1, rows, seed=2)])
    padded = hidden(model, "autotune", batch, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    alone = hidden(model, "autotune", short)
    result["padded_difference"] = float((padded[0, PADS:] - alone[0]).float().abs().max())
    result["eager_difference"] = float((hidden(model, "eager", short)[0] - alone[0]).float().abs().max())
    result["finite"] = bool(padded.isfinite().all() and ours.isfinite().all())
    other = "eager" if name in WITHOUT_SDPA else "sdpa"
    for implementation in ("autotune", other, "nothing"):
        model.set_attn_implementation(implementation)
        result[f"prefill_ms_{implementation}"] = median_ms(lambda: model.model(x, use_cache=False), 5)
    result["attention_share"] = share(result, "prefill_ms_autotune", "prefill_ms_nothing")
    exact = hidden(model.float(), "eager", x)
    result["error_autotune"], result["error_eager"] = (float((y - exact).abs().max()) for y in (ours, plain))
    result["mean_error_autotune"], result["mean_error_eager"] = (float((y - exact).abs().mean()) for y in (ours, plain))
    result["right"] = result["finite"] and result["error_autotune"] <= 2 * result["error_eager"] \
        and result["padded_difference"] <= 2 * max(result["eager_difference"], result["error_eager"])


def share(result: dict, whole: str, without: str) -> float:
    return round(1 - result[without] / result[whole], 3)


def host(result: dict) -> None:
    """What a call costs the host: eager, compiled, and torch's own."""
    q, k, v = (torch.randn(1, 128, 32, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    result["eager_us"] = host_us(lambda: autotune.attention(q, k, v, causal=True))
    result["sdpa_us"] = host_us(lambda: sdpa(*heads_first, is_causal=True))
    result["operator_us"] = host_us(lambda: torch.ops.autotune.attention.default(q, k, v, causal=True))
    with torch.enable_grad():
        training = [x.detach().requires_grad_() for x in (q, k, v)]
        result["eager_with_grad_us"] = host_us(lambda: autotune.attention(*training, causal=True))
        result["sdpa_with_grad_us"] = host_us(lambda: sdpa(*(x.transpose(1, 2) for x in training), is_causal=True))
    for name, function in (("compiled_us", lambda q, k, v: autotune.attention(q, k, v, causal=True)),
                           ("compiled_nothing_us", lambda q, k, v: q.view(q.shape))):
        compiled = torch.compile(function, fullgraph=True)
        compiled(q, k, v)
        result[name] = host_us(partial(compiled, q, k, v))


def flash(result: dict) -> None:
    """The override of torch's flash attention: the same before and after, ours between; varlen_attn against a loop."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, 32, ROWS, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        before = sdpa(q, k, v, is_causal=True)
        result["ms_before"] = median_ms(lambda: sdpa(q, k, v, is_causal=True))
        autotune.activate()
        ours = sdpa(q, k, v, is_causal=True)
        result["ms_ours"] = median_ms(lambda: sdpa(q, k, v, is_causal=True))
        result["us_host_ours"] = host_us(lambda: sdpa(q[:, :, :128], k[:, :, :128], v[:, :, :128], is_causal=True), 100)
        training = [x[:, :, :256].detach().clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            sdpa(*training, is_causal=True).sum().backward()
        result["gradients_fall_back"] = bool(training[0].grad.isfinite().all())
        autotune.restore()
        result["same_after_restore"] = bool(torch.equal(before, sdpa(q, k, v, is_causal=True)))
    result["difference"] = float((ours - before).float().abs().max())
    result["varlen_difference"] = packed_by_torch()


def packed_by_torch() -> float:
    """Greatest difference of torch's varlen_attn, ours, from a loop over sequences."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = [100, 1, 700, 223]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    loop = torch.cat([sdpa(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)))[0].transpose(0, 1)
                      for a, b in zip(starts.tolist(), starts.tolist()[1:])])
    autotune.activate()
    try:
        return float((varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths)) - loop).float().abs().max())
    finally:
        autotune.restore()


def prompts(batch: int) -> tuple:
    x, mask = tokens(batch, PROMPT), torch.ones(batch, PROMPT, dtype=torch.long, device=DEVICE)
    mask[0, :PROMPT // 5 * (batch > 1)] = 0
    return x, mask


def followed(model, text, mask) -> dict:
    """How far eager, given the text so far, would have scored another token higher, beside SDPA's noise on the same text."""
    mask = torch.cat([mask, mask.new_ones(text.shape[0], text.shape[1] - mask.shape[1])], 1)
    scores = {}
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        scores[implementation] = model(text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False,
                                       logits_to_keep=text.shape[1] - PROMPT + 1).logits[:, :-1].float()
    noise = float((scores["sdpa"] - scores["eager"]).abs().max())
    gap = scores["eager"].amax(-1) - scores["eager"].gather(2, text[:, PROMPT:, None])[..., 0]
    return dict(tokens=gap.numel(), within_noise=int((gap <= 2 * noise).sum()), worst_gap=float(gap.max()), noise=noise)


def generate(result: dict) -> None:
    """Greedy texts, one of them padded, with both caches and nothing compiled."""
    model, (x, mask) = build("llama-3-8b"), prompts(PROMPTS)
    for implementation in ("eager", "sdpa", "autotune"):
        for cache in ("dynamic", "static"):
            how = dict(attention_mask=mask, do_sample=False, disable_compile=True, cache_implementation=cache)
            model.set_attn_implementation(implementation)
            model.generate(x, **how, max_new_tokens=4)
            text, seconds = timed_s(partial(model.generate, x, **how, max_new_tokens=NEW))
            result[f"{implementation}_{cache}"] = dict(seconds=seconds, tokens_per_s=round(x.shape[0] * NEW / seconds),
                                                       **followed(model, text, mask))


def static(result: dict) -> None:
    """generate with a static cache, compiled with mode="reduce-overhead" by transformers: ours, then SDPA."""
    from torch._dynamo.utils import counters

    model, (x, mask) = build("llama-3-8b"), prompts(1)
    how = dict(attention_mask=mask, do_sample=False, cache_implementation="static", max_new_tokens=NEW)
    for implementation in ("autotune", "sdpa"):
        torch._dynamo.reset()
        counters.clear()
        model.set_attn_implementation(implementation)
        _, first = timed_s(lambda: model.generate(x, **how))
        text, warm = timed_s(lambda: model.generate(x, **how))
        if implementation == "autotune":
            result.update(graph_breaks=sum(counters["graph_break"].values()), recompiles=counters["stats"]["unique_graphs"] - 1)
        result[implementation] = dict(first_s=first, warm_s=warm, tokens_per_s=round(NEW / warm), **followed(model, text, mask))


def decode(result: dict) -> None:
    """A decode step over a dynamic cache: time of the whole model, and the share of attention."""
    model = build("llama-3-8b")
    for batch, rows in ((1, ROWS), (16, ROWS), (1, 4 * ROWS)):
        x, entry = tokens(batch, rows), result.setdefault(f"batch {batch}, {rows} tokens", {})
        for implementation in ("autotune", "sdpa", "nothing"):
            model.set_attn_implementation(implementation)
            cache = transformers.DynamicCache(config=model.config)
            model.model(x, past_key_values=cache, use_cache=True)
            entry[f"step_ms_{implementation}"] = ms = median_ms(partial(model, x[:, -1:], past_key_values=cache, use_cache=True))
            entry[f"tokens_per_s_{implementation}"] = round(batch / ms * 1e3)
        entry["attention_share"] = share(entry, "step_ms_autotune", "step_ms_nothing")


def graphs(result: dict) -> None:
    """A whole model as one graph under other paddings, and attention with its gradients in a CUDA graph."""
    from torch._dynamo.utils import counters

    model = build("llama-3-8b", "autotune")
    torch._dynamo.reset()
    counters.clear()
    forward, x = torch.compile(model.model, fullgraph=True, dynamic=False), tokens(2, PROMPT)
    for pads in (0, PROMPT // 10, PROMPT // 3):
        mask = torch.ones(2, PROMPT, dtype=torch.long, device=DEVICE)
        mask[0, :pads] = 0
        out, eager = (run(x, attention_mask=mask, use_cache=False)[0] for run in (forward, model.model))
        result[f"difference_{pads}"] = float((out - eager).float()[0, pads:].abs().max())
    result["graph_breaks"] = sum(counters["graph_break"].values())
    result["recompiles"] = counters["stats"]["unique_graphs"] - 1
    with torch.enable_grad():
        inputs = [torch.randn(1, 512, heads, 128, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for heads in (32, 8, 8)]

        def gradients(call):
            return torch.autograd.grad(call(*inputs).float().square().sum(), inputs)
        attend = torch.nn.Module()
        attend.forward = lambda q, k, v: autotune.attention(q, k, v, causal=True)
        expected = gradients(attend)
        captured = torch.cuda.make_graphed_callables(attend, tuple(inputs))
        result["captured_gradients_difference"] = max(float((one - other).float().abs().max())
                                                      for one, other in zip(gradients(captured), expected))


def training(result: dict) -> None:
    """Twenty steps of AdamW from the same weights: losses beside SDPA's, time of a step; bits of gradients that repeat."""
    for implementation in ("sdpa", "autotune"):
        losses, result[f"step_ms_{implementation}"] = trained(implementation, tokens(1, ROWS // 2))
        result[f"losses_{implementation}"] = losses
        torch.cuda.empty_cache()
    result["greatest_loss_difference"] = max(abs(a - b) for a, b in zip(result["losses_sdpa"], result["losses_autotune"]))
    with torch.enable_grad():
        inputs = [torch.randn(1, 777, heads, 128, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for heads in (32, 8, 8)]
        torch.use_deterministic_algorithms(True)
        try:
            runs = [torch.autograd.grad(autotune.attention(*inputs, causal=True).float().square().sum(), inputs)
                    for _ in range(50)]
        finally:
            torch.use_deterministic_algorithms(False)
    result["same_bits_of_50"] = sum(all(torch.equal(a, b) for a, b in zip(run, runs[0])) for run in runs)


def trained(implementation: str, x) -> tuple[list[float], float]:
    """(loss of each step, median of the times of the later ones in ms)"""
    model = build("llama-3-8b", implementation).train().requires_grad_(True)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-4), []

    def step():
        optimizer.zero_grad()
        loss = model(x, labels=x, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.enable_grad():
        ms = median_ms(step, 18)
    return [round(float(loss), 5) for loss in losses], ms


STEPS = {"host": host, "flash": flash, "static": static, "decode": decode, "generate": generate, "graphs": graphs,
         **{f"model.{name}": lambda result, name=name: model_step(name, result) for name in CONFIGS}, "training": training}
