"""Other libraries' attention, for `bench`: what each cannot compute, and a function that computes the rest on torch tensors."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Callable, Mapping

from ..core.problem import Problem

NO_SINK = "no sink"


@dataclass(frozen=True)
class Peer:
    """`reject(problem)` says why this peer cannot compute it, or None. `make(problem, sinks, places)` gives f(q, k, v) -> out,
    torch tensors (B, S, H, D), (1, total, H, D) or pages, with scale 1/sqrt(D); sinks (Hq,) float32 holds bfloat16 values, or is
    None; `places` has cache_seqlens (B,) and page_table (B, pages), int32, for a paged cache, and for packed sequences
    cu_seqlens_q (B + 1,), int32, and max_seqlen_q, the same of k unless that is paged. `module` must be importable; `hint` says
    how it gets there. `serves(problem)` is what it computes instead where it cannot do all of it, which is never more work,
    and a note that stands beside its time."""

    name: str
    module: str
    hint: str
    reject: Callable[[Problem], "str | None"]
    make: Callable[[Problem, object, Mapping[str, object]], Callable]
    serves: Callable[[Problem], tuple[Problem, str]] = lambda problem: (problem, "")

    def missing(self) -> str | None:
        """Why this peer cannot be used here, or None."""
        for module in dict.fromkeys(("torch", self.module)):
            try:
                importlib.import_module(module)
            except Exception as error:  # a library that does not fit torch or the driver fails in its own ways
                hint = "pip install torch" if module == "torch" else self.hint
                return f"{self.name} needs {module}, which cannot be imported ({str(error).splitlines()[0]}); {hint}"
        return None

    def version(self) -> str | None:
        """Name and version of the distribution that its module is from, or None if that is not known."""
        from importlib import metadata

        names = metadata.packages_distributions().get(self.module.partition(".")[0], [])
        return ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(names)) or None


def _lacks(problem: Problem, *features: str) -> str | None:
    """The reason if `problem` has a dtype or one of `features` that 16-bit libraries lack."""
    if problem.dtype not in ("bf16", "fp16"):
        return f"it has no {problem.dtype}"
    if problem.kv != "dense":
        return f"it is called with dense keys here, not {problem.kv} ones"
    if problem.mask not in ("full", "causal", "window"):  # those that a peer may be told; another it would take for one of them
        return f"it has no {problem.mask} mask"
    if problem.kv_dtype != problem.dtype:
        return f"it has no {problem.kv_dtype} cache under {problem.dtype} queries"
    return next((f"it has no {feature}" for feature in features if getattr(problem, feature)), None)


def _sdpa_rejects(problem: Problem) -> str | None:
    if reason := _lacks(problem, "sinks", "alibi", "softcap"):
        return reason
    if problem.mask == "window":
        return "it has no windows"
    if problem.deterministic:
        return "it is not asked for the same bits every time here"
    if problem.mask == "causal" and problem.seqlen_q != problem.seqlen_k:
        return "its causal mask is top-left: the same thing only if both lengths are the same"
    return None


def _sdpa(backend: str) -> Callable[[Problem, object, Mapping[str, object]], Callable]:
    def make(problem: Problem, sinks, places) -> Callable:
        import torch.nn.functional as F
        from torch.nn.attention import SDPBackend, sdpa_kernel

        causal, grouped, chosen = problem.causal, problem.group > 1, getattr(SDPBackend, backend)

        def attend(q, k, v):
            with sdpa_kernel([chosen]):
                out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal,
                                                     enable_gqa=grouped)
            return out.transpose(1, 2)

        return attend

    return make


def _flash_rejects(problem: Problem) -> str | None:
    if reason := _lacks(problem, "alibi"):
        return reason
    widest = max(problem.head_dim, problem.head_dim_v)
    return f"it takes head dims to 256, multiples of 8, not {problem.head_dim} and {problem.head_dim_v}" \
        if widest > 256 or problem.head_dim % 8 or problem.head_dim_v % 8 else None


def _fa3_rejects(problem: Problem) -> str | None:
    if problem.sinks and problem.mask != "window":
        return "it has no sinks"
    return _flash_rejects(replace(problem, kv="dense", page_size=0, packed_queries=False))


def _fa3_serves(problem: Problem) -> tuple[Problem, str]:
    return (replace(problem, sinks=False), NO_SINK) if problem.sinks else (problem, "")


def _fa3(problem: Problem, sinks, places) -> Callable:
    import flash_attn_interface

    window = tuple(-1 if side is None else side for side in (problem.window_left, problem.window_right))
    options = {"causal": problem.causal, "window_size": window, **places}
    if problem.softcap:
        options["softcap"] = problem.softcap
    if problem.kv == "varlen":
        function = flash_attn_interface.flash_attn_varlen_func
        return lambda q, k, v: _first(function(q[0], k[0], v[0], **options))[None]
    cached = problem.op == "decode" or problem.kv == "paged"
    function = flash_attn_interface.flash_attn_with_kvcache if cached else flash_attn_interface.flash_attn_func
    if problem.packed:
        return lambda q, k, v: _first(function(q[0], k, v, **options))[None]
    return lambda q, k, v: _first(function(q, k, v, **options))


def _fa4_rejects(problem: Problem) -> str | None:
    packed_training = problem.op == "backward" and problem.kv == "varlen"
    return _flash_rejects(replace(problem, kv="dense") if packed_training else problem)


def _fa4(problem: Problem, sinks, places) -> Callable:
    import torch
    from flash_attn import cute

    options = {"softcap": problem.softcap} if problem.softcap else {}
    options |= {"causal": problem.causal, "window_size": (problem.window_left, problem.window_right)}
    if problem.deterministic:
        options["deterministic"] = True
    if sinks is not None:
        options["learnable_sink"] = sinks.to(torch.bfloat16)

    if problem.kv == "varlen":
        return lambda q, k, v: _first(cute.flash_attn_varlen_func(q[0], k[0], v[0], **places, **options))[None]
    return lambda q, k, v: _first(cute.flash_attn_func(q, k, v, **options))


def _first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


PEERS = {peer.name: peer for peer in (
    Peer("sdpa-flash", "torch", "pip install torch", _sdpa_rejects, _sdpa("FLASH_ATTENTION")),
    Peer("sdpa-cudnn", "torch", "pip install torch", _sdpa_rejects, _sdpa("CUDNN_ATTENTION")),
    Peer("fa3", "flash_attn_interface", "build it from the folder hopper/ of the flash-attention repository", _fa3_rejects, _fa3,
         _fa3_serves),
    Peer("fa4", "flash_attn.cute", "pip install flash-attn-4", _fa4_rejects, _fa4),
)}


def installed() -> list[Peer]:
    """The peers that can be used here."""
    return [peer for peer in PEERS.values() if peer.missing() is None]
