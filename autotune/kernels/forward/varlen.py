"""What forward kernels have for packed sequences: fields of Params, texts of templates, and how many blocks they may need."""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable

from ...core.problem import Static
from ..base import Field, header_if

NOTE_BYTES = 64  # of shared memory, where a block that does one item leaves what it is

# Fields that have another meaning than in a batch of sequences of one length.
DOCS = {
    "q": "(seqlen_q, heads_q, head_dim): the queries of all sequences, one sequence after the other",
    "out": "as q, with head_dim_v",
    "lse": "(heads_q, seqlen_q), or null",
    "seqlen_q": "of all sequences together",
    "batch": "sequences",
}
KEY_DOCS = {
    "varlen": {"k": "(seqlen_k, heads_kv, head_dim)", "v": "(seqlen_k, heads_kv, head_dim_v)",
               "seqlen_k": "of all sequences together"},
    "paged": {"k": "(pages, page_size, heads_kv, head_dim)", "v": "(pages, page_size, heads_kv, head_dim_v)",
              "k_batch_stride": "of pages", "v_batch_stride": "of pages",
              "seqlen_k": "the most keys that a sequence can have"},
}
FIELDS = {
    "varlen": (
        Field("const int*", "cu_seqlens_q", "(batch + 1): where each sequence's queries begin, and the end"),
        Field("const int*", "cu_seqlens_k", "(batch + 1): the same of keys"),
    ),
    "paged": (
        Field("const int*", "cu_seqlens_q", "(batch + 1): where each sequence's queries begin, and the end"),
        Field("const int*", "cache_seqlens", "(batch): keys of each sequence, or null: all have seqlen_k"),
        Field("const int*", "page_table", "(batch, pages of a sequence): numbers of pages, or null: each sequence is a page"),
        Field("long long", "page_table_stride", "from one sequence to the next"),
        Field("int", "min_queries", "sequences of fewer are another kernel's"),
        Field("int", "page_size"),
        Field("unsigned", "page_magic", "2^(31 + page_shift) / page_size, rounded up"),
        Field("int", "page_shift"),
    ),
}


def headers(static: Static) -> dict[str, object]:
    """Names for the template: the K/V source, and the headers that go with it."""
    kind = "packed" if static.packed else "dense"
    return {"kv": static.kv, "sequence_header": header_if(static.packed, f"lib/sequences/{static.kv}.cuh"),
            "schedule_header": f"forward/work/{kind}.cuh", "find_header": f"forward/find/{kind}.cuh",
            "alibi_header": header_if(static.alibi, f"forward/alibi/{kind}.cuh")}


def with_note(static: Static, smem_bytes: int) -> int:
    """What a block of `smem_bytes` that does one item requests."""
    return smem_bytes + NOTE_BYTES if static.packed else smem_bytes


def documented(fields: Iterable[Field], static: Static) -> tuple[Field, ...]:
    """`fields` with what they mean for `static`."""
    docs = {**DOCS, **KEY_DOCS[static.kv]}
    return tuple(replace(field, doc=docs.get(field.name, field.doc)) for field in fields)


def most_blocks(batch: int, queries: int, block_queries: int) -> int:
    """Blocks of queries that `batch` sequences of `queries` in all can have at the most."""
    return min(queries, (queries + batch * (block_queries - 1)) // block_queries)
