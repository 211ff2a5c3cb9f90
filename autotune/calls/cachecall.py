"""What a call of `attention_with_kvcache` asks for, read from its arguments and checked: a `Call`, and its arrays."""

from __future__ import annotations

from typing import NamedTuple

from ..device import arrays
from .arguments import (LARGEST_SCALE, UNREADABLE, check_out, integer, number, read_sinks, read_slopes, refuse_grad,
                        sentence)
from ..device.arrays import LIBRARIES, AttentionError, library_of
from .call import Call
from .cachechecks import check_arrays, check_contents, check_starts
from ..core.gpu import Gpu
from ..kernels import candidates
from ..kernels.decode.base import MAX_QUERIES
from ..core.masks import CAUSAL, FULL, Bounds
from ..core.problem import MAX_LENGTH


class Arrays(NamedTuple):
    """The arrays of a call and what goes with them. Packed queries are those of one sequence, as far as the shapes of q and out
    go. Addresses in the call are of arrays that `keep` holds."""

    q: object
    k_cache: object
    v_cache: object
    out: object  # or None
    q_view: tuple  # what the library's `read` says of q
    k_view: tuple
    v_view: tuple
    packed: bool
    queries: int  # of a sequence, at most
    whole: bool  # `attention` does it: every sequence has all queries and keys, side by side, and they are none for decoding
    keep: tuple


def forward_only(call: Call, given: Arrays, gpu: Gpu) -> bool:
    """Whether no decode kernel can serve the sequences of few queries, but a forward kernel can serve all."""
    return not candidates(call.problem(), gpu) and bool(candidates(call.twin(given.queries, None)[0].problem(), gpu))


