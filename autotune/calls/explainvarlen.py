"""Why a call of `attention_varlen` runs what it runs: `explain_varlen`, with the same arguments, says it in words."""

from __future__ import annotations

from .arguments import check_slopes, positive_scale
from ..device.arrays import OTHER, library_of
from .dense import NO_WINDOW, unsuited
from .explain import Explanation, explained
from ..core.gpu import detect
from .varlenchecks import describe_varlen


def explain_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, window=NO_WINDOW, scale=None,
                   softcap=0.0, sinks=None, alibi_slopes=None, return_lse=False, out=None, config=None) -> Explanation:
    """The kernel that `attention_varlen` would run for these arguments, its `Match`, why each preferred kernel was refused, and
    what would be copied. Compiles and launches nothing. Raises as `attention_varlen` does."""
    if library_of(q) is OTHER:
        q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes, out = (OTHER.if_given(array, name) for array, name in (
            (q, "q"), (k, "k"), (v, "v"), (cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k"), (sinks, "sinks"),
            (alibi_slopes, "alibi_slopes"), (out, "out")))
    described = describe_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window, softcap, sinks,
                                alibi_slopes, out)
    negative = scale is not None and positive_scale(scale)[1]
    gpu, problem, library = detect(described.device), described.problem, described.library
    if described.empty:
        return Explanation(problem, gpu, None, None, {}, ())
    packed = {"q": q, "k": k, "v": v, "out": out}
    arrays = {name: None if array is None else array[None] for name, array in packed.items()}
    found = explained(problem, gpu, library, {**arrays, "q": None if negative else arrays["q"]}, config=config)
    copies = ["q is negated, because scale is negative"] if negative else []
    for name, array in arrays.items():
        if array is not None and (reason := unsuited(library.read(array), found.kernel.aligned)):
            copies.append(f"{name} is copied: {reason}")
    vectors = {"sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    copies += [f"{name} is copied: its stride is not 1" for name, array in vectors.items()
               if array is not None and array.shape[0] > 1 and library.vector(array)[2][0] != 1]
    if alibi_slopes is not None and not check_slopes(library, alibi_slopes, problem.batch, problem.heads_q, described.device)[2]:
        copies.append("alibi_slopes is copied: kernels read float32 with a last stride of 1")
    return Explanation(problem, gpu, found.kernel, found.match, found.refused, tuple(copies), found.fallback)
