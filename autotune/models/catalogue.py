"""Which attention problems a model has: `models.yaml` read into `Model`s, and a model expanded into `Problem`s."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Iterable, Mapping

from ..core.problem import Problem, ProblemError
from ..core.reading import shown

CATALOGUE = Path(__file__).with_name("models.yaml")

# The decode steps of a layer of which models.yaml says nothing: one user and many, short and long.
DECODE_STEPS = ("b1-k4096", "b1-k65536", "b8-k8192", "b64-k4096", "b32-k8192-page16")
_STEP = re.compile(r"b(\d+)(?:-q(\d+))?-k(\d+)(?:-page(\d+))?(?:-kv([a-z]\w+))?", re.ASCII)

_MODEL_FIELDS = {"title", "source", "layers", "dtype", "heads_q", "heads_kv", "head_dim", "attention"}
_LAYER_FIELDS = {"layers", "prefill", "decode", "causal", "left", "right", "sinks", "softcap", "alibi",
                 "heads_q", "heads_kv", "head_dim", "head_dim_v"}  # heads are the model's unless a kind of layer says otherwise


class ModelError(ValueError):
    """A model that is not in the catalogue, or a catalogue entry that cannot be read."""


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model that attend alike: how many, query and key heads, head dims of keys and of values, and the mask:
    `left` and `right` are the window's bounds, inclusive, None if there is none; right = 0 is causal.

    `compressed`: keys and values are made of a latent vector, over which the model decodes. `longest` is the most tokens of a
    sequence where it is not the model's; with `fixed_length` there are always so many, as those of an image.
    """

    name: str
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    left: int | None = None
    right: int | None = 0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    compressed: bool = False
    longest: int | None = None
    fixed_length: bool = False

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def features(self) -> str:
        """What sets these layers apart, for people: "causal, left 127, sinks"."""
        parts = ["causal" if self.causal else "not causal"]
        parts += [f"{side} {bound}" for side, bound in (("left", self.left), ("right", self.right)) if bound]
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        return ", ".join(parts + [name for name in ("alibi", "sinks", "compressed") if getattr(self, name)])

    def problem(self, dtype: str, **sizes) -> Problem:
        """The problem of one such layer at these sizes. Raises `ProblemError`."""
        return self.unsized(dtype, **sizes).simplified()

    def unsized(self, dtype: str, **sizes) -> Problem:
        """The same with its window, even where that hides nothing: for callers who give it other sizes."""
        return Problem(dtype=dtype, heads_q=self.heads_q, heads_kv=self.heads_kv, head_dim=self.head_dim,
                       head_dim_v=self.head_dim_v, window_left=self.left, window_right=self.right, softcap=self.softcap,
                       alibi=self.alibi, sinks=self.sinks, **sizes)


@dataclass(frozen=True)
class AttentionLayers:
    """One kind of attention layer of a model, with its problem at each prompt length and at each decode step: none where keys
    and values have different head dims, as such models decode over compressed keys, and none where nothing is decoded."""

    kind: LayerKind
    problems: tuple[Problem, ...]
    decode: tuple[Problem, ...]

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def layers(self) -> int:
        return self.kind.layers

    @property
    def left(self) -> int | None:
        return self.kind.left


@dataclass(frozen=True)
class Model:
    """A public model's attention. `layers` is the sum over its kinds; `source` says where the shapes come from; `left_out`
    has a sentence for each kind of layer that is none of these; `unread` names parts of its file that are models of their own."""

    name: str
    title: str
    source: str
    layers: int
    attention: tuple[AttentionLayers, ...]
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

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
        raise ModelError(f"no model is called {shown(name)!r}; known are {', '.join(catalogue())}. "
                         "Any other shape can be tuned with --problem TEXT") from None


def problems_of_model(name: str) -> tuple[Problem, ...]:
    """The problems to tune for the model called `name`. Raises `ModelError` for an unknown one."""
    return by_name(name).problems


