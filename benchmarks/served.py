"""What servers call: attention problems of public models, drawn by seed. Batch and lengths are log-uniform, not round."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from autotune.core.problem import Problem

GPUS = (1, 2, 4, 8)  # that share the heads of a model
MOST_FLOPS, MOST_BYTES = 4e12, 8e9  # about 6 ms, and two copies of it beside each other


@dataclass(frozen=True)
class Heads:
    """One kind of attention layer: heads of queries and of keys, head dims, the window's left width, sinks, soft cap, and whether
    it is an encoder's (no mask, no cache)."""

    name: str
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int = 0
    left: int | None = None
    sinks: bool = False
    softcap: float = 0.0
    encoder: bool = False


# From config.json of each model on Hugging Face.
MODELS = (
    Heads("llama-3-8b", 32, 8, 128), Heads("llama-3-70b", 64, 8, 128), Heads("llama-3.1-405b", 128, 8, 128),
    Heads("llama-2-7b", 32, 32, 128), Heads("llama-2-13b", 40, 40, 128), Heads("llama-3.2-1b", 32, 8, 64),
    Heads("qwen-2.5-0.5b", 14, 2, 64), Heads("qwen-2.5-1.5b", 12, 2, 128), Heads("qwen-2.5-7b", 28, 4, 128),
    Heads("qwen-2.5-14b", 40, 8, 128), Heads("qwen-3-30b-a3b", 32, 4, 128), Heads("qwen-3-0.6b", 16, 8, 128),
    Heads("mistral-7b", 32, 8, 128, left=4095), Heads("mistral-large", 96, 8, 128), Heads("phi-3-mini", 32, 32, 96, left=2046),
    Heads("phi-2", 32, 32, 80), Heads("phi-4", 40, 10, 128), Heads("gemma-2-9b", 16, 8, 256, softcap=50.0),
    Heads("gemma-2-9b-window", 16, 8, 256, left=4095, softcap=50.0), Heads("gemma-2-27b", 32, 16, 128, softcap=50.0),
    Heads("gemma-3-4b", 8, 4, 256), Heads("gemma-3-4b-window", 8, 4, 256, left=1023),
    Heads("gemma-3-27b-window", 32, 16, 128, left=1023), Heads("gemma-7b", 16, 16, 256), Heads("gpt-oss", 64, 8, 64, sinks=True),
    Heads("gpt-oss-window", 64, 8, 64, left=127, sinks=True), Heads("falcon-40b", 128, 8, 64), Heads("gpt-neox-20b", 64, 64, 96),
    Heads("deepseek-v3-prefill", 128, 128, 192, 128), Heads("smollm-135m", 9, 3, 64),
    Heads("siglip-so400m", 16, 16, 72, encoder=True), Heads("vit-h", 16, 16, 80, encoder=True),
    Heads("whisper-large", 20, 20, 64, encoder=True), Heads("dinov2-g", 24, 24, 64, encoder=True),
)
KINDS = {"prompt": 3, "chunk": 2, "packed": 2, "pages_chunk": 1, "decode": 4, "decode_pages": 4}  # and how often


def drawn(count: int, seed: int) -> list[Problem]:
    """`count` different problems, the same for the same seed."""
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        if (problem := _one(rng)) is not None:
            found[problem] = None
    return list(found)


def _one(rng: random.Random) -> Problem | None:
    model, gpus = rng.choice(MODELS), rng.choice(GPUS)
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if model.encoder:
        kind = rng.choice(["prompt", "packed"])
    if model.head_dim_v and kind.startswith("decode"):  # over compressed keys: another kernel's
        kind = "prompt"
    heads_q, heads_kv = model.heads_q // gpus, max(1, model.heads_kv // gpus)
    if model.heads_q % gpus or heads_q % heads_kv:
        return None
    fields = dict(heads_q=heads_q, heads_kv=heads_kv, head_dim=model.head_dim, head_dim_v=model.head_dim_v,
                  window_left=model.left, window_right=None if model.encoder else 0, sinks=model.sinks, softcap=model.softcap)
    problem = _sized(rng, kind, fields).simplified()
    if problem.flops > MOST_FLOPS or problem.compulsory_bytes > MOST_BYTES or not problem.flops:
        return None
    return problem


def _sized(rng: random.Random, kind: str, fields: dict) -> Problem:
    def between(low: float, high: float) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    if kind.startswith("decode"):
        page = rng.choice((16, 16, 32, 64, 128, 256, 1)) if kind == "decode_pages" else 0
        return Problem("decode", batch=between(1, 256), seqlen_q=1, seqlen_k=between(128, 65536), page_size=page,
                       kv="paged" if page else "dense", **fields)
    if kind == "prompt":
        length = between(128, 32768)
        return Problem(batch=between(1, max(1.01, min(64, 65536 / length))), seqlen_q=length, seqlen_k=length, **fields)
    if kind == "chunk":
        length = between(64, 4096)
        return Problem(batch=between(1, 8), seqlen_q=length, seqlen_k=length + between(64, 32768), **fields)
    longest = between(128, 8192)
    if kind == "packed":
        return Problem(batch=between(2, 64), seqlen_q=longest, seqlen_k=longest, kv="varlen", **fields)
    return Problem(batch=between(1, 32), seqlen_q=longest // 2 + 1, seqlen_k=longest + between(64, 16384), kv="paged",
                   page_size=rng.choice((16, 64, 128, 256)), **fields)
