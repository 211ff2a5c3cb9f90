"""What a call of `attention_varlen` asks for, read slowly: its `Problem`, or the sentence that says which argument is wrong."""

from __future__ import annotations

from .arguments import Described, check_out, check_sinks, check_slopes, integer, number
from ..device.arrays import OTHER, AttentionError, library_of
from .cachecall import integers
from ..core.masks import Bounds
from ..core.problem import MAX_LENGTH, Problem

_SHAPES = {"q": "(total_q, heads_q, head_dim)", "k": "(total_k, heads_kv, head_dim)", "v": "(total_k, heads_kv, head_dim_v)",
           "out": "(total_q, heads_q, head_dim_v)"}


def describe_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, bounds: Bounds, softcap, sinks,
                    alibi_slopes, out=None) -> Described:
    """What `attention_varlen` was asked for. Raises `AttentionError`, or `ProblemError` for sizes that no problem can have."""
    library = library_of(q)
    if library is OTHER:
        raise AttentionError(f"q is a {type(q).__name__}; it must be an array of CuPy or torch on a CUDA GPU, or of another "
                             "library with __dlpack__")
    read = {name: read_packed(library, name, array) for name, array in (("q", q), ("k", k), ("v", v))}
    (total_q, heads_q, head_dim), (total_k, heads_kv, _), head_dim_v = read["q"][1], read["k"][1], read["v"][1][2]
    dtype, device = read["q"][3:]
    for name, (_, _, _, its_dtype, its_device) in read.items():
        if its_dtype != dtype:
            raise AttentionError(f"{name} is {its_dtype} and q is {dtype}; q, k and v must have one dtype")
        if its_device != device:
            raise AttentionError(f"{name} is on device {its_device} and q on device {device}; all must be on one GPU")
    if dtype not in library.dtypes:
        raise AttentionError(f"q is {dtype}; allowed are {', '.join(map(str, library.dtypes))}")
    for name, wanted in (("k", (total_k, heads_kv, head_dim)), ("v", (total_k, heads_kv, head_dim_v))):
        if read[name][1] != wanted:
            raise AttentionError(f"{name} has shape {read[name][1]}; it must be {_SHAPES[name]}, which is {wanted} with q "
                                 f"{read['q'][1]}" + (f" and k {read['k'][1]}" if name == "v" else ""))
    if not heads_kv or heads_q % heads_kv:
        raise AttentionError(f"q has {heads_q} heads and k has {heads_kv}; heads_q must be a multiple of heads_kv")
    sizes = [integers(library, name, starts, (None,), device)[2][0]
             for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))]
    if sizes[0] != sizes[1] or not sizes[0]:
        raise AttentionError(f"cu_seqlens_q has {sizes[0]} and cu_seqlens_k {sizes[1]} elements; both must have batch + 1, where "
                             "each sequence begins and the end of the last one")
    batch = sizes[0] - 1
    longest = [longest_of(name, value, total) for name, value, total in (
        ("max_seqlen_q", max_seqlen_q, total_q), ("max_seqlen_k", max_seqlen_k, total_k))]
    if sinks is not None:
        check_sinks(library, sinks, heads_q, device)
    if alibi_slopes is not None:
        check_slopes(library, alibi_slopes, batch, heads_q, device)
    if out is not None:
        read_packed(library, "out", out)
        check_out(library, out[None], (1, total_q, heads_q, head_dim_v), dtype, device)
    problem = Problem(dtype=library.dtypes[dtype], kv="varlen", batch=batch, heads_q=heads_q, heads_kv=heads_kv,
                      seqlen_q=longest[0], seqlen_k=longest[1], head_dim=head_dim, head_dim_v=head_dim_v,
                      softcap=number(softcap), alibi=alibi_slopes is not None, sinks=sinks is not None, **bounds._asdict())
    return Described(problem, library, device, not (batch and total_q and total_k))


def read_packed(library, name: str, array) -> tuple:
    """What the library's `vector` says of an array (total, heads, head_dim) on a GPU. Raises `AttentionError`."""
    if library_of(array) is not library:
        raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of {library.name}, as q is")
    if len(array.shape) != 3:
        raise AttentionError(f"{name} has shape {tuple(array.shape)}; it must be {_SHAPES[name]}")
    pointer, shape, strides, dtype, device = library.vector(array)
    if device < 0:
        raise AttentionError(f"{name} is in host memory; it must be on a CUDA GPU")
    return pointer, tuple(shape), tuple(strides), dtype, device


def longest_of(name: str, value, total: int) -> int:
    """How long sequences of `total` in all may be, at least 1. Raises `AttentionError`."""
    if value is None:
        raise AttentionError(f"{name} is None; it must be an int, the largest length of a sequence or more: it helps to choose a "
                             f"config and never changes the result, so {total}, the length of all, will do")
    longest = integer(name, value)
    if not 0 <= longest <= MAX_LENGTH:
        raise AttentionError(f"{name} is {longest}; it must be from 0 to {MAX_LENGTH}")
    return max(1, min(longest, total))
