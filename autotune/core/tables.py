"""Text tables and numbers for people."""

from __future__ import annotations

from typing import Iterable, Sequence

from .problem import Problem


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns of text, the first left-aligned, numbers right-aligned, two spaces apart."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    numeric = [all(_is_number(row[i]) for row in cells) and bool(cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.rjust(w) if n else cell.ljust(w) for cell, w, n in zip(row, widths, numeric)).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, cells)])


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.replace(".", "", 1).replace(",", "").rstrip("x%").isdigit()


def microseconds(time_us: float | None) -> str:
    """A time in microseconds with three significant digits or more, or ``-``."""
    if time_us is None:
        return "-"
    return f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.1f}" if time_us >= 10 else f"{time_us:.2f}"


def tflops(problem: Problem, time_us: float | None) -> str:
    """TFLOP/s of `problem` in `time_us`, masked pairs not counted, or ``-``."""
    return f"{problem.flops / time_us * 1e-6:.0f}" if time_us else "-"
