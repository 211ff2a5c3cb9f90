"""autotune as a drop-in on a GPU: models of real sizes and random weights, four layers each, against eager, SDPA and each other.

    python benchmarks/drop_in.py --out benchmarks/results/drop-in-h200.yaml [--seconds 95] [--steps models,generate,...]

Needs torch and transformers. Every step stands alone: one that fails is a line of the result, not the end of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
import warnings
from pathlib import Path

import torch
import transformers
import yaml

import autotune
from autotune.integrations import transformers as integration

SIZES = dict(num_hidden_layers=4, pad_token_id=0, bos_token_id=1, eos_token_id=None)
CONFIGS = { "llama-3-8b": (transformers.LlamaConfig,
    dict( hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0)),
    "qwen-3-8b": (transformers.Qwen3Config,
    dict( hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960)),
    "gemma-2-9b": (transformers.Gemma2Config,
    dict( hidden_size=3584,
    intermediate_size=14336,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=256,
    vocab_size=256000,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    max_position_embeddings=8192,
    layer_types=["sliding_attention",
    "full_attention"] * 2)),
    "gpt-oss-20b": (transformers.GptOssConfig,
    dict( hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=201088,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
    layer_types=["sliding_attention",
    "full_attention"] * 2)),
     }
ROWS = 4096
DEVICE = "cuda"


def build(name: str, dtype=torch.bfloat16):
    torch.manual_seed(0)
    kind, values = CONFIGS[name]
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES, **values), dtype=dtype, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def tokens(batch: int, rows: int, seed: int = 0):
    return torch.randint(3, 30000, (batch, rows), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def hidden(model, implementation: str, x, **more):
    model.set_attn_implementation(implementation)
    return model.model(x, use_cache=False, **more)[0]


def median_ms(run, times: int = 10) -> float:
    """Of one call, by events, after two that are not counted."""
    samples = []
    for index in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples += [begin.elapsed_time(end)] if index > 1 else []
    return statistics.median(samples)


def host_us(run, times: int = 300) -> float:
    """Of one call, as the host sees it: least of five runs of calls without a wait."""
    results = []
    for _ in range(5):
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            run()
        results.append((time.perf_counter() - begin) / times * 1e6)
        torch.cuda.synchronize()
    return min(results)


def models(result: dict) -> None:
    """Outputs at 4k against eager in float32, as far away as eager in bf16 is; padded as unpadded; time of a prompt."""
    for name in CONFIGS:
        entry = result.setdefault(name, {})
        try:
            one_model(name, entry)
        except Exception as error:
            entry["failed"] = "".join(traceback.format_exception(error))[-1500:]
        torch.cuda.empty_cache()


def one_model(name: str, entry: dict) -> None:
    model = build(name)
    x = tokens(1, ROWS)
    ours, plain = hidden(model, "autotune", x).float(), hidden(model, "eager", x).float()
    short, mask = tokens(1, 700, seed=1), torch.ones(2, 1000, dtype=torch.long, device=DEVICE)
    mask[0, :300] = 0
    long, positions = tokens(1, 1000, seed=2), (mask.cumsum(1) - 1).clamp(min=0)
    batch = torch.cat([torch.nn.functional.pad(short, (300, 0)), long])
    padded = hidden(model, "autotune", batch, attention_mask=mask, position_ids=positions)
    alone = hidden(model, "autotune", short)
    entry["padded_difference"] = float((padded[0, 300:] - alone[0]).float().abs().max())
    entry["eager_difference"] = float((hidden(model, "eager", short)[0] - alone[0]).float().abs().max())
    entry["finite"] = bool(padded.isfinite().all() and ours.isfinite().all())
    for implementation in ("autotune", "eager" if name in ("gemma-2-9b", "gpt-oss-20b") else "sdpa"):  # those have no other
        model.set_attn_implementation(implementation)
        entry[f"prefill_ms_{implementation}"] = median_ms(lambda: model.model(x, use_cache=False), 5)
    exact = hidden(model.float(), "eager", x)
    entry["error_autotune"], entry["error_eager"] = (float((y - exact).abs().max()) for y in (ours, plain))
    entry["mean_error_autotune"], entry["mean_error_eager"] = (float((y - exact).abs().mean()) for y in (ours, plain))
    entry["right"] = entry["finite"] and entry["error_autotune"] <= 2 * entry["error_eager"]


def generate(result: dict) -> None:
    """Tokens of 64 steps against eager's, where the best token leads by more than noise; tokens a second of a decode step."""
    model = build("llama-3-8b")
    x, mask = tokens(4, 1024), torch.ones(4, 1024, dtype=torch.long, device=DEVICE)
    mask[0, :200] = 0
    how = dict(attention_mask=mask, max_new_tokens=64, do_sample=False, disable_compile=True)
    texts, seconds = {}, {}
    for implementation in ("eager", "sdpa", "autotune"):
        model.set_attn_implementation(implementation)
        model.generate(x, **{**how, "max_new_tokens": 4})
        for cache in ("dynamic", "static"):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            texts[implementation, cache] = model.generate(x, **how, cache_implementation=cache)
            torch.cuda.synchronize()
            seconds[f"{implementation}_{cache}"] = round(time.perf_counter() - begin, 3)
    result["seconds"] = seconds
    whole = texts["eager", "dynamic"]
    more = torch.cat([mask, torch.ones(4, 64, dtype=torch.long, device=DEVICE)], 1)
    positions = (more.cumsum(1) - 1).clamp(min=0)
    scores = {}
    for implementation in ("eager", "sdpa", "autotune"):
        model.set_attn_implementation(implementation)
        scores[implementation] = model(whole, attention_mask=more, position_ids=positions,
                                       use_cache=False).logits[:, 1023:-1].float()
    noise = (scores["sdpa"] - scores["eager"]).abs().max()
    best = scores["eager"].topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * noise
    result["steps_with_a_clear_token"] = int(clear.sum())
    result["clear_tokens_equal"] = int((scores["autotune"].argmax(-1) == scores["eager"].argmax(-1))[clear].sum())
    result["logit_difference_autotune"] = float((scores["autotune"] - scores["eager"]).abs().max())
    result["logit_difference_sdpa"] = float(noise)
    for cache in ("dynamic", "static"):
        same = [(texts[name, cache] == whole).float().mean().item() for name in ("autotune", "sdpa")]
        result[f"share_of_equal_tokens_{cache}"], result[f"share_of_equal_tokens_sdpa_{cache}"] = same


