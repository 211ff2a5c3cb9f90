"""What to compute: `Problem`, its static part, its text form and its cost.

A `Problem` is frozen and prints as one line that parses back, for example
``forward-bf16-b1-h32x8-q8192-k8192-d128-causal``. That line is a CLI argument, a database key and a file name.
Features that a problem lacks do not stand in its text, so a feature added later does not rename old records.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Iterable

from . import sequences
from .masks import MAX_LENGTH, Bounds
from .text import DTYPES, EXAMPLE, OPS, ProblemError, fields_of
from .reading import quoted
from .sequences import bucket_batch, bucket_length, least_batch, least_length

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e4m3": 1}
KV_SOURCES = ("dense", "varlen", "paged")


@dataclass(frozen=True)
class Static:
    """The part of a problem that is compiled in. Everything else reaches the kernel as a run-time argument."""

    op: str
    dtype: str
    kv_dtype: str
    out_dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    softcap: bool
    alibi: bool
    kv: str

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def packed(self) -> bool:
        """Whether queries of all sequences follow each other in one array, with lengths that stand on the device."""
        return self.op != "decode" and self.kv != "dense"

    @cached_property
    def in_bf16(self) -> Static:
        """With bf16 in place of fp16, of which the GPU moves as many bytes and multiplies as many: the same configs suit both."""
        halves = {name: "bf16" for name in ("dtype", "kv_dtype", "out_dtype") if getattr(self, name) == "fp16"}
        return replace(self, **halves) if halves else self

    @cached_property
    def text(self) -> str:
        """File-name form, for example ``forward-bf16-d128-causal``."""
        before, after = [self.op, self.dtype], [] if self.mask == "full" else [self.mask]
        if self.kv_dtype != self.dtype:
            before.append(f"kv{self.kv_dtype}")
        if self.out_dtype != self.dtype:
            before.append(f"out{self.out_dtype}")
        after += [name for name in ("softcap", "alibi") if getattr(self, name)]
        if self.kv != "dense":
            after.append(self.kv)
        return "-".join([*before, _head_dim_token(self.head_dim, self.head_dim_v), *after])


@dataclass(frozen=True)
class Problem:
    """One attention problem. Lengths are tokens, head dims are elements.

    Causal masking is bottom-right: query i sees key j iff ``j <= i + seqlen_k - seqlen_q``. It is the same thing as
    ``window_right = 0``, so it is not a field of its own. A window is inclusive on both sides; ``None`` is unbounded.

    Raises `ProblemError` on construction if a field is out of range.
    """

    op: str = "forward"
    dtype: str = "bf16"
    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    head_dim: int = 128
    head_dim_v: int = 0  # 0: the same as head_dim
    window_left: int | None = None
    window_right: int | None = None
    prefix: int = 0  # first keys that every query sees under a causal mask
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    kv: str = "dense"
    page_size: int = 0
    packed_queries: bool = False  # of decode steps, each sequence with its own number; forward ones say it by `kv`
    deterministic: bool = False  # of backward problems: the same bits every time
    kv_dtype: str = ""  # "": the same as dtype
    out_dtype: str = ""

    def __post_init__(self):
        for name, fallback in (("head_dim_v", self.head_dim), ("kv_dtype", self.dtype), ("out_dtype", self.dtype)):
            if not getattr(self, name):
                object.__setattr__(self, name, fallback)
        _validate(self)

    @cached_property
    def bounds(self) -> Bounds:
        """Which keys a query sees."""
        return Bounds(*_BOUNDS(self))

    @property
    def mask(self) -> str:
        return self.bounds.kind

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def packed(self) -> bool:
        """Whether queries of all sequences follow each other in one array: seqlen_q and seqlen_k are then the largest lengths."""
        return self.static.packed or self.packed_queries

    @cached_property
    def values(self) -> tuple:
        """Every field, as a tuple: the key of a dict, which hashes in a fourth of the time that a Problem takes."""
        return _VALUES(self)

    @cached_property
    def static(self) -> Static:
        return _static(self.op, self.dtype, self.kv_dtype, self.out_dtype, self.head_dim, self.head_dim_v, self.mask,
                       self.softcap > 0, self.alibi, self.kv)

    @cached_property
    def text(self) -> str:
        tokens = [self.op, self.dtype, f"b{self.batch}", f"h{self.heads_q}x{self.heads_kv}", f"q{self.seqlen_q}",
                  f"k{self.seqlen_k}", _head_dim_token(self.head_dim, self.head_dim_v)]
        tokens += self.bounds.tokens
        if self.softcap:
            tokens.append(f"softcap{float(self.softcap)!r}".removesuffix(".0"))
        tokens += [name for name in ("alibi", "sinks") if getattr(self, name)]
        if self.kv != "dense":
            tokens.append("varlen" if self.kv == "varlen" else f"page{self.page_size}")
        if self.packed_queries:
            tokens.append("packed")
        if self.deterministic:
            tokens.append("deterministic")
        if self.kv_dtype != self.dtype:
            tokens.append(f"kv{self.kv_dtype}")
        if self.out_dtype != self.dtype:
            tokens.append(f"out{self.out_dtype}")
        return "-".join(tokens)

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def parse(text: str) -> Problem:
        """The problem that `text` names. Raises `ProblemError` naming the token that is wrong."""
        if not isinstance(text, str):
            raise ProblemError(f"{quoted(text)} is no problem; one is a Problem or a line of text such as {EXAMPLE}")
        return _parse(text)

    def simplified(self) -> Problem:
        """The same problem with bounds that hide nothing dropped, so that it can use a cheaper kernel.

        Where lengths stand on the device, seqlen_k is a guess, and is not asked; of packed sequences seqlen_q is one, too.
        """
        bounds = self.needed_bounds
        return self if bounds == self.bounds else replace(self, **bounds._asdict())

    @cached_property
    def needed_bounds(self) -> Bounds:
        """`bounds` without those that hide nothing."""
        if self.op == "decode":
            return self.bounds.simplified(self.seqlen_q, None)
        return self.bounds.simplified(self.seqlen_q, self.seqlen_k) if self.kv == "dense" else self.bounds

    def bucketed(self) -> Problem:
        """The representative of this problem's bucket: lengths rounded up to 8 steps an octave, batch to 4."""
        bucket = dict(batch=bucket_batch(self.batch), seqlen_q=bucket_length(self.seqlen_q),
                      seqlen_k=bucket_length(self.seqlen_k), **self.bounds.bucketed()._asdict())
        return self if all(getattr(self, name) == value for name, value in bucket.items()) else replace(self, **bucket)

    def stands_for(self, other: Problem) -> bool:
        """Whether this problem, simplified and bucketed, is the representative of the bucket of `other`."""
        alike = (self.heads_q, self.heads_kv) == (other.heads_q, other.heads_kv)  # sooner than making another problem
        return alike and other.simplified().bucketed() == self

    def least_of_bucket(self) -> Problem:
        """The smallest problem of this one's bucket."""
        return replace(self, batch=least_batch(self.batch), seqlen_q=least_length(self.seqlen_q),
                       seqlen_k=least_length(self.seqlen_k))

    @cached_property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of sequences that stand for all of them: one where all are alike; where they are packed, and the
        lengths here are the largest ones, such that are spread as is usual."""
        if self.packed:
            return sequences.typical(self.batch, self.seqlen_q, self.seqlen_k)
        return ((self.seqlen_q, self.seqlen_k),)

    @cached_property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask lets through, per head, in a sequence of seqlen_q queries and seqlen_k keys."""
        return self.bounds.visible_pairs(self.seqlen_q, self.seqlen_k)

    @cached_property
    def flops(self) -> int:
        """Multiply-adds of the matrix products count 2, two products of a forward and five of a backward; masked pairs count 0.
        The field's usual convention."""
        return self.flops_of(self.sequences) * self.batch // max(len(self.sequences), 1)

    def flops_of(self, lengths: Iterable[tuple[int, int]]) -> int:
        """The same for sequences of these (queries, keys)."""
        pairs = (self.bounds.visible_pairs(*each) for each in lengths)
        columns = 3 * self.head_dim + 2 * self.head_dim_v if self.op == "backward" else self.head_dim + self.head_dim_v
        return 2 * self.heads_q * sum(pairs) * columns

    @cached_property
    def compulsory_bytes(self) -> int:
        """Bytes that any kernel must move: q, k, v read once, out written once. Of a backward, also out, its gradient and lse
        read once, and the gradients of q, k and v written once."""
        return self.bytes_of(self.sequences) * self.batch // max(len(self.sequences), 1)

    @property
    def cache_bytes(self) -> int:
        """Those of them that are keys and values, where all sequences are alike."""
        return self.compulsory_bytes - self.batch * self.bytes_of([(self.seqlen_q, 0)])

    def bytes_of(self, lengths: Iterable[tuple[int, int]]) -> int:
        """The same for sequences of these (queries, keys)."""
        query = self.heads_q * (self.head_dim * DTYPE_BYTES[self.dtype] + self.head_dim_v * DTYPE_BYTES[self.out_dtype])
        key = self.heads_kv * (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.kv_dtype]
        if self.op == "backward":
            query, key = 2 * query + self.heads_q * 4, 2 * key
        return sum(queries * query + key * self.bounds.visible_keys(queries, keys) for queries, keys in lengths)