def understand(library, q, k_cache, v_cache, cache_seqlens, page_table, bounds: Bounds, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
               k_scale, v_scale, num_splits, softcap, sinks, alibi_slopes, out, check, config=None) -> tuple[Call, Arrays]:
    """The arguments of `attention_with_kvcache`, in its words: the call of its sequences of up to `MAX_QUERIES` queries. Raises
    as it does."""
    packed, starts = cu_seqlens_q is not None, 0
    if packed:
        q, out = as_one_sequence(library, "q", q), None if out is None else as_one_sequence(library, "out", out)
        cu_seqlens_q, starts, batch = starts_of(library, cu_seqlens_q, q)
    elif max_seqlen_q is not None:
        raise AttentionError("max_seqlen_q must be None without cu_seqlens_q: the shape of q says how many queries there are")
    read = library.read
    try:
        views = read(q), read(k_cache), read(v_cache)
        _, (outer, rows, heads_q, head_dim), _, _, _, _, dtype, device = views[0]
        _, (pages, page_size, heads_kv, head_dim_k), _, _, _, _, dtype_k, device_k = views[1]
        _, (pages_v, page_size_v, heads_v, head_dim_v), _, _, _, _, dtype_v, device_v = views[2]
        if not packed:
            batch = outer
        if not (pages == pages_v and page_size == page_size_v and heads_kv == heads_v and not heads_q % heads_kv
                and head_dim == head_dim_k and dtype_k == dtype_v and device == device_k == device_v >= 0
                and (page_table is not None or pages == batch)):
            raise AttentionError("q, k_cache and v_cache do not fit together")
        dtype_name = library.dtypes[dtype]
        kv_dtype = dtype_name if dtype_k == dtype else library.cache_dtypes[dtype_k]
    except UNREADABLE as error:
        raise sentence(check_arrays, error, q, k_cache, v_cache, page_table, batch if packed else None) from None
    queries = most_queries(max_seqlen_q, rows) if packed else rows
    lengths = table = table_stride = 0
    if cache_seqlens is not None:
        cache_seqlens, lengths, _, _ = integers(library, "cache_seqlens", cache_seqlens, (batch,), device)
    if page_table is None:
        capacity, page_size = page_size, 0
    else:
        page_table, table, table_shape, table_stride = integers(library, "page_table", page_table, (batch, None), device)
        capacity = table_shape[1] * page_size
    if check:
        if arrays.is_capturing(library.stream(device)):
            raise AttentionError("check must be False while a CUDA graph is captured: it reads lengths and pages on the host")
        check_contents(library, cache_seqlens, page_table, capacity, pages, page_size)
        if packed:
            check_starts(library, cu_seqlens_q, rows, queries)
    if num_splits is not None and not (type(num_splits) is int and 0 < num_splits <= MAX_LENGTH):
        raise AttentionError(f"num_splits is {num_splits!r}; it must be an int from 1 to {MAX_LENGTH}, or None")
    if library.grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad or sinks is not None
                                   or out is not None or alibi_slopes is not None or k_scale is not None or v_scale is not None
                                   or library.forward_mode()):
        refuse_grad(library, q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, alibi_slopes=alibi_slopes, out=out,
                    k_scale=k_scale, v_scale=v_scale)
    if out is not None:
        check_out(library, out, (outer, rows, heads_q, head_dim_v), dtype, device)
    call = Call()
    call.plan = call.params = None
    call.op, call.kv, call.config = "decode", "paged" if page_size else "dense", config
    call.library, call.device, call.dtype, call.kv_dtype = library, device, dtype_name, kv_dtype
    call.heads_q, call.heads_kv, call.head_dim, call.head_dim_v = heads_q, heads_kv, head_dim, head_dim_v
    if bounds is CAUSAL:  # Bounds.simplified, without a call
        bounds = CAUSAL if queries > 1 else FULL
    elif bounds is not FULL:
        bounds = bounds.simplified(queries, None)
    call.bounds, call.softcap = bounds, softcap if type(softcap) is float else number(softcap)
    call.page_size, call.deterministic = page_size, False
    call.batch, call.seqlen_q, call.seqlen_k = batch, min(queries, MAX_QUERIES), capacity
    call.longest_q = queries
    if queries > MAX_QUERIES:  # sequences of few, beside those of many, mostly have one: as few as do not simplify the mask away
        call.longest_q = 2 if bounds.window_right is None else max(2, min(MAX_QUERIES, bounds.window_right + 2))
    call.longest_k = capacity if max_seqlen_k is None else max_seqlen_k if type(max_seqlen_k) is int else \
        integer("max_seqlen_k", max_seqlen_k)
    call.cache_seqlens, call.cu_seqlens_q, call.page_table, call.page_table_stride = lengths, starts, table, table_stride
    call.uniform, call.pages, call.num_splits = not (lengths or packed), pages, num_splits or 0
    call.sinks = call.sink_dtype = call.alibi_slopes = call.alibi_batch_stride = 0
    if sinks is not None:
        sinks = read_sinks(call, sinks)
    if alibi_slopes is not None:
        alibi_slopes = read_slopes(call, alibi_slopes)
    call.k_scale = call.v_scale = 1.0
    call.k_scales = call.v_scales = call.k_scale_stride = call.v_scale_stride = 0
    if k_scale is not None:
        call.k_scale, call.k_scales, call.k_scale_stride = scales(library, "k_scale", k_scale, heads_kv, device, kv_dtype)
    if v_scale is not None:
        call.v_scale, call.v_scales, call.v_scale_stride = scales(library, "v_scale", v_scale, heads_kv, device, kv_dtype)
    whole = call.uniform and not (page_size or call.num_splits) and kv_dtype == dtype_name
    prompts = whole and (queries > MAX_QUERIES or dtype_name == "fp32")
    return call, Arrays(q, k_cache, v_cache, out, *views, packed, queries, prompts,
                        (cache_seqlens, page_table, cu_seqlens_q, sinks, alibi_slopes, k_scale, v_scale))


