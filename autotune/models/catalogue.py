"""Which attention problems a model has: `models.yaml` read into `Model`s, and a model expanded into `Problem`s."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Mapping

from ..core.problem import Problem, ProblemError

CATALOGUE = Path(__file__).with_name("models.yaml")

# The decode steps of a layer of which models.yaml says nothing: one user and many, short and long.
DECODE_STEPS = ("b1-k4096", "b1-k65536", "b8-k8192", "b64-k4096", "b32-k8192-page16")
_STEP = re.compile(r"b(\d+)(?:-q(\d+))?-k(\d+)(?:-page(\d+))?(?:-kv([a-z]\w+))?", re.ASCII)

_MODEL_FIELDS = {"title", "source", "layers", "dtype", "heads_q", "heads_kv", "head_dim", "attention"}
_LAYER_FIELDS = {"layers", "prefill", "decode", "left", "sinks", "softcap", "alibi"}


class ModelError(ValueError):
    """A model that is not in the catalogue, or a catalogue entry that cannot be read."""


@dataclass(frozen=True)
class AttentionLayers:
    """One kind of attention layer of a model: how many layers are of it, its window, its problem at each prompt length and at
    each decode step: none where keys and values have different head dims, as such models decode over compressed keys."""

    name: str
    layers: int
    problems: tuple[Problem, ...]
    left: int | None
    decode: tuple[Problem, ...]


@dataclass(frozen=True)
class Model:
    """A public model's attention. `layers` is the sum over its kinds; `source` says where the shapes come from; `left_out`
    has a sentence for each kind of layer that is none of these."""

    name: str
    title: str
    source: str
    layers: int
    attention: tuple[AttentionLayers, ...]
    left_out: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What to tune for this model: every kind of layer at every prompt length, batch 1. Each once: a window that
        covers a whole prompt is no window."""
        return tuple(dict.fromkeys(problem for kind in self.attention for problem in kind.problems))

    @property
    def training_problems(self) -> tuple[Problem, ...]:
        """The gradients of the prompts."""
        return tuple(replace(problem, op="backward") for problem in self.problems)

    @property
    def decode_problems(self) -> tuple[Problem, ...]:
        """What to tune for this model's new tokens, over caches of several kinds."""
        return tuple(dict.fromkeys(problem for kind in self.attention for problem in kind.decode))


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Model]:
    """Name -> `Model` for every model in models.yaml. Raises `ModelError` naming the entry that is wrong."""
    import yaml

    data = yaml.load(CATALOGUE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return MappingProxyType({name: read_model(name, entry) for name, entry in data.items()})


def by_name(name: str) -> Model:
    """The catalogue's model called `name`. Raises `ModelError` listing the names there are."""
    try:
        return catalogue()[name]
    except KeyError:
        raise ModelError(f"no model is called {name!r}; known are {', '.join(catalogue())}. "
                         "Any other shape can be tuned with --problem TEXT") from None


def problems_of_model(name: str) -> tuple[Problem, ...]:
    """The problems to tune for the model called `name`. Raises `ModelError` for an unknown one."""
    return by_name(name).problems


def read_model(name: str, entry: Mapping, where: str = CATALOGUE.name) -> Model:
    """A `Model` from its entry in the file `where`. Raises `ModelError` naming the field that is wrong."""
    _require_fields(f"{where}: {name}", entry, _MODEL_FIELDS, _MODEL_FIELDS | {"head_dim_v"})
    attention = []
    for kind, layer in entry["attention"].items():
        _require_fields(f"{where}: {name}: {kind}", layer, {"layers", "prefill"}, _LAYER_FIELDS)
        try:
            problems = tuple(_problem(entry, layer, length) for length in layer["prefill"])
            decode = tuple(_decode_problem(entry, layer, step) for step in layer.get("decode", DECODE_STEPS))
        except ProblemError as error:
            raise ModelError(f"{where}: {name}: {kind}: {error}") from None
        attention.append(AttentionLayers(kind, layer["layers"], problems, layer.get("left"),
                                         decode if _plain_values(entry) else ()))
    if sum(kind.layers for kind in attention) != entry["layers"]:
        raise ModelError(f"{where}: {name}: its kinds of attention have {sum(k.layers for k in attention)} layers "
                         f"together, but layers says {entry['layers']}")
    return Model(name, entry["title"], entry["source"], entry["layers"], tuple(attention))


def _plain_values(entry: Mapping) -> bool:
    """Whether a cache holds keys and values of one head dim, and not something from which both are made."""
    return entry.get("head_dim_v", entry["head_dim"]) == entry["head_dim"]


def _problem(entry: Mapping, layer: Mapping, length: int) -> Problem:
    """A prompt of `length` tokens: as many keys as queries, causal."""
    return _of_layer(entry, layer, batch=1, seqlen_q=length, seqlen_k=length)


def _decode_problem(entry: Mapping, layer: Mapping, step: str) -> Problem:
    """Some new tokens of each sequence, one if `step` does not say how many, as in ``b32-q4-k8192-page16-kve4m3``."""
    match = _STEP.fullmatch(step) if isinstance(step, str) else None
    if not match:
        raise ProblemError(f"decode step {step!r} is not bBATCH[-qQUERIES]-kKEYS[-pageSIZE][-kvDTYPE], such as b32-k8192-page16")
    batch, queries, keys, page_size = (int(number or 0) for number in match.groups()[:4])
    return _of_layer(entry, layer, op="decode", batch=batch, seqlen_q=queries or 1, seqlen_k=keys, page_size=page_size,
                     kv="paged" if page_size else "dense", kv_dtype=match[5] or "")


def _of_layer(entry: Mapping, layer: Mapping, **sizes) -> Problem:
    return Problem(dtype=entry["dtype"], heads_q=entry["heads_q"], heads_kv=entry["heads_kv"], head_dim=entry["head_dim"],
                   head_dim_v=entry.get("head_dim_v", 0), window_left=layer.get("left"), window_right=0,
                   softcap=float(layer.get("softcap", 0)), alibi=layer.get("alibi", False), sinks=layer.get("sinks", False),
                   **sizes).simplified()


def _require_fields(where: str, entry: object, needed: set[str], allowed: set[str]) -> None:
    if not isinstance(entry, Mapping):
        raise ModelError(f"{where} is {entry!r}; it must be a mapping with {', '.join(sorted(needed))}")
    if wrong := (needed - entry.keys()) | (entry.keys() - allowed):
        raise ModelError(f"{where}: these fields are missing or unknown: {', '.join(sorted(wrong))}")
