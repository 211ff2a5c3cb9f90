"""The kernel that writes new keys and values into a cache of pages. Nothing of it is tuned: it is bound by memory.

    write = CacheWrite("bf16", "e4m3", 128, 128)
    source = cuda.render.render_write(write, "sm_90")
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Field, Step

ENTRY = "cache_write"
TEMPLATE = "cache_write/kernel.cu.j2"
THREADS = 256
COLUMNS = 8  # of a thread
LEAST_ARCH_OF_E4M3 = 89
DTYPES = ("bf16", "fp16")

STRIDES = ("k_token", "k_head", "v_token", "v_head", "k_page", "k_row", "k_cache_head", "v_page", "v_row", "v_cache_head")
FIELDS = (
    Field("const Element*", "k", "(tokens, heads, head_dim)"),
    Field("const Element*", "v", "(tokens, heads, head_dim_v)"),
    Field("CacheElement*", "k_cache", "(pages, page_size, heads, head_dim)"),
    Field("CacheElement*", "v_cache", "(pages, page_size, heads, head_dim_v)"),
    Field("const void*", "slots", "(tokens), int or long long: page * page_size + place in it"),
    Field("const float*", "k_scales", "of an 8-bit cache, one or (heads), or null"),
    Field("const float*", "v_scales"),
    *(Field("long long", f"{name}_stride") for name in STRIDES),
    Field("long long", "slot_count", "pages * page_size"),
    Field("long long", "tokens"),
    Field("int", "heads"),
    Field("int", "page_size"),
    Field("int", "wide_slots", "whether slots are long long"),
    Field("int", "k_scale_stride", "0 or 1"),
    Field("int", "v_scale_stride"),
    Field("float", "k_scale", "of an 8-bit cache, without k_scales"),
    Field("float", "v_scale"),
)


@dataclass(frozen=True)
class CacheWrite:
    """What of a write is compiled in."""

    dtype: str
    cache_dtype: str
    head_dim: int
    head_dim_v: int

    @property
    def constants(self) -> list[tuple[str, str, int]]:
        return [("int", "HEAD_DIM", self.head_dim), ("int", "HEAD_DIM_V", self.head_dim_v), ("int", "THREADS", THREADS)]

    def reject(self, arch: int) -> str | None:
        """Why this cannot be written on a GPU of compute capability `arch`, or None."""
        if self.dtype not in DTYPES:
            return f"keys and values are {self.dtype}; allowed are {', '.join(DTYPES)}"
        if self.cache_dtype not in (self.dtype, "e4m3"):
            return f"the cache is {self.cache_dtype}; it must be {self.dtype}, as keys and values are, or e4m3"
        if self.head_dim % COLUMNS or self.head_dim_v % COLUMNS:
            return f"head dims are {self.head_dim} and {self.head_dim_v}; they must be multiples of {COLUMNS}"
        if self.cache_dtype == "e4m3" and arch < LEAST_ARCH_OF_E4M3:
            return f"an e4m3 cache needs compute capability {LEAST_ARCH_OF_E4M3 / 10}, the GPU has {arch / 10}"
        return None

    def step(self, tokens: int, heads: int) -> Step:
        items = tokens * heads * max(self.head_dim, self.head_dim_v) // COLUMNS
        return Step(ENTRY, -(-items // THREADS), THREADS, 0)
