"""How many keys each sequence has, and where in the arrays of K and V they stand: `Layout`, for inputs and references."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from ..core.problem import Problem

UNUSED_PAGE = 2**31 - 1  # what stands in a page table where no page is in use
SPARE_PAGES = 8  # one page in so many, and one more, belongs to nobody


class Layout:
    """Lengths and places of a problem's sequences, drawn by `seed`.

    `queries` and `lengths` (B,) int64 on the host: how many queries and keys each sequence has. A dense layout has key j of
    sequence b at [b, j]; a paged one, at [page, slot] through `table` (B, pages of a sequence) int32 on the device of `xp`, whose
    pages are shuffled and whose unused entries are huge; a varlen one, at [0, key_starts[b] + j]. Where queries are packed, query
    i of sequence b is at [0, query_starts[b] + i], else at [b, i]. Starts are (B + 1,) int64 on the host.

    For inputs of kind ``random`` sequences of a cache are full, and packed ones as long as `Problem.sequences` says. For others
    some are as long as can be, some are empty, most are in between.
    """

    min_queries = 0  # of a sequence: those of fewer are another kernel's, whose launch shares the call

    def __init__(self, problem: Problem, kind: str, seed: int, xp=np, sequences: Sequence[tuple[int, int]] | None = None):
        self.problem, self.xp = problem, xp
        self.queries = np.full(problem.batch, problem.seqlen_q, np.int64)
        self.lengths = np.full(problem.batch, problem.seqlen_k, np.int64)
        random = np.random.default_rng([seed, sum(map(ord, kind)), 77])
        if sequences is not None:
            self.queries, self.lengths = np.array(sequences, np.int64).reshape(-1, 2).T
        elif problem.packed:
            self.queries, self.lengths = _draw_packed(problem, kind == "random", random)
        elif problem.op == "decode" and kind != "random":
            self.lengths = _draw_lengths(problem, random)
        self.query_starts, self.key_starts = (np.concatenate([[0], np.cumsum(each)]) for each in (self.queries, self.lengths))
        self._copies: dict[str, object] = {}
        self.table = None
        if problem.kv == "paged":
            each = -(-problem.seqlen_k // problem.page_size)
            used = problem.batch * each
            self._pages = used + used // SPARE_PAGES + 1
            pages = random.permutation(self._pages)[:used].astype(np.int32).reshape(problem.batch, each)
            in_use = np.arange(each) * problem.page_size < self.lengths[:, None]
            self._host = np.where(in_use, pages, 0)
            self._device = xp.asarray(self._host)
            self.table = xp.asarray(np.where(in_use, pages, np.int32(UNUSED_PAGE)))

    def device_lengths(self):
        """(B,) int32 on the device: always the same array."""
        return self._device_copy("lengths")

    def device_starts(self, of: str):
        """`query_starts` or `key_starts`, (B + 1,) int32 on the device: always the same array. `of` is "query" or "key"."""
        return self._device_copy(f"{of}_starts")

    def _device_copy(self, name: str):
        if name not in self._copies:
            self._copies[name] = self.xp.asarray(getattr(self, name).astype(np.int32))
        return self._copies[name]

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(queries, keys) of each sequence."""
        return list(zip(self.queries.tolist(), self.lengths.tolist()))

    @property
    def rows(self) -> tuple[int, int]:
        """The first two sizes of q and of the output."""
        return (1, int(self.query_starts[-1])) if self.problem.packed else (self.problem.batch, self.problem.seqlen_q)

    def shape(self, heads: int, columns: int) -> tuple[int, int, int, int]:
        """Of the array that holds K or V."""
        if self.table is not None:
            return self._pages, self.problem.page_size, heads, columns
        if self.problem.kv == "varlen":
            return 1, int(self.key_starts[-1]), heads, columns
        return self.problem.batch, self.problem.seqlen_k, heads, columns

    def at(self, batch, key) -> tuple:
        """The first two indices of `key` of sequence `batch` (int arrays of `xp`, of shapes that go together)."""
        if self.table is not None:
            return self._device[batch, key // self.problem.page_size], key % self.problem.page_size
        if self.problem.kv == "varlen":
            place = self.xp.asarray(self.key_starts)[batch] + key
            return batch * 0, place.clip(0, max(int(self.key_starts[-1]) - 1, 0))  # of a sequence without keys there is none
        return batch, key

    def at_query(self, batch, query) -> tuple:
        """The same of a query, in q and in the output."""
        if self.problem.packed:
            return batch * 0, self.xp.asarray(self.query_starts)[batch] + query
        return batch, query

    def owners(self) -> tuple:
        """(sequence, query) of every row of q, int64 arrays of `rows`'s shape, or of one that goes with it."""
        xp, (outer, count) = self.xp, self.rows
        if not self.problem.packed:
            return xp.arange(outer, dtype=np.int64).reshape(-1, 1), xp.arange(count, dtype=np.int64).reshape(1, -1)
        sequence = np.repeat(np.arange(self.problem.batch), self.queries)
        query = np.arange(count) - self.query_starts[sequence]
        return xp.asarray(sequence)[None], xp.asarray(query)[None]

    def by_lengths(self) -> list[tuple[int, int, np.ndarray]]:
        """(queries, keys, the sequences that have so many) for each pair of lengths."""
        pairs = np.stack([self.queries, self.lengths], 1)
        return [(int(queries), int(keys), np.flatnonzero((pairs == (queries, keys)).all(1)))
                for queries, keys in np.unique(pairs, axis=0)]

    def fill(self, array, batches: np.ndarray, begin: int, end: int, value) -> None:
        """Sets keys [begin, end) of `batches` to `value`."""
        if begin >= end:
            return
        if self.table is not None:
            keys = np.arange(begin, end)
            pages = self._host[batches[:, None], keys // self.problem.page_size]
            array[self.xp.asarray(pages), self.xp.asarray(keys % self.problem.page_size)] = value
        elif self.problem.kv == "varlen":
            for start in self.key_starts[batches].tolist():
                array[0, start + begin:start + end] = value
        elif len(batches) == self.problem.batch:
            array[:, begin:end] = value
        else:
            for batch in batches:
                array[int(batch), begin:end] = value

    def unused(self):
        """A mask over the first two axes of the arrays, True where no key stands, or None if all places are in use."""
        xp, problem = self.xp, self.problem
        if self.table is None:
            if problem.kv == "varlen" or (self.lengths == problem.seqlen_k).all():
                return None
            return xp.arange(problem.seqlen_k) >= xp.asarray(self.lengths)[:, None]
        unused = xp.ones((self._pages, problem.page_size), bool)
        for _, length, batches in self.by_lengths():
            self.fill(unused, batches, 0, length, False)
        return unused


def _draw_lengths(problem: Problem, random: np.random.Generator) -> np.ndarray:
    """One full sequence, one empty, one of a single key, the rest anywhere, often a multiple of 16 or of a page, or one off."""
    most, batch = problem.seqlen_k, problem.batch
    lengths = random.integers(min(1, most), most + 1, batch)
    step = np.where(random.random(batch) < 0.5, 16, max(problem.page_size, 1))
    near = lengths // step * step + random.integers(-1, 2, batch)
    lengths = np.where(random.random(batch) < 0.5, near, lengths).clip(0, most)
    if batch > 1:
        lengths[: min(batch - 1, 3)] = [most, 0, min(1, most)][: min(batch - 1, 3)]
    return random.permutation(lengths)


def _draw_packed(problem: Problem, usual: bool, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(queries, keys) of packed sequences in any order: the `usual` ones, or for most of them lengths nearby, often a multiple of
    16 or of a page, or one off, half of them with keys of another sequence. Some have no queries, no keys, or one of each."""
    batch = problem.batch
    typical = np.array(problem.sequences, np.int64).reshape(-1, 2)
    chosen = np.arange(batch) % max(len(typical), 1)
    queries, keys = (typical[chosen][random.permutation(batch)].T if batch else np.zeros((2, 0), np.int64))
    if usual:
        return queries, keys

    def jittered(lengths: np.ndarray, most: int) -> np.ndarray:
        step = np.where(random.random(batch) < 0.5, 16, max(problem.page_size, 1))
        near = lengths // step * step + random.integers(-1, 2, batch)
        return np.where(random.random(batch) < 0.7, near, lengths).clip(0, most)

    keys = np.where(random.random(batch) < 0.5, random.permutation(keys), keys)
    queries, keys = jittered(queries, problem.seqlen_q), jittered(keys, problem.seqlen_k)
    special = random.permutation(batch)[: max(batch // 2, min(batch - 1, 2))]  # sequences that are given these lengths, in turn
    for sequence, (few_queries, few_keys) in zip(special, ((0, None), (None, 0), (1, 1), (1, None))):
        queries[sequence] = queries[sequence] if few_queries is None else min(few_queries, problem.seqlen_q)
        keys[sequence] = keys[sequence] if few_keys is None else min(few_keys, problem.seqlen_k)
    longest = random.permutation(np.setdiff1d(np.arange(batch), special))[:1]
    queries[longest], keys[longest] = problem.seqlen_q, problem.seqlen_k
    return queries, keys
