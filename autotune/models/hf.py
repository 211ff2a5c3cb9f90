"""A model's attention from its Hugging Face config.json, for `--model-config PATH`.

The file says it in the words of `vocabulary.yaml`; `derive` reads them or refuses. Here the file is opened, and what was derived
becomes a `Model`: the prompts and decode steps to tune for each kind of layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Mapping

from ..core.problem import ProblemError
from ..core.reading import ReadError, load_json, read_text, shown
from .catalogue import DECODE_STEPS, LayerKind, Model, ModelError, layers_of_kind
from .derive import Derived, derive

MAX_BYTES = 4 << 20
_NAME_ONE = "name a model's config.json or the folder it is in"
PREFILL = (1024, 4096, 8192, 32768)  # prompt lengths, up to what the model takes


def read_config(path: Path) -> Model:
    """The attention of the model whose config.json is at `path`, or in the folder `path`. Raises `ModelError`."""
    path = path / "config.json" if path.is_dir() else path
    where = shown(str(path), 400)
    return read_values(_json(path, where), where)


def read_values(values: Mapping, where: str) -> Model:
    """The same of a config that has been read: `values`, from `where`. Raises `ModelError`."""
    derived = derive(values, where)
    try:
        attention = tuple(layers_of_kind(kind, derived.dtype, _lengths(kind, derived), DECODE_STEPS) for kind in derived.kinds)
    except ProblemError as error:
        raise ModelError(f"{where}: {error}") from None
    return Model(derived.title, derived.title, where, sum(kind.layers for kind in derived.kinds), attention, derived.left_out,
                 derived.unread)


def _json(path: Path, where: str) -> Mapping:
    try:
        data = load_json(read_text(path, MAX_BYTES, pipe=True))
    except FileNotFoundError:
        raise ModelError(f"{where} cannot be read: No such file or directory; {_NAME_ONE}") from None
    except ReadError as error:
        what = f"is not JSON: {str(error).replace('not JSON: ', '', 1)}" if error.opened else error
        raise ModelError(f"{where} {what}; {_NAME_ONE}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{where} holds a {type(data).__name__}; a config.json is an object")
    return data


def _lengths(kind: LayerKind, derived: Derived) -> list[int]:
    longest = kind.longest or derived.longest or PREFILL[-1]
    if kind.fixed_length or derived.fixed_length:
        return [longest]
    return [length for length in PREFILL if length <= longest] or [longest]
