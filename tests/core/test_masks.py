"""Which keys a mask lets queries see, in every form in which it is asked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.masks import COUNTED, KINDS, TYPICAL, Bounds, telling
from autotune.core.problem import Problem
from autotune.cuda.render import TEMPLATES

sides = st.one_of(st.none(), st.integers(0, 40))
fields = st.one_of(st.tuples(sides, sides), st.tuples(st.none(), st.just(0), st.integers(0, 40)))
masks = fields.map(lambda values: Bounds(*values))
sizes = st.integers(0, 30)


def seen(bounds, queries, keys):
    """The keys that each query sees, by definition."""
    def sees(i, j):
        c = i + keys - queries
        left, right = bounds.window_left, bounds.window_right
        return j < bounds.prefix or (left is None or j >= c - left) and (right is None or j <= c + right)

    return [{j for j in range(keys) if sees(i, j)} for i in range(queries)]


@given(masks, sizes, sizes)
def test_all_forms_agree_with_the_definition(bounds, queries, keys):
    each = seen(bounds, queries, keys)
    assert bounds.wrong() is None
    assert bounds.visible_pairs(queries, keys) == sum(map(len, each))
    first, end = bounds.visible(np.arange(queries), queries, keys)
    assert [set(range(a, b)) for a, b in zip(first, end)] == each
    assert bounds.visible_keys(queries, keys) >= len(set().union(*each))
    left, right, prefix = bounds
    if prefix or left is None or right is None or left + right >= 0 and keys >= queries:
        assert bounds.visible_keys(queries, keys) == len(set().union(*each))


@given(masks, st.integers(1, 30), st.integers(1, 30))
def test_what_is_left_out_hides_nothing(bounds, queries, keys):
    simple = bounds.simplified(queries, keys)
    assert seen(simple, queries, keys) == seen(bounds, queries, keys) and simple.simplified(queries, keys) == simple
    for length in {1, keys, 2 * keys}:  # any number of keys, if it is not known
        assert seen(bounds.simplified(queries, None), queries, length) == seen(bounds, queries, length)


@given(masks)
def test_a_mask_stands_in_a_problem_and_its_text(bounds):
    problem = Problem(seqlen_q=20, seqlen_k=30, **bounds._asdict())
    assert problem.bounds == bounds and Problem.parse(problem.text) == problem
    assert problem.static.mask == bounds.kind in KINDS


def test_every_field_and_kind_is_known_everywhere():
    assert set(COUNTED.values()) == set(Bounds._fields) <= set(Problem.__dataclass_fields__)
    assert TYPICAL.keys() == KINDS.keys() and all(each.kind == kind for kind, those in TYPICAL.items() for each in those)
    assert all(telling(kind, keys).kind == kind for kind in KINDS for keys in (0, 1, 64, 5000))
    for folder in ("lib/masks", "lib/masks/packed", "backward/queries"):
        assert {path.stem for path in (TEMPLATES / folder).glob("*.cuh")} == KINDS.keys()
    assert all(names.keys() <= set(Bounds._fields) for names in KINDS.values())
