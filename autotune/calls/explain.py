"""Why a call runs what it runs: `explain`, with the arguments of `attention`, launches nothing and says it in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping

from .arguments import check_slopes, describe, number, positive_scale
from ..device.arrays import OTHER, library_of
from .dense import NO_WINDOW, unsuited
from ..core.gpu import Gpu, detect
from ..kernels import kernel_of
from ..kernels.base import Kernel
from ..database.lookup import Match
from .plans import match_for, match_of, match_without_maps
from ..core.problem import Problem
from ..device.tensormap import unmappable
from ..database.why import EVIDENCE, TIERS, passed_over


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `attention` would do. `refused` has the reason for each kernel that is preferred to the chosen one and does not
    run; `copies` has a sentence for each copy that the call makes. An empty call has no kernel and no match. `fallback` says
    that the match is not what lookup chose, but the default of a kernel that can take these arrays."""

    problem: Problem
    gpu: Gpu
    kernel: Kernel | None
    match: Match | None
    refused: Mapping[str, str]
    copies: tuple[str, ...]
    fallback: bool = False

    def __str__(self) -> str:
        lines = [("problem", str(self.problem)), ("gpu", f"{self.gpu.title} ({self.gpu.name})")]
        if self.match is None:
            lines.append(("kernel", "none: there is no query or no key, so nothing is launched"))
        else:
            why = "default: what lookup chose cannot take these arrays" if self.fallback else self.match.why
            lines += [("kernel", f"{self.kernel.name}: {self.kernel.summary}"), ("config", self.match.config.text),
                      ("match", why), ("tier", f"{self.match.tier}: {TIERS[self.match.tier]}"),
                      ("evidence", f"{self.match.evidence}: {EVIDENCE[self.match.evidence]}")]
        lines += [("refused", f"{name}: {reason}") for name, reason in self.refused.items()]
        lines += [("copies", copy) for copy in self.copies or ("none",)]
        return "\n".join(f"{name:<9}{text}" for name, text in lines)

    __repr__ = __str__


def explain(q, k, v, *, causal=False, window=NO_WINDOW, scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False,
            out=None, config=None) -> Explanation:
    """The kernel that `attention` would run for these arguments, its `Match`, why each preferred kernel was refused, and what
    would be copied. Compiles and launches nothing. Raises as `attention` does."""
    if library_of(q) is OTHER:
        q, k, v, sinks, alibi_slopes, out = (OTHER.if_given(array, name) for array, name in (
            (q, "q"), (k, "k"), (v, "v"), (sinks, "sinks"), (alibi_slopes, "alibi_slopes"), (out, "out")))
    softcap = number(softcap)
    described = describe(q, k, v, causal, window, softcap, sinks, alibi_slopes, out)
    negative = scale is not None and positive_scale(scale)[1]
    gpu, problem, library = detect(described.device), described.problem, described.library
    if described.empty:
        return Explanation(problem, gpu, None, None, {}, ())
    found = explained(problem, gpu, library, {"q": None if negative else q, "k": k, "v": v, "out": out}, config=config)
    copies = ["q is negated, because scale is negative"] if negative else []
    for name, array in (("q", q), ("k", k), ("v", v), ("out", out)):
        reason = unsuited(library.read(array), found.kernel.aligned) if array is not None else None
        if reason:
            copies.append(f"{name} is copied: {reason}")
    if sinks is not None and library.vector(sinks)[2][0] != 1:
        copies.append("sinks is copied: its stride is not 1")
    if alibi_slopes is not None and not check_slopes(library, alibi_slopes, problem.batch, problem.heads_q, described.device)[2]:
        copies.append("alibi_slopes is copied: kernels read float32 with a last stride of 1")
    return replace(found, copies=tuple(copies))


def explained(problem: Problem, gpu: Gpu, library, in_place: Mapping[str, object], copies: tuple[str, ...] = (),
              config=None) -> Explanation:
    """The kernel for `problem` and arrays q, k, v and out that a kernel would have to take in place, None if it need not."""
    match = match_for(problem, gpu) if config is None else match_of(problem, config, gpu)
    kernel = kernel_of(match.config)
    refused = {}
    if unreadable := _unmappable(kernel, library, match, in_place):
        refused[kernel.name] = unreadable
        match = match_without_maps(problem, gpu)
        kernel = kernel_of(match.config)
    return Explanation(problem, gpu, kernel, match, {**passed_over(match), **refused}, copies, bool(refused))


def _unmappable(kernel: Kernel, library, match: Match, arrays: Mapping[str, object]) -> str | None:
    """Why `kernel`'s tensor maps cannot describe `arrays`, or None. Those that are copied anyway, they can."""
    mapped = {shape.tensor for shape in kernel.maps(match.problem, match.config)}
    for name in sorted(mapped & {name for name, array in arrays.items() if array is not None}):
        view = library.read(arrays[name])
        if not unsuited(view, kernel.aligned) and (reason := unmappable(view[1][:3], view[2:5])):
            return f"it cannot take {name}: {reason}"
    return None
