"""Why a call runs what it runs, in words. `explain`, `explain_varlen` and `explain_with_kvcache` take the arguments of
`attention` and its kin; they compile and launch nothing."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import wraps
from types import SimpleNamespace
from typing import Callable, Mapping

from ..core.gpu import Gpu, detect
from ..core.masks import NUMBERS
from ..core.problem import Problem
from ..database.lookup import Match
from ..database.why import EVIDENCE, TIERS, passed_over
from ..device.arrays import OTHER, library_of
from ..device.tensormap import unmappable
from ..kernels import kernel_of
from ..kernels.base import Kernel
from ..kernels.decode.base import MAX_QUERIES
from .arguments import Described, bounds_of, check_slopes, describe, number, positive_scale
from .cachecall import Arrays, forward_only, understand
from .call import Call
from .dense import attention, unsuited
from .kvcache import attention_with_kvcache, chunk_of, unsuited_cache
from .plans import match_for, match_of, match_without_maps, op_of
from .varlen import attention_varlen
from .varlenchecks import describe_varlen

BOTH = "both are launched to run at the same time; blocks of the second have SMs first"
ARRAYS = ("q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "page_table", "sinks",
          "alibi_slopes", "out")
NEGATED = "q is negated, because scale is negative"


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


@dataclass(frozen=True, repr=False)
class CacheExplanation:
    """What `attention_with_kvcache` would do: an `Explanation` for the sequences of up to 16 queries and one for those of more,
    as far as the call can have any; and how keys of the former are cut. An empty call has no part."""

    parts: tuple[Explanation, ...]
    splits: str | None = None

    def __str__(self) -> str:
        if not self.parts:
            return "nothing is launched: there is no query, or no room for a key"
        texts = [str(part) + (f"\nsplits   {self.splits}" if part.problem.op == "decode" else "") for part in self.parts]
        return "\n\n".join([*texts, *[BOTH] * (len(texts) > 1)])

    __repr__ = __str__


def _with_arguments_of(function: Callable) -> Callable:
    """Decorates what explains a call of `function`: it gets the arguments as one object, arrays as CuPy's where they are no
    library's of ours, and with them `bounds` and whether scale is `negative`."""
    signature = inspect.signature(function)

    def decorate(explain: Callable) -> Callable:
        @wraps(explain)
        def with_arguments(*positional, **keywords):
            bound = signature.bind(*positional, **keywords)
            bound.apply_defaults()
            given = SimpleNamespace(**bound.arguments)
            if library_of(given.q) is OTHER:
                given.q = OTHER.to_cupy(given.q, "q")
                vars(given).update({name: OTHER.if_given(array, name) for name, array in vars(given).items() if name in ARRAYS})
            given.bounds = bounds_of(given.causal, given.window, *[getattr(given, name) for name in NUMBERS])
            given.negative = given.scale is not None and positive_scale(given.scale)[1]
            return explain(given)

        with_arguments.__signature__ = signature
        return with_arguments

    return decorate


@_with_arguments_of(attention)
def explain(given) -> Explanation:
    """The kernel that `attention` would run for these arguments, its `Match`, why each preferred kernel was refused, and what
    would be copied. Compiles and launches nothing. Raises as `attention` does."""
    described = describe(given.q, given.k, given.v, given.bounds, number(given.softcap), given.sinks, given.alibi_slopes,
                         given.out)
    return _of_prompts(given, described, {name: getattr(given, name) for name in ("q", "k", "v", "out")}, ("sinks",))


@_with_arguments_of(attention_varlen)
def explain_varlen(given) -> Explanation:
    """The same of `attention_varlen`."""
    described = describe_varlen(given.q, given.k, given.v, given.cu_seqlens_q, given.cu_seqlens_k, given.max_seqlen_q,
                                given.max_seqlen_k, given.bounds, given.softcap, given.sinks, given.alibi_slopes, given.out)
    arrays = {name: getattr(given, name) for name in ("q", "k", "v", "out")}
    return _of_prompts(given, described, {name: None if array is None else array[None] for name, array in arrays.items()},
                       ("sinks", "cu_seqlens_q", "cu_seqlens_k"))


