"""benchmarks/neighbours.py: which decode steps it draws, and what it makes of their times. Measuring needs a GPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import neighbours  # noqa: E402

from autotune.core.gpu import by_name  # noqa: E402
from autotune.database.lookup import lookup  # noqa: E402

H200 = by_name("nvidia-h200")


def test_it_draws_steps_without_a_record_of_every_kind_of_cache():
    drawn = neighbours.drawn(H200, 40, 0, 10.0)
    problems = [match.problem for match in drawn]
    assert len(set(problems)) == len(drawn) > 10 and all(match == lookup(match.problem, H200) for match in drawn)
    assert {"near"} <= {match.tier for match in drawn} <= {"near", "default"} and all(p.cache_bytes <= 10e9 for p in problems)
    kinds = [(p.static.kv, p.static.kv_dtype, p.head_dim, match.tier) for p, match in zip(problems, drawn)]
    first = len(set(kinds))
    assert len(set(kinds[:first])) == first > 6  # one of each before the second of any
    assert neighbours.drawn(H200, 5, 0, 10.0) == drawn[:5] != neighbours.drawn(H200, 5, 1, 10.0)


def test_a_step_that_a_search_would_serve_the_same_loses_nothing():
    match = neighbours.drawn(H200, 1, 0, 10.0)[0]
    row = neighbours.row(match, match.config, H200)
    assert row["loss"] == 1.0 and row["tier"] == match.tier and row["served"] == row["found"] == match.config.text


def test_losses_are_averaged_as_ratios():
    rows = [{"loss": 1.0, "expected": 1.1}, {"loss": 1.21, "expected": 1.1}]
    assert neighbours.summary(rows) == {"steps": 2, "loss": 1.1, "worst": 1.21, "expected": 1.1}
