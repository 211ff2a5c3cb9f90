"""Decode problems that no decode kernel serves are verified, tuned and timed as a call computes them (G2, issue G part 6)."""

import pytest

from autotune import kernels
from autotune.cli.main import main
from autotune.core.gpu import by_name
from autotune.core.problem import Problem

pytestmark = pytest.mark.slow

H200 = by_name("nvidia-h200")


@pytest.mark.parametrize(
    "text, called",
    [
        ("decode-bf16-b1-h8x1-q1-k4096-d512-causal", "forward-bf16-b1-h8x1-q1-k4096-d512-page4096"),
        ("decode-bf16-b4-h8x1-q3-k4096-d512-causal-page16", "forward-bf16-b4-h8x1-q3-k4096-d512-causal-page16"),
        ("decode-bf16-b4-h8x1-q1-k4096-d512-causal-left127", "forward-bf16-b4-h8x1-q1-k4096-d512-causal-left127-page4096"),
        ("decode-bf16-b1-h8x1-q1-k4096-d128-causal", "decode-bf16-b1-h8x1-q1-k4096-d128"),
        ("forward-bf16-b1-h8x1-q16-k16-d512", "forward-bf16-b1-h8x1-q16-k16-d512"),
    ],
)
def test_g2_a_problem_is_what_a_call_computes(text, called):
    problem = kernels.as_called(Problem.parse(text).simplified(), H200)
    expected = Problem.parse(called)
    assert (problem.op, problem.static.head_dim, problem.kv, problem.page_size, problem.window_left) == (
        expected.op,
        expected.static.head_dim,
        expected.kv,
        expected.page_size,
        expected.window_left,
    )
    assert kernels.candidates(problem, H200) and Problem.parse(problem.text) == problem


def test_g2_a_decode_problem_of_head_dim_512_is_verified(capsys):
    assert main(["verify", "--simulate", "decode-bf16-b1-h4x1-q1-k70-d512", "--gpu", "nvidia-h200"]) == 0
    said = capsys.readouterr()
    assert "a call computes it as forward-bf16" in said.err and "all are correct" in said.out
