"""Other libraries' attention, for `bench`: what each cannot compute, and a function that computes the rest on torch tensors."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Callable

from .problem import Problem


@dataclass(frozen=True)
class Peer:
    """`reject(problem)` says why this peer cannot compute it, or None. `make(problem)` gives f(q, k, v) -> out, torch
    tensors (B, S, H, D), with scale 1/sqrt(D). `package` is the module that must be installed."""

    name: str
    package: str
    reject: Callable[[Problem], "str | None"]
    make: Callable[[Problem], Callable]

    def missing(self) -> str | None:
        """Why this peer cannot be used here, or None."""
        try:
            importlib.import_module(self.package)
        except ImportError as error:
            return f"{self.name} needs {self.package}, which cannot be imported ({error}); pip install {self.package}"
        return None


def _sdpa_rejects(problem: Problem) -> str | None:
    if problem.dtype not in ("bf16", "fp16"):
        return f"it has no {problem.dtype}"
    for feature in ("sinks", "alibi", "softcap"):
        if getattr(problem, feature):
            return f"it has no {feature}"
    if problem.mask == "window":
        return "it has no windows"
    if problem.mask == "causal" and problem.seqlen_q != problem.seqlen_k:
        return "its causal mask is top-left: the same thing only if both lengths are the same"
    return None


def _sdpa(backend: str) -> Callable[[Problem], Callable]:
    def make(problem: Problem) -> Callable:
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


PEERS = {peer.name: peer for peer in (
    Peer("sdpa-flash", "torch", _sdpa_rejects, _sdpa("FLASH_ATTENTION")),
    Peer("sdpa-cudnn", "torch", _sdpa_rejects, _sdpa("CUDNN_ATTENTION")),
)}