def _of_prompts(given, described: Described, arrays: Mapping[str, object], vectors: tuple[str, ...]) -> Explanation:
    """What a forward kernel would do with `arrays` (None: absent) of four axes, and with the arguments `vectors`."""
    gpu, problem, library = detect(described.device), described.problem, described.library
    if described.empty:
        return Explanation(problem, gpu, None, None, {}, ())
    found = _explained(problem, gpu, library, {**arrays, "q": None if given.negative else arrays["q"]}, config=given.config)
    copies = [NEGATED] * given.negative
    copies += [f"{name} is copied: {reason}" for name, array in arrays.items()
               if array is not None and (reason := unsuited(library.read(array), found.kernel.aligned))]
    for name in vectors:
        array = getattr(given, name)
        if array is not None and array.shape[0] > 1 and library.vector(array)[2][0] != 1:
            copies.append(f"{name} is copied: its stride is not 1")
    slopes = given.alibi_slopes
    if slopes is not None and not check_slopes(library, slopes, problem.batch, problem.heads_q, described.device)[2]:
        copies.append("alibi_slopes is copied: kernels read float32 with a last stride of 1")
    return replace(found, copies=tuple(copies))


@_with_arguments_of(attention_with_kvcache)
def explain_with_kvcache(given) -> CacheExplanation | Explanation:
    """The kernels that `attention_with_kvcache` would run for these arguments, each with its `Match`, why each preferred one was
    refused and what would be copied; how keys are cut, and who merges the pieces. Compiles and launches none of them. Where
    `attention` does the work, what `explain` says. Raises as `attention_with_kvcache` does."""
    g, library = given, library_of(given.q)
    call, arrays = understand(library, g.q, g.k_cache, g.v_cache, g.cache_seqlens, g.page_table, g.bounds, g.cu_seqlens_q,
                              g.max_seqlen_q, g.max_seqlen_k, g.k_scale, g.v_scale, g.num_splits, g.softcap, g.sinks,
                              g.alibi_slopes, g.out, g.check, g.config)
    if arrays.whole:
        shared = {name: value for name, value in vars(g).items() if name in inspect.signature(attention).parameters}
        return explain(**{**shared, "k": g.k_cache, "v": g.v_cache})
    if not (call.batch and arrays.queries and call.seqlen_k):
        return CacheExplanation(())
    gpu = detect(call.device)
    in_place = {"q": None if g.negative else arrays.q, "k": arrays.k_cache, "v": arrays.v_cache, "out": arrays.out}
    copies = (NEGATED,) * g.negative + _copies(call, arrays)
    parts = tuple(_explained(part.problem(), gpu, library, in_place, copies, part.config) for part in _parts(call, arrays, gpu))
    if parts[0].problem.op == "forward":
        return CacheExplanation(parts)
    match = parts[0].match
    cut = kernel_of(match.config).launches(replace(match.problem, batch=call.batch, seqlen_q=call.seqlen_q,
                                                   seqlen_k=call.seqlen_k),
                                           match.config, call.uniform, call.num_splits)
    return CacheExplanation(parts, str(cut))


def _parts(call: Call, given: Arrays, gpu) -> list[Call]:
    """The call of sequences of few queries and that of those of many, as far as there are kernels and sequences of the kind."""
    config, mixed = call.config, given.packed and given.queries > MAX_QUERIES
    of_forward = config is not None and op_of(config) == "forward"
    many, _ = call.twin(given.queries, config if of_forward else None)
    if of_forward and not mixed or given.queries > MAX_QUERIES and not mixed or config is None and forward_only(call, given, gpu):
        return [many]
    call.config = None if of_forward else config
    return [call, many] if mixed else [call]


def _copies(call: Call, given: Arrays) -> tuple[str, ...]:
    """A sentence for each array of a call that must be copied."""
    reasons: Mapping[str, str | None] = {
        "q": unsuited(given.q_view, True), "k_cache": unsuited_cache(given.k_view, chunk_of(call)),
        "v_cache": unsuited_cache(given.v_view, chunk_of(call)),
        "out": None if given.out is None else unsuited(call.library.read(given.out), True)}
    return tuple(f"{name} is copied: {reason}" for name, reason in reasons.items() if reason)


def _explained(problem: Problem, gpu: Gpu, library, in_place: Mapping[str, object], copies: tuple[str, ...] = (),
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
