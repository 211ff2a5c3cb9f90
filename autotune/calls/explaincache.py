"""Why a call of `attention_with_kvcache` runs what it runs: `explain_with_kvcache`, with the same arguments, says it in words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping

from .arguments import positive_scale
from ..device.arrays import OTHER, library_of
from .dense import NO_WINDOW, unsuited
from .cachecall import Arrays, forward_only, understand
from .call import Call
from .explain import Explanation, explain, explained
from ..core.gpu import detect
from ..kernels import kernel_of
from ..kernels.decode.base import MAX_QUERIES
from .kvcache import chunk_of, unsuited_cache
from .plans import op_of

BOTH = "both are launched to run at the same time; blocks of the second have SMs first"


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


def explain_with_kvcache(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, causal=True, cu_seqlens_q=None,
                         max_seqlen_q=None, max_seqlen_k=None, k_scale=None, v_scale=None, num_splits=None, window=NO_WINDOW,
                         scale=None, softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None,
                         check=False, config=None) -> CacheExplanation | Explanation:
    """The kernels that `attention_with_kvcache` would run for these arguments, each with its `Match`, why each preferred one was
    refused and what would be copied; how keys are cut, and who merges the pieces. Compiles and launches none of them. Where
    `attention` does the work, what `explain` says. Raises as `attention_with_kvcache` does."""
    library = library_of(q)
    if library is OTHER:
        q = OTHER.to_cupy(q, "q")
        q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, sinks, alibi_slopes, out = (
            OTHER.if_given(array, name) for array, name in (
                (q, "q"), (k_cache, "k_cache"), (v_cache, "v_cache"), (cache_seqlens, "cache_seqlens"),
                (page_table, "page_table"), (cu_seqlens_q, "cu_seqlens_q"), (sinks, "sinks"), (alibi_slopes, "alibi_slopes"),
                (out, "out")))
        library = library_of(q)
    call, given = understand(library, q, k_cache, v_cache, cache_seqlens, page_table, causal, cu_seqlens_q, max_seqlen_q,
                             max_seqlen_k, k_scale, v_scale, num_splits, window, softcap, sinks, alibi_slopes, out, check, config)
    if given.whole:
        return explain(q, k_cache, v_cache, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
                       alibi_slopes=alibi_slopes, out=out, config=config)
    if not (call.batch and given.queries and call.seqlen_k):
        return CacheExplanation(())
    gpu, negative = detect(call.device), scale is not None and positive_scale(scale)[1]
    in_place = {"q": None if negative else given.q, "k": given.k_cache, "v": given.v_cache, "out": given.out}
    copies = ("q is negated, because scale is negative",) * negative + _copies(call, given)
    parts = tuple(explained(part.problem(), gpu, library, in_place, copies, part.config) for part in _parts(call, given, gpu))
    if parts[0].problem.op == "forward":
        return CacheExplanation(parts)
    match = parts[0].match
    cut = kernel_of(match.config).launches(replace(match.problem, batch=call.batch, seqlen_q=call.seqlen_q, seqlen_k=call.seqlen_k),
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
