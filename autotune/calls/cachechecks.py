"""The sentences for `attention_with_kvcache`: what its arguments must be, checked when something does not fit."""

from __future__ import annotations

from ..device.arrays import OTHER, AttentionError, library_of


def check_starts(library, cu_seqlens_q, total: int, most: int) -> None:
    """Raises `AttentionError` unless cu_seqlens_q goes up from 0 to at most `total`, by at most `most`. Copies it to the host."""
    starts = library.on_host(cu_seqlens_q).tolist()
    if starts[0] or starts[-1] > total:
        raise AttentionError(f"cu_seqlens_q goes from {starts[0]} to {starts[-1]}; it must begin with 0 and end with at most the "
                             f"{total} queries there are")
    for b, (begin, end) in enumerate(zip(starts, starts[1:])):
        if not 0 <= end - begin <= most:
            raise AttentionError(f"cu_seqlens_q[{b}] is {begin} and cu_seqlens_q[{b + 1}] is {end}; a sequence has 0 to {most} "
                                 "queries (max_seqlen_q, if that is given)")


def check_contents(library, cache_seqlens, page_table, capacity: int, pages: int, page_size: int) -> None:
    """Raises `AttentionError` for a length beyond the cache, or a page that a length needs and that does not exist. Copies
    both arrays to the host."""
    batch = None if cache_seqlens is None else library.on_host(cache_seqlens)
    for b, length in enumerate(() if batch is None else batch.tolist()):
        if not 0 <= length <= capacity:
            raise AttentionError(f"cache_seqlens[{b}] is {length}; the cache has room for 0 to {capacity} keys of a sequence")
    if page_table is None:
        return
    for b, row in enumerate(library.on_host(page_table).tolist()):
        used = -(-(capacity if batch is None else int(batch[b])) // page_size)
        for i, page in enumerate(row[:used]):
            if not 0 <= page < pages:
                raise AttentionError(f"page_table[{b}, {i}] is {page}; the cache has pages 0 to {pages - 1}")


def check_arrays(q, k_cache, v_cache, page_table, batch: int | None = None) -> None:
    """Raises `AttentionError` with what is wrong with the arrays of a call, if anything is. `batch` is how many sequences
    cu_seqlens_q has, if that is given; q is then that of one sequence."""
    library = library_of(q)
    if library is OTHER:
        raise AttentionError(f"q is a {type(q).__name__}; it must be an array of CuPy or torch on a CUDA GPU, or of another "
                             "library with __dlpack__")
    paged = page_table is not None
    cache = "(num_pages, page_size, heads_kv, {})" if paged else "(batch, seqlen, heads_kv, {})"
    shapes = {"q": "(batch, seqlen_q, heads_q, head_dim)", "k_cache": cache.format("head_dim"),
              "v_cache": cache.format("head_dim_v")}
    read = {}
    for name, array in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if library_of(array) is not library:
            raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of {library.name}, as q is")
        if len(array.shape) != 4:
            raise AttentionError(f"{name} has shape {tuple(array.shape)}; it must be {shapes[name]}")
        read[name] = library.read(array)
        if read[name][7] < 0:
            raise AttentionError(f"{name} is in host memory; it must be on a CUDA GPU")
    dtype, device = read["q"][6], read["q"][7]
    for name, values in read.items():
        if values[6] != dtype and (values[6] not in library.cache_dtypes or values[6] != read["k_cache"][6]):
            raise AttentionError(f"{name} is {values[6]} and q is {dtype}; q and the cache must have one dtype, or both caches "
                                 f"{' or '.join(map(str, library.cache_dtypes))}")
        if values[7] != device:
            raise AttentionError(f"{name} is on device {values[7]} and q on device {device}; all must be on one GPU")
    if dtype not in library.dtypes:
        raise AttentionError(f"q is {dtype}; allowed are {', '.join(map(str, library.dtypes))}")
    (outer, _, heads_q, head_dim), k_shape, v_shape = (tuple(read[name][1]) for name in ("q", "k_cache", "v_cache"))
    if not paged and k_shape[0] != (outer if batch is None else batch):
        of = f"q's batch, {outer}" if batch is None else f"the number of sequences in cu_seqlens_q, {batch}"
        raise AttentionError(f"k_cache has shape {k_shape}; without page_table its first size must be {of}")
    if k_shape[3] != head_dim:
        raise AttentionError(f"k_cache has shape {k_shape}; its last size must be q's, {head_dim}")
    if v_shape[:3] != k_shape[:3]:
        raise AttentionError(f"v_cache has shape {v_shape}; it must be {shapes['v_cache']}, {k_shape[:3]} and head_dim_v here")
    if not k_shape[2] or heads_q % k_shape[2]:
        raise AttentionError(f"q has {heads_q} heads and k_cache has {k_shape[2]}; heads_q must be a multiple of heads_kv")