def integers(library, name: str, array, shape: tuple, device: int) -> tuple:
    """(array or a packed copy, pointer, shape, stride of the first axis) of int32 numbers on `device` in rows without gaps.
    None in `shape`, which may be its last, stands for any size. Raises `AttentionError`."""
    if LIBRARIES.get(type(array)) is not library and library_of(array) is not library:
        raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of {library.name}, as q is")
    pointer, sizes, strides, dtype, where = library.vector(array)
    if len(sizes) != len(shape) or sizes[0] != shape[0] and shape[0] is not None:
        unknown = "batch + 1" if len(shape) == 1 else "max_pages"
        wanted = ", ".join(unknown if want is None else str(want) for want in shape)
        raise AttentionError(f"{name} has shape {tuple(sizes)}; it must be ({wanted}{',' * (len(shape) == 1)})")
    if dtype != library.int32:
        raise AttentionError(f"{name} is {dtype}; it must be int32")
    if where < 0:
        raise AttentionError(f"{name} is in host memory; it must be on the GPU that q is on")
    if where != device:
        raise AttentionError(f"{name} is on device {where} and q on device {device}; all must be on one GPU")
    if strides[-1] != 1 and sizes[-1] > 1:
        array = library.packed(array)
        pointer, sizes, strides, _, _ = library.vector(array)
    return array, pointer, sizes, strides[0]


def as_one_sequence(library, name: str, array):
    """Packed queries or outputs (total_q, heads_q, head_dim) as (1, total_q, heads_q, head_dim). Raises `AttentionError`."""
    if LIBRARIES.get(type(array)) is not library and library_of(array) is not library:
        raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of {library.name}, as q is")
    if len(array.shape) != 3:
        raise AttentionError(f"{name} has shape {tuple(array.shape)}; with cu_seqlens_q it must be (total_q, heads_q, head_dim)")
    return array[None]


def starts_of(library, cu_seqlens_q, q) -> tuple[object, int, int]:
    """(cu_seqlens_q or a packed copy, pointer, sequences). Raises `AttentionError`."""
    array, pointer, (size,), _ = integers(library, "cu_seqlens_q", cu_seqlens_q, (None,), library.vector(q)[4])
    if not size:
        raise AttentionError("cu_seqlens_q is empty; it must be (batch + 1,): where each sequence's queries begin, and the end")
    return array, pointer, size - 1


def most_queries(max_seqlen_q, total: int) -> int:
    """Queries of a sequence at the most, of `total` in all. Raises `AttentionError`."""
    if max_seqlen_q is None:
        return total
    most = max_seqlen_q if type(max_seqlen_q) is int else integer("max_seqlen_q", max_seqlen_q)
    if most < 0:
        raise AttentionError(f"max_seqlen_q is {most}; it must be at least 0, or None if it is not known")
    return min(most, total)


def scales(library, name: str, value, heads_kv: int, device: int, kv_dtype: str) -> tuple[float, int, int]:
    """(number, pointer to float32 or 0, stride) of the scale of an 8-bit cache. Raises `AttentionError`."""
    if value is None:
        return 1.0, 0, 0
    if kv_dtype != "e4m3":
        raise AttentionError(f"{name} must be None: only an 8-bit cache has scales, this one is {kv_dtype}")
    if library_of(value) is library:
        pointer, shape, strides, dtype, where = library.vector(value)
        gaps = len(shape) == 1 and shape[0] > 1 and strides[0] != 1
        if tuple(shape) not in ((), (1,), (heads_kv,)) or dtype != library.float32 or gaps:
            raise AttentionError(f"{name} has shape {tuple(shape)} and dtype {dtype}; it must be a number, or float32 of one "
                                 f"element or ({heads_kv},) without gaps")
        if where != device:
            raise AttentionError(f"{name} is on device {where} and q on device {device}; all must be on one GPU")
        return 1.0, pointer, int(len(shape) == 1 and shape[0] == heads_kv and heads_kv > 1)
    if not 0 < number(value) <= LARGEST_SCALE:
        raise AttentionError(f"{name} is {value!r}; it must be above 0 and at most {LARGEST_SCALE:g}")
    return number(value), 0, 0
