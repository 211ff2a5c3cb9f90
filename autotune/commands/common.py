"""What several commands share: their arguments, and which problems and GPU they mean."""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

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
