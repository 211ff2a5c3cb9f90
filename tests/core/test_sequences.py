"""Lengths of packed sequences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.problem import Problem
from autotune.core.sequences import QUANTILES, spread, typical


@given(st.integers(0, 600), st.integers(0, 10**6))
def test_spread_lengths_fall_from_the_largest(count, longest):
    lengths = spread(count, longest)
    assert len(lengths) == count and lengths == tuple(sorted(lengths, reverse=True))
    assert not count or (lengths[0] == longest and lengths[-1] >= 0)


def test_64_sequences_are_a_tenth_as_long_as_the_longest_on_average():
    lengths = spread(64, 3420)
    assert 450 < sum(lengths) / 64 < 540 and lengths[32] == pytest.approx(3420 / 11, rel=0.1)


def test_the_cost_of_a_packed_problem_is_that_of_its_sequences():
    text = "forward-bf16-b{}-h4x2-q500-k500-d64-causal-left30"
    packed = Problem.parse(text.format(8) + "-varlen")
    singles = [Problem.parse(text.format(1).replace("500", str(length))) for length in spread(8, 500)]
    assert packed.flops == sum(one.flops for one in singles)
    assert packed.compulsory_bytes == sum(one.compulsory_bytes for one in singles)
    assert packed.flops < Problem.parse(text.format(8)).flops / 2


def test_many_sequences_cost_as_much_as_those_that_stand_for_them():
    assert len(typical(10**6, 100, 200)) == QUANTILES
    one, many = (Problem(batch=count * QUANTILES, seqlen_q=100, seqlen_k=300, kv="varlen") for count in (1, 1000))
    assert many.flops == 1000 * one.flops
    assert Problem(batch=0, kv="varlen").flops == 0
