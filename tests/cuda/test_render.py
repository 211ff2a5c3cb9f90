"""Rendered sources: what they must not contain, and that every legal config renders."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import drawn

from autotune.core.gpu import by_name
from autotune.kernels import KERNELS, candidates
from autotune.core.problem import Problem
from autotune.cuda.render import TEMPLATES, render

H200 = by_name("nvidia-h200")
CASES = {
    "forward_simt": "forward-fp32-b1-h2x1-q70-k131-d40-causal",
    "forward_mma": "forward-bf16-b1-h64x8-q8192-k8192-d64-causal-left127-sinks",
    "forward_wgmma": "forward-fp16-b1-h16x8-q8192-k8192-d128-softcap50",
}
FORWARD = [name for name, kernel in KERNELS.items() if name.startswith("forward")]
MAX_KERNEL_LINES, MAX_TEMPLATE_LINES = 150, 250


def rendered(name: str, text: str) -> str:
    problem, kernel = Problem.parse(text), KERNELS[name]
    return render(problem.static, kernel.default(problem, H200), kernel.target(H200))


@pytest.mark.parametrize("name", FORWARD)
def test_a_feature_that_a_problem_lacks_leaves_no_trace(name):
    plain = rendered(name, "forward-fp16-b1-h2x1-q512-k512-d64").lower()
    for token in ("softcap", "tanh", "alibi", "window and", "paged", "cu_seqlens", "causal:"):
        assert token not in plain, token
    assert "cap_scores" in rendered(name, "forward-fp16-b1-h2x1-q512-k512-d64-softcap30") or name == "forward_simt"
    assert "softcap_scale" in rendered(name, "forward-fp16-b1-h2x1-q512-k512-d64-softcap30")
    assert "alibi_slopes" in rendered(name, "forward-fp16-b1-h2x1-q512-k512-d64-alibi")


@pytest.mark.parametrize("name", CASES)
def test_a_source_is_self_contained_and_ends_with_the_kernel(name):
    source = rendered(name, CASES[name])
    assert "#include" not in source and "//%" not in source and "${" not in source
    head, kernel = source.split('extern "C" __global__')
    assert name in kernel.split("{")[0] and source.count('extern "C"') == 1
    assert kernel.rstrip().endswith("}") and len(kernel.splitlines()) <= MAX_KERNEL_LINES
    assert len(re.findall(r"extern __shared__", source)) == 1 and not re.search(r"^\s*__shared__", source, re.M)


def test_templates_stay_short():
    for path in TEMPLATES.rglob("*.*"):
        assert len(path.read_text().splitlines()) <= MAX_TEMPLATE_LINES, path


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_legal_config_renders_the_same_twice(data):
    mask = data.draw(st.sampled_from(["", "-causal", "-causal-left100", "-left3-right5"]))
    scores = data.draw(st.sampled_from(["", "-softcap30", "-alibi", "-softcap30-alibi"]))
    head_dim = data.draw(st.sampled_from([16, 40, 64, 96, 128, 192, 256]))
    problem = Problem.parse(f"forward-bf16-b1-h8x2-q300-k300-d{head_dim}{mask}{scores}")
    kernel = data.draw(st.sampled_from(candidates(problem, H200)))
    config = drawn(kernel, problem.static, H200, data.draw(st.randoms()))
    source = render(problem.static, config, kernel.target(H200))
    assert source == render(problem.static, config, kernel.target(H200))
    for type_, constant, value in kernel.constants(problem.static, config):
        assert f"constexpr {type_} {constant} = {str(value).lower() if isinstance(value, bool) else value};" in source
