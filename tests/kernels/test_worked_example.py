"""The kernel of docs/adding-a-kernel.md, as it stands on the page: it compiles, its rules hold, the simulator finds it right."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from autotune.cuda import compile, render
from autotune import kernels
from autotune.core.gpu import by_name
from autotune.core.problem import Problem

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-kernel.md"
GPUS = [by_name(name) for name in ("nvidia-h200", "tesla-t4")]


def block_after(heading: str) -> str:
    """The fenced block that follows the line that names a file."""
    return re.search(rf"^`{re.escape(heading)}`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)[1]


@pytest.fixture
def lane(tmp_path, monkeypatch):
    """The kernel of the page, registered, in a copy of templates/."""
    templates = shutil.copytree(render.TEMPLATES, tmp_path / "templates")
    (templates / "forward_lane").mkdir()
    (templates / "forward_lane" / "kernel.cu.j2").write_text(block_after("templates/forward_lane/kernel.cu.j2"))
    module = ModuleType("autotune.kernels.forward.lane")
    module.__package__ = "autotune.kernels.forward"
    exec(block_after("autotune/kernels/forward/lane.py"), module.__dict__)
    monkeypatch.setattr(render, "TEMPLATES", templates)
    render._environment.cache_clear()
    monkeypatch.setitem(kernels.KERNELS, "forward_lane", module.ForwardLane())
    yield kernels.KERNELS["forward_lane"]
    render._environment.cache_clear()


@pytest.mark.parametrize("text", ["forward-bf16-b1-h4x2-q100-k130-d64-causal", "forward-fp32-b1-h1x1-q9-k9-d40x128",
                                  "forward-fp16-b2-h4x1-q70-k60-d32-left20-right5-sinks"])
def test_the_default_is_legal_and_compiles_without_spills(lane, text):
    problem = Problem.parse(text)
    for gpu in GPUS:
        if gpu.arch < 80 and problem.dtype == "bf16":
            continue
        config = lane.default(problem, gpu)
        assert lane.reject(problem, gpu) is None and lane.illegal(problem.static, config, gpu) is None
        assert config in lane.space(problem, gpu) and lane.estimate_us(problem, config, gpu, 128) > 0
        binary = compile.build(problem.static, config, gpu)
        assert compile.flaw(binary) is None and "forward_lane" in binary.entries


def test_it_says_what_it_cannot_serve(lane):
    assert "at most 128" in lane.reject(Problem.parse("forward-bf16-b1-h4x2-q100-k130-d192"), GPUS[0])
    assert "softcap" in lane.reject(Problem.parse("forward-bf16-b1-h4x2-q100-k130-d64-softcap30"), GPUS[0])


@pytest.mark.parametrize("text", ["forward-fp16-b1-h2x1-q40-k70-d32-causal-left20-sinks", "forward-bf16-b2-h1x1-q65-k33-d16x24"])
def test_it_is_right_on_the_simulator(lane, text):
    from autotune.cuda.compile import CompilerMissing
    from autotune.simulator import verify

    problem = Problem.parse(text)
    try:
        verdict = verify(problem, lane.default(problem, GPUS[0]))
    except CompilerMissing as error:
        pytest.skip(str(error))
    assert verdict.ok, verdict.message
