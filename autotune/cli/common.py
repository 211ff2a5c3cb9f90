"""What several commands share: their arguments, and which problems and GPU they mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..core.gpu import Gpu, GpuError, by_name, detect
from ..core.problem import EXAMPLE, Problem
from ..core.reading import printable

EVERY_MODEL = "all"
STAND_IN = "nvidia-h200"  # the catalogue's GPU that commands take where there is none: its records are the ones that ship


class UsageError(ValueError):
    """Arguments that parse but cannot be meant, with a sentence that says what is allowed."""


def add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("problem", metavar="PROBLEM", help=f"what to compute, such as {EXAMPLE}")


def add_problems(parser: argparse.ArgumentParser) -> None:
    """Positional problems, and those of models and workloads; `problems_of` reads them."""
    parser.add_argument("problem", metavar="PROBLEM", nargs="*", help=f"what to compute, such as {EXAMPLE}")
    add_lists(parser)


def add_lists(parser) -> None:
    """--model, --model-config and --workload."""
    parser.add_argument("--model", metavar="NAME", help="every problem of a model, such as llama-3-8b, or of all models: all")
    parser.add_argument("--model-config", metavar="PATH", type=Path,
                        help="every problem of the model whose Hugging Face config.json this is")
    parser.add_argument("--workload", metavar="FILE", type=Path, help="every problem of a YAML file, such as "
                        "benchmarks/forward-h200.yaml")


def add_decode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decode", action="store_true", help="with a model: its decode steps, new tokens over dense, paged and "
                        "8-bit caches at several batch sizes and lengths, instead of prompts")


def add_backward(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backward", action="store_true", help="with a model: the gradients of its prompts, as in training, "
                        "instead of the prompts")


def add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME",
                        help="a GPU of the catalogue (`autotune gpus` lists them); the default is the GPU at hand")


def problems_of(args: argparse.Namespace, decode: bool = False, backward: bool = False,
                models: list | None = None) -> list[Problem]:
    """The problems that `args` name, each once, in the order given. `decode` takes models' decode steps, `backward` the gradients
    of their prompts, not the prompts.

    `models` are `models_of(args)` where the caller has shown them; else what is left out of them is said on stderr.
    Raises `ProblemError`, `ModelError`, `WorkloadError`, or `UsageError` if there is none.
    """
    problems = [Problem.parse(text) for text in args.problem or ()]
    if models is None:
        models = models_of(args)
        for model in models:
            for sentence in model.left_out:
                print(printable(f"{model.source}: {sentence}"), file=sys.stderr)
    if (decode or backward) and not models:
        raise UsageError(f"--{'decode' if decode else 'backward'} needs a model, such as --model llama-3-8b")
    if decode and backward:
        raise UsageError("--decode and --backward name different problems; give one of them")
    kind = "decode_problems" if decode else "training_problems" if backward else "problems"
    problems += [problem for model in models for problem in getattr(model, kind)]
    if decode and not any(model.decode_problems for model in models):
        raise UsageError(f"--decode: {models[0].title} {_why_no_decode(models[0])}")
    if workload := workload_of(args):
        problems += workload.problems
    if not problems:
        raise UsageError(f"name at least one problem, such as {EXAMPLE}, or a model, such as --model llama-3-8b")
    return list(dict.fromkeys(problems))


def _why_no_decode(model) -> str:
    if not any(layers.kind.causal for layers in model.attention):
        return "is not causal: it reads whole texts and decodes nothing"
    if any(layers.kind.compressed for layers in model.attention):
        return "decodes over compressed keys, which no kernel here computes"
    return "has keys and values of different head dims in its cache, which no kernel here computes"


def as_called(problems: list[Problem], gpu: Gpu) -> list[Problem]:
    """`problems` as calls on `gpu` compute them, each once. Says on stderr which are others than were asked for."""
    from .. import kernels

    called = {problem: kernels.as_called(problem, gpu) for problem in problems}
    for problem, other in called.items():
        if other != problem:
            print(f"no decode kernel serves {problem}; a call computes it as {other}", file=sys.stderr)
    return list(dict.fromkeys(called.values()))


def workload_of(args: argparse.Namespace):
    """The workload that --workload names, or None. It is read once, as a pipe can be."""
    if args.workload is None:
        return None
    from ..models.lists import Workload, read_workload

    if not isinstance(args.workload, Workload):
        args.workload = read_workload(args.workload)
    return args.workload


def models_of(args: argparse.Namespace) -> list:
    """The models that --model and --model-config name. Raises `ModelError`."""
    models = []
    if args.model:
        from ..models.catalogue import by_name as model_by_name, catalogue

        models += catalogue().values() if args.model == EVERY_MODEL else [model_by_name(args.model)]
    if args.model_config:
        from ..models.hf import read_config

        models.append(read_config(args.model_config))
    return models


def gpu_or_stand_in(name: str | None) -> tuple[Gpu, bool]:
    """(the GPU called `name` or the one at hand, whether it is at hand). With neither, the stand-in, and says so."""
    try:
        here, reason = detect(), None
    except GpuError as error:
        here, reason = None, error
    if name is not None:
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
