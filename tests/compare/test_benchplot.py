"""Pictures of bench results. Those that need matplotlib are skipped where it is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_bench import CAUSAL, WINDOW, report, row

from autotune.compare import plot as benchplot, report as benchreport
from autotune.compare.comparison import BenchError

ROOT = Path(__file__).parents[2]


def test_bars_of_a_report_and_of_its_file_are_the_same(tmp_path):
    result = report(row(CAUSAL, 1000.0, fa3=900.0, fa4=1100.0), row(WINDOW, 50.0, fa4=60.0))
    benchreport.write(result, tmp_path / "result.yaml")
    bars, title = benchplot.bars_in(tmp_path / "result.yaml")
    assert title == "nvidia-h200, 2026-01-31" and list(bars) == [CAUSAL, WINDOW]
    for problem, values in benchplot.bars_of(result).items():
        assert bars[problem] == pytest.approx(values, rel=1e-3)
    assert list(bars[CAUSAL]) == ["autotune", "fa3", "fa4"] and list(bars[WINDOW]) == ["autotune", "fa4"]


@pytest.mark.parametrize("text", ["[1]", "problems: {llama: {}}", "problems: {}", "{", "problems: 3"])
def test_a_file_that_is_no_result_is_one_sentence(tmp_path, text):
    (tmp_path / "result.yaml").write_text(text)
    with pytest.raises(BenchError, match="is not a result of `autotune bench --out`"):
        benchplot.bars_in(tmp_path / "result.yaml")


def test_without_matplotlib_what_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match="pip install matplotlib"):
        benchplot.require()


@pytest.mark.parametrize("suffix, begin", [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_picture(tmp_path, suffix, begin):
    pytest.importorskip("matplotlib")
    bars = benchplot.bars_of(report(row(CAUSAL, 1000.0, fa3=900.0, fa4=1100.0), row(WINDOW, 50.0)))
    path = tmp_path / f"picture{suffix}"
    benchplot.plot(bars, "a title", path)
    first = path.read_bytes()
    assert first.startswith(begin)
    if suffix == ".svg":
        benchplot.plot(bars, "a title", path)
        assert path.read_bytes() == first and b"d128 causal" in first.replace(b"-", b" ")
    with pytest.raises(BenchError, match="cannot be drawn"):
        benchplot.plot(bars, "a title", tmp_path / "missing" / path.name)


def test_the_committed_results_can_be_drawn():
    for path in (ROOT / "benchmarks" / "results").glob("forward-*.yaml"):
        assert benchplot.bars_in(path)[0]


def test_the_module_says_how_it_is_used():
    done = subprocess.run([sys.executable, "-m", "autotune.compare.plot"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and "usage: python -m autotune.compare.plot RESULT.yaml PICTURE.svg" in done.stderr