_static = lru_cache(maxsize=1024)(Static)  # problems share it, and what it keeps
_BOUNDS = attrgetter(*Bounds._fields)
_VALUES = attrgetter(*(field.name for field in fields(Problem)))


def _head_dim_token(head_dim: int, head_dim_v: int) -> str:
    return f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}x{head_dim_v}"


def as_problems(given: Problem | str | Iterable[Problem | str]) -> list[Problem]:
    """The problems of one `Problem` or text, or of several. Raises `ProblemError` for anything else."""
    if isinstance(given, (Problem, str)) or not isinstance(given, Iterable):
        given = [given]
    return [problem if isinstance(problem, Problem) else Problem.parse(problem) for problem in given]


@lru_cache(maxsize=4096)
def _parse(text: str) -> Problem:
    return Problem(**fields_of(text))


def _validate(p: Problem) -> None:
    if fault := _fault(p):
        raise ProblemError(fault)


def _fault(p: Problem) -> str | None:
    """What is wrong with the fields of `p`. Sentences are made only of what is: a lookup makes dozens of problems."""
    for name, allowed in (("op", OPS), ("dtype", DTYPES), ("kv_dtype", DTYPE_BYTES), ("out_dtype", DTYPES), ("kv", KV_SOURCES)):
        value = getattr(p, name)
        if not isinstance(value, str) or value not in allowed:
            return f"{name} is {quoted(value)}; allowed are {', '.join(allowed)}"
    for name in ("alibi", "sinks", "packed_queries", "deterministic"):
        if type(getattr(p, name)) is not bool:
            return f"{name} is {quoted(getattr(p, name))}; it must be True or False"
    for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "page_size"):
        value = getattr(p, name)
        if type(value) is not int:
            return f"{name} is {value!r}; it must be an int"
        if not 0 <= value <= MAX_LENGTH:
            return f"{name} is {value}; allowed is 0 to {MAX_LENGTH}"
    for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v"):
        if getattr(p, name) < 1:
            return f"{name} is {getattr(p, name)}; it must be at least 1"
    if p.heads_q % p.heads_kv:
        return f"heads_q is {p.heads_q} and heads_kv is {p.heads_kv}; heads_q must be a multiple of heads_kv"
    if wrong := p.bounds.wrong():
        return wrong
    if not isinstance(p.softcap, (int, float)) or not (p.softcap == 0 or 1e-3 <= p.softcap <= 1e6):
        return f"softcap is {p.softcap!r}; it must be 0 (off) or a number from 0.001 to 1000000"
    if (p.kv == "paged") != (p.page_size > 0):
        return f"page_size is {p.page_size} with kv {p.kv!r}; a paged cache needs a page_size of at least 1, others 0"
    if p.op != "backward" and p.deterministic:
        return "deterministic is for backward problems; others always are"
    if p.op != "decode" and p.packed_queries:
        return "packed is for decode problems; in forward ones varlen or pageN says it"
    return None
