"""autotune: CUDA attention kernels, generated from templates, tuned for each GPU and problem.

    import autotune
    out = autotune.attention(q, k, v, causal=True)      # the best kernel known for these arrays on this GPU
    print(autotune.source("forward-bf16-b1-h32x8-q8192-k8192-d128-causal"))

Everything below is loaded on first use, so that the import costs milliseconds and needs no GPU.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "activate": "integrations.sdpa", "restore": "integrations.sdpa", "forbid_compiling": "cuda.forbid",
    "CompilingForbidden": "cuda.forbid",
    "attention": "calls.dense", "attention_varlen": "calls.varlen", "attention_with_kvcache": "calls.kvcache",
    "write_kvcache": "calls.writing",
    "prepare": "tuner.warmup", "source": "calls.dense", "AttentionError": "calls.dense", "UntunedWarning": "calls.dense",
    "explain": "calls.explain", "explain_varlen": "calls.explain", "explain_with_kvcache": "calls.explain",
    "stats": "calls.plans", "lookup": "database.lookup", "Match": "database.lookup", "tune": "tuner",
    "Problem": "core.problem", "Config": "core.config", "Gpu": "core.gpu",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES})

