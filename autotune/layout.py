"""How many keys each sequence has, and where in the arrays of K and V they stand: `Layout`, for inputs and references."""

from __future__ import annotations

import numpy as np

from .problem import Problem

UNUSED_PAGE = 2**31 - 1  # what stands in a page table where no page is in use
SPARE_PAGES = 8  # one page in so many, and one more, belongs to nobody


class Layout:
    """Lengths and pages of a problem's sequences, drawn by `seed`.

    `lengths` (B,) int64 on the host. A dense layout has key j of sequence b at [b, j]; a paged one, at [page, slot] through
    `table` (B, pages of a sequence) int32 on the device of `xp`, whose pages are shuffled and whose unused entries are huge.
    Sequences of a cache are full for inputs of kind ``random``; for others some are, some are empty, most are in between.
    """

    def __init__(self, problem: Problem, kind: str, seed: int, xp=np):
        self.problem, self.xp = problem, xp
        self.lengths = np.full(problem.batch, problem.seqlen_k, np.int64)
        random = np.random.default_rng([seed, sum(map(ord, kind)), 77])
        if problem.op == "decode" and kind != "random":
            self.lengths = _draw_lengths(problem, random)
        self._device_lengths = None
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
        if self._device_lengths is None:
            self._device_lengths = self.xp.asarray(self.lengths.astype(np.int32))
        return self._device_lengths

    def shape(self, heads: int, columns: int) -> tuple[int, int, int, int]:
        """Of the array that holds K or V."""
        if self.table is None:
            return self.problem.batch, self.problem.seqlen_k, heads, columns
        return self._pages, self.problem.page_size, heads, columns

    def at(self, batch, key) -> tuple:
        """The first two indices of `key` of sequence `batch` (int arrays of `xp`, of shapes that go together)."""
        if self.table is None:
            return batch, key
        return self._device[batch, key // self.problem.page_size], key % self.problem.page_size

    def by_length(self) -> list[tuple[int, np.ndarray]]:
        """(length, the sequences that have it) for each length."""
        return [(int(length), np.flatnonzero(self.lengths == length)) for length in np.unique(self.lengths)]

    def fill(self, array, batches: np.ndarray, begin: int, end: int, value) -> None:
        """Sets keys [begin, end) of `batches` to `value`."""
        if begin >= end:
            return
        if self.table is None:
            if len(batches) == self.problem.batch:
                array[:, begin:end] = value
            else:
                for batch in batches:
                    array[int(batch), begin:end] = value
        else:
            keys = np.arange(begin, end)
            pages = self._host[batches[:, None], keys // self.problem.page_size]
            array[self.xp.asarray(pages), self.xp.asarray(keys % self.problem.page_size)] = value

    def unused(self):
        """A mask over the first two axes of the arrays, True where no key stands, or None if all places are in use."""
        xp, problem = self.xp, self.problem
        if self.table is None:
            if (self.lengths == problem.seqlen_k).all():
                return None
            return xp.arange(problem.seqlen_k) >= xp.asarray(self.lengths)[:, None]
        unused = xp.ones((self._pages, problem.page_size), bool)
        for length, batches in self.by_length():
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
