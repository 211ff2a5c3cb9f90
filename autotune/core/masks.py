"""Which keys a query sees: `Bounds`, and all that follows from them. The one place to read, and to change for another mask.

A mask lets every query see one interval of keys. Query i of Sq stands at key i + Sk - Sq of Sk, so the last query at the last
key.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from .sequences import bucket_length

MAX_LENGTH = 2**30  # indices of keys, and their sums with a window's bounds, are 32-bit on the device

# Kinds, of which each is compiled in: a kind's header is masks/<kind>.cuh. Params of a kind also have these numbers of its
# `Bounds`, which may differ from call to call; a window's sides are in the Params of all.
KINDS = {"full": {}, "causal": {}, "window": {}, "prefix": {"prefix": "keys of a sequence, its first, that every query sees"}}

COUNTED = {"left": "window_left", "right": "window_right", "prefix": "prefix"}  # how a problem's text says a field: left4095


class Bounds(NamedTuple):
    """What a mask hides. A query that stands at key c sees the keys from c - window_left to c + window_right; None is no bound.
    Causal is window_right = 0, so it is no field of its own. With causal only, every query also sees the first `prefix` keys."""

    window_left: int | None = None
    window_right: int | None = None
    prefix: int = 0

    @property
    def kind(self) -> str:
        if self.prefix:
            return "prefix"
        if self.window_left is None and self.window_right is None:
            return "full"
        return "causal" if self.window_left is None and self.window_right == 0 else "window"

    def wrong(self) -> str | None:
        """What of these no mask can have, as a sentence, or None."""
        for name in ("window_left", "window_right"):
            value = getattr(self, name)
            if not (value is None or type(value) is int and 0 <= value <= MAX_LENGTH):
                return f"{name} is {value!r}; it must be None (unbounded) or an int from 0 to {MAX_LENGTH}"
        if type(self.prefix) is not int or not 0 <= self.prefix <= MAX_LENGTH:
            return f"prefix is {self.prefix!r}; it must be an int from 0 to {MAX_LENGTH}"
        if self.prefix and self[:2] != (None, 0):
            return f"prefix is {self.prefix}; it needs causal, without a window"
        return None

    def simplified(self, queries: int, keys: int | None) -> Bounds:
        """Without what hides nothing of so many queries and keys, so that a cheaper kernel can serve; None: the number of keys is
        not known. The last query sees keys up to keys - 1 + right, the first one from keys - queries - left."""
        left, right, prefix = self
        if left is None and right is None:
            return FULL
        if left is not None and keys is not None and left >= keys - 1:
            left = None
        if right is not None and right >= queries - 1:
            right = None
        if keys is not None and prefix >= keys:
            right = None
        if left is None and right is None:
            return FULL
        if keys is not None and prefix <= keys - queries + 1:  # what the first query sees anyway
            prefix = 0
        bounds = Bounds(left, right, prefix)
        return self if bounds == self else bounds

    def bucketed(self) -> Bounds:
        """What stands for these where a config is chosen. A window's sides stay: a model has few. A prefix is a length."""
        return self._replace(prefix=bucket_length(self.prefix)) if self.prefix else self

    def visible(self, rows, queries, keys):
        """(first, end): row i sees the keys first[i] <= j < end[i] of so many. `rows` is an int64 array of numpy or cupy;
        `queries` and `keys` are ints or arrays of shapes that go with it."""
        stands = rows + (keys - queries)
        first = stands * 0 if self.window_left is None else (stands - self.window_left).clip(0, keys)
        end = stands * 0 + keys
        if self.window_right is not None:
            end = (stands + self.window_right + 1).clip(self.prefix, None).clip(0, keys)
        return first, end

    def visible_pairs(self, queries: int, keys: int) -> int:
        """(query, key) pairs that are seen."""
        offset = keys - queries
        before_end = queries * keys
        if self.window_right is not None:
            before_end = _clamped_sum(queries, offset + 1 + self.window_right, min(self.prefix, keys), keys)
        before_begin = 0 if self.window_left is None else _clamped_sum(queries, offset - self.window_left, 0, keys)
        return before_end - before_begin

    def visible_keys(self, queries: int, keys: int) -> int:
        """Keys that at least one query sees."""
        if queries == 0:
            return 0
        begin = 0 if self.window_left is None else max(0, keys - queries - self.window_left)
        end = keys if self.window_right is None else min(keys, keys + self.window_right)
        return max(0, end - begin)

    def shrunk(self, tile: int, before: tuple[int, int], after: tuple[int, int]) -> Bounds:
        """What takes the place of these where (queries, keys) become fewer, `after`, and tiles have `tile` keys: each bound hides
        keys of some rows if it did, on both sides of an edge of a tile if there is room."""
        (queries, keys), most, half = after, tile + tile // 2, after[0] // 2
        left = self.window_left and min(self.window_left, most)
        right = self.window_right and min(self.window_right, most, max(half, 1))
        if not self.prefix:
            return Bounds(left, right)
        rows = self.prefix - 1 - (before[1] - before[0])  # that see more for it, in a sequence of full length
        prefix = keys - queries + 1 + min(rows, half)
        if rows <= 0:  # it is shorter sequences that do
            prefix = min(self.prefix, keys // 2, max(keys - queries + 1 + half, 1))
        return Bounds(left, right, max(prefix, 1))

    def span(self, first: int, last: int, queries: int, keys: int) -> tuple[int, int]:
        """(first, end) of the keys that rows `first` to `last` see, some of them or all."""
        begin = 0 if self.window_left is None else first + keys - queries - self.window_left
        end = keys if self.window_right is None else max(last + keys - queries + self.window_right + 1, self.prefix)
        return begin if begin > 0 else 0, end if end < keys else keys  # an estimate asks some thousand times

    @property
    def edges(self) -> int:
        """Along how many edges tiles of keys are seen in part."""
        return sum(side is not None for side in (self.window_left, self.window_right))

    @property
    def features(self) -> tuple[float, ...]:
        """Coordinates by which problems are alike: log2 of each field, over the steps by which it may differ."""
        return tuple([log2(value + 1) / 4 if value else 0.0 for value in self])

    @property
    def arguments(self) -> dict[str, object]:
        """What `attention` and its kin take for these."""
        numbers = {name: getattr(self, name) for name in NUMBERS if getattr(self, name)}
        return {"causal": self.window_right == 0, "window": (self.window_left, self.window_right), **numbers}

    @property
    def tokens(self) -> list[str]:
        """What stands for these in a problem's text."""
        tokens = ["causal"] if self.window_right == 0 else []
        if self.window_left is not None:
            tokens.append(f"left{self.window_left}")
        if self.window_right:
            tokens.append(f"right{self.window_right}")
        if self.prefix:
            tokens.append(f"prefix{self.prefix}")
        return tokens


FULL, CAUSAL = Bounds(), Bounds(None, 0)
NUMBERS = Bounds._fields[2:]  # what calls take besides `causal` and `window`: ints of at least 0
# Of each kind, such as models have: what covers are tuned for.
TYPICAL = {"full": (FULL,), "causal": (CAUSAL,), "window": tuple([Bounds(left, 0) for left in (127, 511, 1023, 4095)]),
           "prefix": tuple([Bounds(None, 0, prefix) for prefix in (256, 1024, 577)])}


def telling(kind: str, keys: int) -> Bounds:
    """Bounds of a kind that hide and show some of about so many keys: for checks."""
    return Bounds(None, 0, max(keys * 2 // 3, 1)) if kind == "prefix" else TYPICAL[kind][0]


def _clamped_sum(rows: int, start: int, least: int, most: int) -> int:
    """sum over i in [0, rows) of clamp(start + i, least, most), in closed form."""
    low = min(max(0, least - start), rows)  # rows before this one contribute `least`
    high = min(max(low, most - start), rows)  # rows from this one on contribute `most`
    ramp = high - low
    return low * least + ramp * (start + low) + ramp * (ramp - 1) // 2 + (rows - high) * most
