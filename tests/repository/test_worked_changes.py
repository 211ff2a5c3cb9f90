"""docs/adding-a-feature.md, executed: each change does what the page says, in as many files as it says."""

from __future__ import annotations

import re
import tokenize
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from fake_arrays import fake_gpu  # noqa: F401 (a fixture)
from test_docs import blocks

import autotune
from autotune import kernels
from autotune.core import gpu as gpus
from autotune.core.problem import Problem

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-a-feature.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_a_value_of_a_parameter_is_one_line():
    patch, = blocks(PAGE, "diff")
    name, removed, added = (re.search(rf"^{re.escape(mark)} ?(.*)$", patch, flags=re.M)[1]
                            for mark in ("---", "-       ", "+       "))
    source = (ROOT / name).read_text(encoding="utf-8")
    assert source.count(removed) == 1
    module = ModuleType("autotune.kernels.forward.wgmma")
    module.__package__ = "autotune.kernels.forward"
    exec(compile(source.replace(removed, added), name, "exec"), module.__dict__)
    kernel = next(value() for value in vars(module).values() if getattr(value, "name", "") == "forward_wgmma")
    before = kernels.KERNELS["forward_wgmma"]
    problem, gpu = Problem.parse("forward-bf16-b1-h8x8-q4096-k4096-d64-causal"), gpus.by_name("nvidia-h200")
    values = {**before.default(problem, gpu).values, "num_stages": 5, "block_n": 64, "num_warpgroups": 2}
    config = kernel.config(problem.static, values)
    assert kernel.illegal(problem.static, config, gpu) is None and kernel.typed_config(config.values, "here") == config
    with pytest.raises(ValueError, match="num_stages is 5"):
        before.typed_config(config.values, "here")


def product_files_that_name(word: str) -> set[str]:
    """Files of the product in which `word` is a name."""
    templates = (ROOT / "templates").rglob("*.cu*")
    found = {str(path.relative_to(ROOT)) for path in templates if re.search(rf"\b{word}\b", path.read_text())}
    for folder in ("autotune", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            with path.open("rb") as file:
                tokens = [token for token in tokenize.tokenize(file.readline)
                          if token.type in (tokenize.NAME, tokenize.OP, tokenize.STRING)]
            named = any(a.string == word and not (b.string == "=" and c.type == tokenize.STRING)  # tempfile has such an argument
                        for a, b, c in zip(tokens, tokens[1:], tokens[2:]))
            found |= {str(path.relative_to(ROOT))} if named else set()
    return found


def test_a_mask_stands_in_the_files_that_the_page_lists():
    section = TEXT.partition("## A mask")[2].partition("## A forward")[0]
    listed = re.findall(r"`((?:autotune|templates)/[\w/]+\.(?:py|cuh))`", section)
    assert len(listed) == 8 and product_files_that_name("prefix") == set(listed)
    line, = (block.strip() for block in blocks(PAGE, "cuda"))
    assert line in (ROOT / listed[0]).read_text() and blocks(PAGE, "python")[0].strip() in (ROOT / listed[3]).read_text()


def test_a_mask_that_is_ignored_is_found(capsys):
    from autotune.cuda.compile import CompilerMissing

    try:
        exec(blocks(PAGE, "python")[1], {})
    except CompilerMissing as error:
        pytest.skip(str(error))
    assert re.search(r"causal-prefix\d+ True False out is wrong", capsys.readouterr().out)


def test_a_forward_kernel_is_two_files():
    assert (ROOT / "docs" / "adding-a-kernel.md").is_file() and (ROOT / "tests" / "kernels" / "test_worked_example.py").is_file()


def test_a_gpu_is_an_entry_of_the_catalogue(monkeypatch):
    entry = yaml.safe_load(blocks(PAGE, "yaml")[0])
    whole = yaml.safe_load((ROOT / "autotune" / "core" / "gpus.yaml").read_text())
    name, = entry.keys() - whole["gpus"].keys()
    monkeypatch.setattr(gpus, "_catalogue_file", lambda: {**whole, "gpus": {**whole["gpus"], **entry}})
    gpus.catalogue.cache_clear()
    try:
        problem = "forward-bf16-b1-h32x8-q8192-k8192-d128-causal"
        match = autotune.lookup(problem, name)
        assert match.gpu.sms == 78 and match.tier in ("same_arch", "default")
        assert "forward_wgmma" in autotune.source(problem, gpu=name)
    finally:
        gpus.catalogue.cache_clear()


def test_why_is_a_command():
    from autotune.cli.main import COMMANDS

    # test_docs.py runs it, tests/tuner/test_tuner_insight.py reads what it says
    assert "why" in COMMANDS and "`autotune why PROBLEM`" in TEXT