def host(result: dict) -> None:
    """What a call costs the host: eager, compiled, and torch's own."""
    q, k, v = (torch.randn(1, 128, 32, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    result["eager_us"] = host_us(lambda: autotune.attention(q, k, v, causal=True))
    result["sdpa_us"] = host_us(lambda: sdpa(*heads_first, is_causal=True))
    result["operator_us"] = host_us(lambda: torch.ops.autotune.attention.default(q, k, v, causal=True))
    compiled = torch.compile(lambda q, k, v: autotune.attention(q, k, v, causal=True), fullgraph=True)
    compiled(q, k, v)
    nothing = torch.compile(lambda q, k, v: q.view(1, 128, 32, 128), fullgraph=True)
    nothing(q, k, v)
    result["compiled_us"] = host_us(lambda: compiled(q, k, v))
    result["compiled_nothing_us"] = host_us(lambda: nothing(q, k, v))


def flash(result: dict) -> None:
    """The override of torch's flash attention: the same before and after, ours between; varlen_attn against a loop."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(2, 32, 4096, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
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
    result["varlen"] = packed_by_torch()


def packed_by_torch() -> float:
    """Greatest difference of torch's varlen_attn, ours, from a loop over sequences."""
    from torch.nn.attention.varlen import varlen_attn

    lengths = [100, 1, 700, 223]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    loop = torch.cat([torch.nn.functional.scaled_dot_product_attention(*(x[a:b].transpose(0, 1)[None]
                     for x in (q, k, v)))[0].transpose(0, 1) for a, b in zip(starts.tolist(), starts.tolist()[1:])])
    autotune.activate()
    try:
        return float((varlen_attn(q, k, v, starts, starts, max(lengths), max(lengths)) - loop).float().abs().max())
    finally:
        autotune.restore()


def graphs(result: dict) -> None:
    """A whole model as one graph under other paddings, and a captured decode step of a static cache."""
    from torch._dynamo.utils import counters

    model = build("llama-3-8b")
    model.set_attn_implementation("autotune")
    torch._dynamo.reset()
    counters.clear()
    forward = torch.compile(model.model, fullgraph=True, dynamic=False)
    x = tokens(2, 1024)
    for pads in (0, 100, 300):
        mask = torch.ones(2, 1024, dtype=torch.long, device=DEVICE)
        mask[0, :pads] = 0
        out = forward(x, attention_mask=mask, use_cache=False)[0]
        eager = model.model(x, attention_mask=mask, use_cache=False)[0]
        result[f"difference_{pads}"] = float((out - eager).float()[0, pads:].abs().max())
    result["graph_breaks"] = sum(counters["graph_break"].values())
    result["recompiles"] = counters["stats"]["unique_graphs"] - 1


def static(result: dict) -> None:
    """generate with a static cache, compiled with mode="reduce-overhead" by transformers, against SDPA."""
    for implementation in ("autotune", "sdpa"):
        torch._dynamo.reset()
        model = build("llama-3-8b")
        model.set_attn_implementation(implementation)
        x = tokens(1, 1024)
        how = dict(attention_mask=torch.ones_like(x), do_sample=False, cache_implementation="static", max_new_tokens=256)
        for step in ("first", "warm"):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            text = model.generate(x, **how)
            torch.cuda.synchronize()
            result[f"{implementation}_{step}_s"] = round(time.perf_counter() - begin, 3)
        result[f"{implementation}_tokens"] = text[0, 1024:1032].tolist()


STEPS = {step.__name__: step for step in (models, host, flash, generate, graphs, static)}


def summary(steps: dict) -> dict:
    right = [entry.get("right", False) for name, entry in steps.get("models", {}).items() if name in CONFIGS]
    return {"models": len(right), "right": sum(right), "graph_breaks": steps.get("graphs", {}).get("graph_breaks", -1),
            "recompiles": steps.get("graphs", {}).get("recompiles", -1),
            "host_us_eager": steps.get("host", {}).get("eager_us", -1),
            "host_us_compiled": steps.get("host", {}).get("compiled_us", -1), "sdpa_us": steps.get("host", {}).get("sdpa_us", -1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=95, help="no step begins after this")
    parser.add_argument("--steps", default=",".join(STEPS))
    options = parser.parse_args()
    warnings.simplefilter("ignore", autotune.UntunedWarning)
    integration.register()
    begin, steps = time.perf_counter(), {}
    for name in options.steps.split(","):
        if time.perf_counter() - begin > options.seconds:
            break
        result = steps[name] = {}
        try:
            with torch.no_grad():
                STEPS[name](result)
        except Exception as error:
            result["failed"] = "".join(traceback.format_exception(error))[-3000:]
        torch.cuda.empty_cache()
        result["took_s"] = round(time.perf_counter() - begin, 1)
        command = f"python benchmarks/drop_in.py --out {options.out.as_posix()}" if not options.out.is_absolute() else \
            "python benchmarks/drop_in.py --out benchmarks/results/drop-in-h200.yaml"
        facts = dict(torch=str(torch.__version__), transformers=transformers.__version__, gpu=torch.cuda.get_device_name())
        print(name, result, flush=True)
        options.out.write_text(yaml.safe_dump(dict(command=command, summary=summary(steps), versions=facts, steps=steps),
                                              sort_keys=False, width=130))


if __name__ == "__main__":
    main()
