"""autotune: CUDA attention kernels, generated from templates, tuned for each GPU and problem.

    import autotune
    out = autotune.attention(q, k, v, causal=True)      # the best kernel known for these arrays on this GPU
    print(autotune.source("forward-bf16-b1-h32x8-q8192-k8192-d128-causal"))

Everything below is loaded on first use, so that the import costs milliseconds and needs no GPU.
"""

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_HOMES = {
    "attention": "attention", "attention_varlen": "varlen", "attention_with_kvcache": "kvcache",
    "prepare": "attention", "source": "attention", "AttentionError": "attention", "UntunedWarning": "attention",
    "explain": "explain", "explain_varlen": "explainvarlen", "explain_with_kvcache": "explaincache",
    "stats": "plans", "lookup": "lookup", "Match": "lookup", "tune": "tuner",
    "Problem": "problem", "Config": "config", "Gpu": "gpu",
}

__all__ = [*_HOMES, "__version__"]


class _Package(ModuleType):
    """The package. `autotune.lookup` is the function, also after some module has imported the submodule `autotune.lookup`:
    the import system then assigns the submodule to the package, and that assignment is dropped here. The submodule
    itself is reached by ``from autotune.lookup import ...`` or ``importlib.import_module("autotune.lookup")``.
    """

    def __setattr__(self, name, value):
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name):
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES})


sys.modules[__name__].__class__ = _Package
