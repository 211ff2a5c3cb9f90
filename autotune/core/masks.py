"""Which keys a query sees: `Bounds`, and all that follows from them. The one place to read, and to change for another mask.

A mask lets every query see one interval of keys. Query i of Sq stands at key i + Sk - Sq of Sk, so the last query at the last key.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

MAX_LENGTH = 2**30  # indices of keys, and their sums with a window's bounds, are 32-bit on the device

# Kinds, of which each is compiled in: a kind's header is masks/<kind>.cuh. Params of a kind also have these numbers of its `Bounds`,
# which may differ from call to call; a window's sides are in the Params of all.
KINDS: dict[str, dict[str, str]] = {"full": {}, "causal": {}, "window": {}}

COUNTED = {"left": "window_left", "right": "window_right"}  # how a problem's text says a field: left4095


class Bounds(NamedTuple):
    """What a mask hides. A query that stands at key c sees the keys from c - window_left to c + window_right; None is no bound. Causal
    is window_right = 0, so it is no field of its own."""

    window_left: int | None = None
    window_right: int | None = None

    @property
    def kind(self) -> str:
        if self.window_left is None and self.window_right is None:
            return "full"
        return "causal" if self.window_left is None and self.window_right == 0 else "window"

    def wrong(self) -> str | None:
        """What of these no mask can have, as a sentence, or None."""
        for name in ("window_left", "window_right"):
            value = getattr(self, name)
            if not (value is None or type(value) is int and 0 <= value <= MAX_LENGTH):
                return f"{name} is {value!r}; it must be None (unbounded) or an int from 0 to {MAX_LENGTH}"
        return None

    def simplified(self, queries: int, keys: int | None) -> Bounds:
        """Without what hides nothing of so many queries and keys, so that a cheaper kernel can serve; None: the number of keys is not
        known. The last query sees keys up to keys - 1 + right, the first one from keys - queries - left."""
        left, right = self.window_left, self.window_right
        if left is None and right is None:
            return FULL
        if left is not None and keys is not None and left >= keys - 1:
            left = None
        if right is not None and right >= queries - 1:
            right = None
        if left is None and right is None:
            return FULL
        return self if left == self.window_left and right == self.window_right else Bounds(left, right)

    def bucketed(self) -> Bounds:
        """What stands for these where a config is chosen. A window's sides stay: a model has few."""
        return self

    def visible(self, rows, queries, keys):
        """(first, end): row i sees the keys first[i] <= j < end[i] of so many. `rows` is an int64 array of numpy or cupy; `queries` and
        `keys` are ints or arrays of shapes that go with it."""
        stands = rows + (keys - queries)
        first = stands * 0 if self.window_left is None else (stands - self.window_left).clip(0, keys)
        end = stands * 0 + keys if self.window_right is None else (stands + self.window_right + 1).clip(0, keys)
        return first, end

    def visible_pairs(self, queries: int, keys: int) -> int:
        """(query, key) pairs that are seen."""
        offset = keys - queries
        before_end = queries * keys if self.window_right is None else _clamped_sum(queries, offset + 1 + self.window_right, 0, keys)
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
        """What takes the place of these where (queries, keys) become fewer, `after`, and tiles have `tile` keys: each bound hides keys
        of some rows if it did, on both sides of an edge of a tile if there is room."""
        left, right, most = self.window_left, self.window_right, tile + tile // 2
        return Bounds(left and min(left, most), right and min(right, most, max(after[0] // 2, 1)))

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
        return {"causal": self.window_right == 0, "window": (self.window_left, self.window_right)}

    @property
    def tokens(self) -> list[str]:
        """What stands for these in a problem's text."""
        tokens = ["causal"] if self.window_right == 0 else []
        if self.window_left is not None:
            tokens.append(f"left{self.window_left}")
        if self.window_right:
            tokens.append(f"right{self.window_right}")
        return tokens


FULL, CAUSAL = Bounds(), Bounds(None, 0)
NUMBERS = Bounds._fields[2:]  # what calls take besides `causal` and `window`: ints of at least 0
# Of each kind, such as models have: what covers are tuned for.
TYPICAL = {"full": (FULL,), "causal": (CAUSAL,), "window": tuple([Bounds(left, 0) for left in (127, 511, 1023, 4095)])}


def telling(kind: str, keys: int) -> Bounds:
    """Bounds of a kind that hide and show some of about so many keys: for checks."""
    return TYPICAL[kind][0]


def _clamped_sum(rows: int, start: int, least: int, most: int) -> int:
    """sum over i in [0, rows) of clamp(start + i, least, most), in closed form."""
    low = min(max(0, least - start), rows)  # rows before this one contribute `least`
    high = min(max(low, most - start), rows)  # rows from this one on contribute `most`
    ramp = high - low
    return low * least + ramp * (start + low) + ramp * (ramp - 1) // 2 + (rows - high) * most
