"""What several commands share: their arguments, which GPU they mean, tables."""

from __future__ import annotations

import argparse
import sys
from typing import Iterable, Sequence

from ..gpu import Gpu, GpuError, by_name, detect
from ..problem import EXAMPLE, Problem

STAND_IN = "nvidia-h200"  # the catalogue's GPU that commands take where there is none: its records are the ones that ship


class UsageError(ValueError):
    """Arguments that parse but cannot be meant, with a sentence that says what is allowed."""


def add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="PROBLEM", help=f"what to compute, such as {EXAMPLE}")


def add_problems(parser: argparse.ArgumentParser) -> None:
    """Positional problems or --model; `problems_of` reads them."""
    parser.add_argument("problem", metavar="PROBLEM", nargs="*", help=f"what to compute, such as {EXAMPLE}")
    parser.add_argument("--model", metavar="NAME", help="every problem of a model, such as llama-3-8b")


def add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME",
                        help="a GPU of the catalogue (`autotune gpus` lists them); the default is the GPU at hand")


def problems_of(texts: Sequence[str], model: str | None) -> list[Problem]:
    """The problems that `texts` and `model` name, each once, in the order given.

    Raises `ProblemError`, `ModelError`, or `UsageError` if there is none.
    """
    problems = [Problem.parse(text) for text in texts]
    if model:
        from ..models import problems_of_model

        problems += problems_of_model(model)
    if not problems:
        raise UsageError(f"name at least one problem, such as {EXAMPLE}, or a model, such as --model llama-3-8b")
    return list(dict.fromkeys(problems))


def gpu_or_stand_in(name: str | None) -> tuple[Gpu, bool]:
    """(the GPU called `name` or the one at hand, whether it is at hand). With neither, the stand-in, and says so."""
    try:
        here, reason = detect(), None
    except GpuError as error:
        here, reason = None, error
    if name:
        gpu = by_name(name)
        return (here, True) if here and here.identity == gpu.identity else (gpu, False)
    if here:
        return here, True
    gpu = by_name(STAND_IN)
    print(f"{reason}\nTaking the {gpu.title} from the catalogue (--gpu {gpu.name}).", file=sys.stderr)
    return gpu, False


def needed_gpu(why: str) -> Gpu:
    """The GPU at hand. Raises `UsageError` with `why` one is needed if there is none."""
    try:
        return detect()
    except GpuError as error:
        reason = str(error).split(". `nvidia-smi`")[0].removeprefix("no GPU can be used: ")
        raise UsageError(f"{why}, and no GPU can be used here: {reason}. `autotune doctor` says what is missing") from None


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
