"""A picture of times in TFLOP/s: a group of bars for each problem, a bar for each library. Needs the extra `plot` (matplotlib).

    python -m autotune.compare.plot benchmarks/results/forward-h200.yaml docs/forward-h200.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Mapping

from .comparison import OURS, BenchError, Report
from ..core.problem import Problem

COLOURS = {OURS: "#1b6ca8", "sdpa-flash": "#b9b9b9", "sdpa-cudnn": "#8a8a8a", "fa3": "#d8a34a", "fa4": "#c0603a"}

Bars = Mapping[Problem, Mapping[str, float]]  # problem -> library -> TFLOP/s


def require() -> None:
    """Raises `BenchError` if matplotlib cannot be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchError(f"a plot needs matplotlib, which cannot be imported ({error}); pip install matplotlib") from None


def bars_of(report: Report) -> Bars:
    """The report's rows, with or without peers."""
    return {row.problem: {name: row.problem.flops / timing.time_us * 1e-6
                          for name, timing in {OURS: row.ours, **row.peers}.items()} for row in report.rows}


def bars_in(path: Path) -> tuple[Bars, str]:
    """(bars, title) of a result that `autotune bench --out` wrote. Raises `BenchError` if the file is none."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        bars = {Problem.parse(text): {name: entry["tflops"] for name, entry in row.items()
                                      if isinstance(entry, dict) and "tflops" in entry}
                for text, row in data["problems"].items()}
        return bars, f"{data['gpu']}, {data['date'][:10]}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise BenchError(f"{path} is not a result of `autotune bench --out`: {' '.join(str(error).split())}") from None


def plot(bars: Bars, title: str, path: Path) -> None:
    """Draws `bars` into `path`; its suffix is the format. The same bars give the same file."""
    require()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in bars.values() for name in row))
    height = 0.8 / len(names)
    with rc_context({"svg.hashsalt": "autotune", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(9, 1 + 0.16 * len(bars) * (len(names) + 1)), layout="constrained")
        axes = figure.subplots()
        for n, name in enumerate(names):
            places = [i + n * height for i, row in enumerate(bars.values()) if name in row]
            values = [row[name] for row in bars.values() if name in row]
            axes.barh(places, values, height, label=name, color=COLOURS.get(name))
        axes.set_yticks([i + 0.4 - height / 2 for i in range(len(bars))], [_label(problem) for problem in bars])
        axes.invert_yaxis()
        axes.set_xlabel("TFLOP/s, masked pairs not counted (longer is faster)")
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise BenchError(f"{path} cannot be drawn: {error.strerror}") from None


def _label(problem: Problem) -> str:
    return problem.text.removeprefix(f"{problem.op}-").replace("-", " ")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m autotune.compare.plot RESULT.yaml PICTURE.svg")
    try:
        plot(*bars_in(Path(sys.argv[1])), Path(sys.argv[2]))
    except BenchError as error:
        sys.exit(str(error))
