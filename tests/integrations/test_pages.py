"""The Python of the pages about frameworks runs, with tensors of a GPU that torch's CPU tensors stand for."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch_gpu import fake_torch_gpu  # noqa: E402, F401

from autotune.integrations import sdpa  # noqa: E402

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


def run(page: str) -> dict:
    """Runs every block of Python on a page; the names that are left."""
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), flags=re.M | re.S):
        exec(block.replace('"cuda"', '"cpu"'), names)
    assert names
    return names


def test_torch(torch_gpu, monkeypatch):
    monkeypatch.setattr(sdpa.override, "__defaults__", ("CPU",))
    names = run("torch.md")
    assert torch.equal(names["eager"], names["compiled"]) and len(torch_gpu.calls) == 2


def test_transformers(torch_gpu):
    assert run("transformers.md")["text"].shape == (2, 16) and torch_gpu.calls


def test_vllm(torch_gpu):
    names = run("vllm.md")
    assert names["out"].shape == (3, 32, 64) and names["out"].isfinite().all()
    assert torch.equal(names["pages_k"][2, :2], names["new_k"][:2]) and torch.equal(names["pages_v"][5, 0], names["new_v"][2])


def test_flash_attn(torch_gpu):
    names = run("flash-attn.md")
    assert names["out"].shape == (2, 64, 8, 64) and names["step"].shape == (2, 1, 8, 64)
    assert torch.equal(names["cache_k"][0, 40], names["k"][0, 0]) and torch.equal(names["cache_v"][1, 7], names["v"][1, 0])


def test_sglang(torch_gpu):
    names = run("sglang.md")
    assert names["out"].shape == (40, 32, 64) and names["out"].isfinite().all() and torch_gpu.calls[-1]["kernel"] == "decode_mma"
