"""New keys and values into a cache of pages: `write_kvcache`.

    write_kvcache(k, v, k_pages, v_pages, slots)        # k (tokens, Hkv, D), slots (tokens,): page * page_size + place in it
"""

from __future__ import annotations

import struct
from functools import lru_cache

from ..core.gpu import detect
from ..device import arrays, launch
from ..device.arrays import LIBRARIES, OTHER, AttentionError, library_of
from ..kernels.base import params_format
from ..kernels.writing import FIELDS, CacheWrite
from .cachecall import scales

_packer = struct.Struct(params_format(FIELDS))


def write_kvcache(k, v, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None) -> None:
    """Writes k (tokens, Hkv, D) and v (tokens, Hkv, Dv) into the caches (num_pages, page_size, Hkv, D or Dv), in place.

    Token t goes to slot slot_mapping[t], (tokens,) int32 or int64 on the device: place slot % page_size of page slot //
    page_size. A slot below 0, or beyond the cache, is nobody's. k and v are bfloat16 or float16. A cache has their dtype, or
    is 8-bit, float8_e4m3fn (with CuPy its bytes, uint8): then it gets k / k_scale and v / v_scale, nearest, and the largest
    8-bit float beyond that; a scale is a number, or float32 on the device, one or (Hkv,). Strides are free but for the last,
    which must be 1, and rows must begin at multiples of 16 bytes.

    Raises `AttentionError` with what does not fit. While a CUDA graph is captured the kernel must already be loaded: call it
    once.
    """
    library = LIBRARIES.get(type(k)) or library_of(k)
    if library is OTHER:
        raise AttentionError(f"k is a {type(k).__name__}; it must be an array of CuPy or torch on a CUDA GPU")
    if library.traced():
        return library.ops.write_kvcache(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    views = _views(library, dict(k=k, v=v, k_cache=k_cache, v_cache=v_cache))
    tokens, heads = views["k"][1][:2]
    pages, page_size = views["k_cache"][1][:2]
    device, dtypes = views["k"][4], {**library.dtypes, **library.cache_dtypes}
    write = CacheWrite(dtypes.get(views["k"][3], str(views["k"][3])), dtypes.get(views["k_cache"][3], str(views["k_cache"][3])),
                       views["k"][1][2], views["v"][1][2])
    wide, slots = _slots(library, slot_mapping, tokens, device)
    of_k, of_v = (scales(library, name, value, heads, device, write.cache_dtype)
                  for name, value in (("k_scale", k_scale), ("v_scale", v_scale)))
    if not (tokens and heads and pages and page_size):
        return None
    stream = library.stream(device)
    step = write.step(tokens, heads)
    loaded = _loaded(write, device, step.entry, arrays.is_capturing(stream))
    pointers = (*(views[name][0] for name in ("k", "v", "k_cache", "v_cache")), slots, of_k[1], of_v[1])
    strides = (*views["k"][2][:2], *views["v"][2][:2], *views["k_cache"][2][:3], *views["v_cache"][2][:3])
    fields = (*pointers, *strides, pages * page_size, tokens, heads, page_size, wide, of_k[2], of_v[2], of_k[0], of_v[0])
    loaded.bound(step).launch(step.grid, stream, _packer, fields)
    return None


_ready: dict[tuple[CacheWrite, int], launch.Loaded] = {}


def _loaded(write: CacheWrite, device: int, entry: str, capturing: bool) -> launch.Loaded:
    loaded = _ready.get((write, device))
    if loaded is None:
        if capturing:
            raise AttentionError(f"{entry} is not loaded on device {device}, and loading it now would break the CUDA graph being "
                                 "captured; call autotune.write_kvcache once, with arrays of these dtypes, before the capture")
        gpu = detect(device)
        if reason := write.reject(gpu.arch):
            raise AttentionError(reason)
        loaded = _ready[write, device] = launch.load(binary_of(write, f"sm_{gpu.arch}"), device)
    return loaded


@lru_cache(maxsize=64)
def binary_of(write: CacheWrite, target: str):
    """The binary of the kernel for `target`, from the cache folder or compiled."""
    from ..cuda.compile import cached
    from ..cuda.render import render_write

    return cached(render_write(write, target), target)


def _views(library, named: dict) -> dict[str, tuple]:
    """What `library.vector` says of each array. Raises `AttentionError` unless they fit together."""
    views = {}
    for name, array in named.items():
        if library_of(array) is not library:
            raise AttentionError(f"{name} is a {type(array).__name__}; it must be an array of {library.name}, as k is")
        views[name] = pointer, shape, strides, dtype, device = library.vector(array)
        rank = 4 if name.endswith("cache") else 3
        if len(shape) != rank:
            wanted = "(num_pages, page_size, heads_kv, head_dim)" if rank == 4 else "(tokens, heads_kv, head_dim)"
            raise AttentionError(f"{name} has shape {tuple(shape)}; it must be {wanted}")
        if device < 0:
            raise AttentionError(f"{name} is in host memory; it must be on a CUDA GPU")
        if device != views["k"][4]:
            raise AttentionError(f"{name} is on device {device} and k on device {views['k'][4]}; all must be on one GPU")
        size = getattr(array, "itemsize", None) or array.dtype.itemsize
        used = [stride for stride, extent in zip(strides[:-1], shape) if extent > 1]
        if strides[-1] != 1 and shape[-1] > 1 or pointer % 16 or any(stride * size % min(16, 8 * size) for stride in used):
            raise AttentionError(
    f"{name} has strides {tuple(strides)} and begins at {pointer % 16} beyond a multiple of 16 bytes; its last "
    "stride must be 1 and its rows must begin at multiples of 16 bytes (8 for an 8-bit cache)")
    (_, k_shape, _, k_dtype, _), (_, v_shape, _, v_dtype, _) = views["k"], views["v"]
    (_, k_pages, _, cache_dtype, _), (_, v_pages, _, v_cache_dtype, _) = views["k_cache"], views["v_cache"]
    for name, shape, wanted in (("v", v_shape, (*k_shape[:2], v_shape[2])), ("k_cache", k_pages, (*k_pages[:2], *k_shape[1:])),
                                ("v_cache", v_pages, (*k_pages[:2], *v_shape[1:]))):
        if tuple(shape) != tuple(wanted):
            raise AttentionError(
    f"{name} has shape {tuple(shape)}; with k {tuple(k_shape)} and k_cache {tuple(k_pages)} it must be "
    f"{tuple(wanted)}")
    if v_dtype != k_dtype or v_cache_dtype != cache_dtype:
        raise AttentionError(
    f"v is {v_dtype} and k {k_dtype}, v_cache {v_cache_dtype} and k_cache {cache_dtype}; both of a pair must have "
    "one dtype")
    return views


def _slots(library, slot_mapping, tokens: int, device: int) -> tuple[int, int]:
    """(whether the slots are 64-bit, their pointer). Raises `AttentionError`."""
    if library_of(slot_mapping) is not library:
        raise AttentionError(f"slot_mapping is a {type(slot_mapping).__name__}; it must be an array of {library.name}, as k is")
    pointer, shape, strides, dtype, where = library.vector(slot_mapping)
    kind = str(dtype).rpartition(".")[2]
    if tuple(shape) != (tokens,) or kind not in ("int32", "int64") or tokens > 1 and strides[0] != 1:
        raise AttentionError(
    f"slot_mapping has shape {tuple(shape)}, dtype {dtype} and strides {tuple(strides)}; it must be ({tokens},) "
    "int32 or int64 without gaps")
    if where != device:
        raise AttentionError(f"slot_mapping is on device {where} and k on device {device}; all must be on one GPU")
    return int(kind == "int64"), pointer
