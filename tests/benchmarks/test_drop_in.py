"""benchmarks/drop_in.py: one step that fails, dies or hangs does not lose the others; its steps run on a model that is tiny."""

from pathlib import Path

import pytest
import yaml

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import drop_in  # noqa: E402
import drop_in_steps  # noqa: E402
from drop_in_work import work  # noqa: E402
from torch_gpu import fake_torch_gpu  # noqa: E402, F401

pytestmark = pytest.mark.slow


def test_a_step_that_dies_or_hangs_costs_one_line():
    names = ["first", "raises", "dies", "spoils", "hangs", "last"]
    found = dict(drop_in.results(names, 100, work, most_seconds=5))
    assert list(found) == names and all("took_s" in result for result in found.values())
    assert {name: result.get("answer") for name, result in found.items() if "failed" not in result} == {
        name: name for name in ("first", "spoils", "last")}
    assert "ended with 9" in found["dies"]["failed"] and "stopped after 5 s" in found["hangs"]["failed"]


def test_what_was_not_begun_says_so():
    assert dict(drop_in.results(["a", "b"], 0)) == {name: {"failed": "not begun: 0 s had passed"} for name in "ab"}


def test_an_error_is_told_without_paths():
    try:
        Path("/nowhere/at/all").stat()
    except OSError as error:
        first, *frames = drop_in.said(error)
    assert first.startswith("FileNotFoundError") and frames and not any("/" in frame for frame in frames)
    assert frames[0].startswith("test_drop_in.py:")


def test_summary_counts_what_is_there():
    steps = {"model.a": {"right": True}, "model.b": {"failed": "x"}, "graphs": {"graph_breaks": 0, "recompiles": 0},
             "static": {"graph_breaks": 0, "recompiles": 1}, "host": {"eager_us": 9.5, "compiled_us": 11.0, "sdpa_us": 15.0}}
    assert drop_in.summary(steps) == {"models": 2, "right": 1, "graph_breaks": 0, "recompiles": 1, "host_us_eager": 9.5,
                                      "host_us_compiled": 11.0, "sdpa_us": 15.0, "failed": ["model.b"]}
    assert drop_in.summary({})["graph_breaks"] == -1


@pytest.fixture(name="tiny")
def small_models_on_the_host(monkeypatch, torch_gpu):
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=97,
                 max_position_embeddings=256)
    for name, value in dict(DEVICE="cpu", ROWS=16, PADS=3, PROMPTS=2, PROMPT=10, NEW=2,
                            CONFIGS={"llama-3-8b": (transformers.LlamaConfig, sizes)},
                            LAYERS={**drop_in_steps.LAYERS, "num_hidden_layers": 1},
                            median_ms=lambda call, times=10: call() and 1.0 or 1.0, timed_s=lambda call: (call(), 0.5)).items():
        monkeypatch.setattr(drop_in_steps, name, value)
    drop_in_steps.prepare()
    return torch_gpu


@pytest.mark.parametrize("name", ["model.llama-3-8b", "decode", "generate"])
def test_steps_run(tiny, name):
    result = {}
    drop_in_steps.run(name, result)
    assert tiny.calls and yaml.safe_dump(result)
    if name == "model.llama-3-8b":
        assert result["right"] and result["attention_share"] == 0.0
    if name == "generate":
        ours = result["autotune_static"]
        assert ours["tokens"] == 4 and ours["tokens_per_s"] == 8 and ours["worst_gap"] < 0.1