def read_model(name: str, entry: Mapping, where: str = CATALOGUE.name) -> Model:
    """A `Model` from its entry in the file `where`. Raises `ModelError` naming the field that is wrong."""
    _require_fields(f"{where}: {name}", entry, _MODEL_FIELDS, _MODEL_FIELDS | {"head_dim_v"})
    if not isinstance(entry["attention"], Mapping):
        raise ModelError(f"{where}: {name}: attention is {shown(entry['attention'])}; it must be a mapping of kinds of layers")
    attention = []
    for kind, layer in entry["attention"].items():
        _require_fields(f"{where}: {name}: {kind}", layer, {"layers", "prefill"}, _LAYER_FIELDS)
        lists = isinstance(layer["prefill"], list) and isinstance(layer.get("decode", []), list)
        if type(layer["layers"]) is not int or not lists:
            raise ModelError(f"{where}: {name}: {kind}: layers must be an int, prefill and decode lists")
        try:
            attention.append(layers_of_kind(_kind(kind, {**entry, **layer}), entry["dtype"], layer["prefill"],
                                            layer.get("decode", DECODE_STEPS)))
        except ProblemError as error:
            raise ModelError(f"{where}: {name}: {kind}: {error}") from None
    if sum(kind.layers for kind in attention) != entry["layers"]:
        raise ModelError(f"{where}: {name}: its kinds of attention have {sum(k.layers for k in attention)} layers "
                         f"together, but layers says {entry['layers']}")
    return Model(name, entry["title"], entry["source"], entry["layers"], tuple(attention))


def _kind(name: str, facts: Mapping) -> LayerKind:
    head_dim = facts["head_dim"]
    head_dim_v = facts.get("head_dim_v", head_dim)
    left, causal = facts.get("left"), facts.get("causal", True)
    return LayerKind(name, facts["layers"], facts["heads_q"], facts["heads_kv"], head_dim, head_dim_v, left,
                     0 if causal else facts.get("right"), float(facts.get("softcap", 0)), facts.get("alibi", False),
                     facts.get("sinks", False), compressed=head_dim_v != head_dim)


def layers_of_kind(kind: LayerKind, dtype: str, lengths: Iterable[int], steps: Iterable[str]) -> AttentionLayers:
    """`kind` with its problems in prompts of `lengths` tokens and in decode `steps`. Raises `ProblemError`."""
    problems = tuple(kind.problem(dtype, batch=1, seqlen_q=length, seqlen_k=length) for length in lengths)
    decodes = kind.causal and kind.head_dim == kind.head_dim_v
    return AttentionLayers(kind, problems, tuple(_decode_problem(kind, dtype, step) for step in steps) if decodes else ())


def _decode_problem(kind: LayerKind, dtype: str, step: str) -> Problem:
    """Some new tokens of each sequence, one if `step` does not say how many, as in ``b32-q4-k8192-page16-kve4m3``."""
    match = _STEP.fullmatch(step) if isinstance(step, str) else None
    if not match:
        raise ProblemError(f"decode step {step!r:.60} is not bBATCH[-qQUERIES]-kKEYS[-pageSIZE][-kvDTYPE], such as "
                           "b32-k8192-page16")
    batch, queries, keys, page_size = (int(number or 0) for number in match.groups()[:4])
    return kind.problem(dtype, op="decode", batch=batch, seqlen_q=queries or 1, seqlen_k=keys, page_size=page_size,
                        kv="paged" if page_size else "dense", kv_dtype=match[5] or "")


def _require_fields(where: str, entry: object, needed: set[str], allowed: set[str]) -> None:
    if not isinstance(entry, Mapping):
        raise ModelError(f"{where} is {shown(entry)}; it must be a mapping with {', '.join(sorted(needed))}")
    if wrong := (needed - entry.keys()) | (entry.keys() - allowed):
        raise ModelError(f"{where}: these fields are missing or unknown: {', '.join(sorted(wrong))}")
