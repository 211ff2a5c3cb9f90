"""Why a call runs what it runs: `explain`, with the arguments of `attention`, launches nothing and says it in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from .arguments import describe, number, positive_scale
from .arrays import OTHER, library_of
from .attention import NO_WINDOW, unsuited
from .gpu import Gpu, detect
from .kernels import KERNELS, kernel_of
from .kernels.base import Kernel
from .lookup import Match
from .plans import match_for
from .problem import Problem


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `attention` would do. `refused` has the reason for each kernel that is preferred to the chosen one and does not
    run; `copies` has a sentence for each copy that the call makes. An empty call has no kernel and no match."""

    problem: Problem
    gpu: Gpu
    kernel: Kernel | None
    match: Match | None
    refused: Mapping[str, str]
    copies: tuple[str, ...]

    def __str__(self) -> str:
        lines = [("problem", str(self.problem)), ("gpu", f"{self.gpu.title} ({self.gpu.name})")]
        if self.match is None:
            lines.append(("kernel", "none: there is no query or no key, so nothing is launched"))
        else:
            lines += [("kernel", f"{self.kernel.name}: {self.kernel.summary}"), ("config", self.match.config.text),
                      ("match", self.match.why)]
        lines += [("refused", f"{name}: {reason}") for name, reason in self.refused.items()]
        lines += [("copies", copy) for copy in self.copies or ("none",)]
        return "\n".join(f"{name:<9}{text}" for name, text in lines)

    __repr__ = __str__


def explain(q, k, v, *, causal=False, window=NO_WINDOW, scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False,
            out=None) -> Explanation:
    """The kernel that `attention` would run for these arguments, its `Match`, why each preferred kernel was refused, and what
    would be copied. Compiles and launches nothing. Raises as `attention` does."""
    if library_of(q) is OTHER:
        q, k, v, sinks, alibi_slopes, out = (OTHER.to_cupy(array, name) for array, name in (
            (q, "q"), (k, "k"), (v, "v"), (sinks, "sinks"), (alibi_slopes, "alibi_slopes"), (out, "out")))
    softcap = number(softcap)
    described = describe(q, k, v, causal, window, softcap, sinks, alibi_slopes, out)
    negative = scale is not None and positive_scale(scale)[1]
    gpu, problem, library = detect(described.device), described.problem, described.library
    if described.empty:
        return Explanation(problem, gpu, None, None, {}, ())
    match = match_for(problem, gpu)
    kernel = kernel_of(match.config)
    refused = {}
    for preferred in KERNELS.values():
        if preferred is kernel:
            break
        refused[preferred.name] = preferred.reject(problem, gpu) or "it can serve this, but the database has a faster config"
    copies = ["q is negated, because scale is negative"] if negative else []
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        reason = unsuited(library.read(array), kernel.aligned) if array is not None else None
        if reason:
            copies.append(f"{name} is copied: {reason}")
    if sinks is not None and library.vector(sinks)[2][0] != 1:
        copies.append("sinks is copied: its stride is not 1")
    return Explanation(problem, gpu, kernel, match, refused, tuple(copies))
