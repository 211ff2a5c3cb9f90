"""All attention that serving a model takes: prompts, packed prompts, decode steps and chunks of prompts, by size.

    problems_of("llama-3-8b"), problems_of(Path("config.json")), problems_of(model), problems_of(model.config)
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Iterable, Mapping

from ..core.problem import Problem
from ..core.sequences import bucket_length
from .catalogue import Model, ModelError, by_name
from .hf import read_config, read_values

BATCHES = tuple(1 << n for n in range(8))  # lookup's own steps
LONGEST = 32768  # of prompts and caches, unless the model takes less
PAGE_SIZES = (1, 16)  # of left-padded batches, and of serving engines


def problems_of(model, batches: Iterable[int] = BATCHES, longest: int = LONGEST,
                page_sizes: Iterable[int] = PAGE_SIZES) -> list[Problem]:
    """The problems of `model`: a name in the catalogue, the path of a config.json, its content, or an object of transformers that
    has it (a config, or a model with one). Every bucket of lengths up to
    `longest` is there, for prompts and for new tokens; of prompts that come in pieces only powers of two. Raises `ModelError`."""
    layers = [layers.kind.unsized(layers.problems[0].dtype) for layers in model_of(model).attention]
    if _looks_both_ways(model):
        layers = [replace(layer, window_right=layer.window_left) for layer in layers]
    lengths = buckets(longest)
    halves = [length for length in lengths if length >= 16 and not length & length - 1]
    sizes = [(rows, rows) for rows in lengths] + [(rows, keys) for rows in halves for keys in halves if rows < keys]
    found: dict[Problem, None] = {}
    for layer in layers:
        for batch in batches:
            for rows, keys in sizes:
                for problem in _problems(layer, batch, rows, keys, tuple(page_sizes)):
                    found[problem.simplified()] = None
    return list(found)


def buckets(longest: int) -> list[int]:
    """Every length that stands for its bucket, up to the one that `longest` is in (`core.sequences.bucket_length`)."""
    found = [bucket_length(1)]
    while found[-1] < longest:
        found.append(bucket_length(found[-1] + 1))
    return found


def model_of(model) -> Model:
    """`model` as the catalogue has models. Raises `ModelError`."""
    if isinstance(model, (str, Path)):
        path = Path(model)
        return read_config(path) if isinstance(model, Path) or path.suffix == ".json" or path.is_dir() else by_name(model)
    config = getattr(model, "config", model)
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise ModelError(
    f"a {type(model).__name__} is no model: it must be a name, the path of a config.json, its content, or a model "
    "or config of transformers")
    dtype = str(getattr(model, "dtype", None) or values.get("dtype") or values.get("torch_dtype") or "bfloat16")
    return read_values({**values, "dtype": dtype.removeprefix("torch."), "torch_dtype": None},
                       f"the config of a {type(model).__name__}")


def _looks_both_ways(model) -> bool:
    """Whether a model of transformers is an encoder: all of its attention modules say so. One that also sees has some."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return {module.is_causal for module in modules if isinstance(getattr(module, "is_causal", None), bool)} == {False}


def _problems(layer: Problem, batch: int, rows: int, keys: int, page_sizes: tuple[int, ...]) -> Iterable[Problem]:
    """`rows` queries over `keys` keys, dense, packed and over caches; where that is a whole prompt, also one new token."""
    like = replace(layer, batch=batch, seqlen_q=rows, seqlen_k=keys)
    yield like
    yield replace(like, kv="varlen")
    if layer.head_dim != layer.head_dim_v:
        return
    for page_size in (0, *page_sizes):
        kv = dict(kv="paged" if page_size else "dense", page_size=page_size)
        if rows == keys:
            yield replace(like, op="decode", seqlen_q=1, window_right=None, **kv)
        if page_size:
            yield replace(like, **kv)
