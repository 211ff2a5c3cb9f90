"""Which problems and configs are checked: a seeded cover of pairs of features, every head dim, inputs that broke libraries
elsewhere, and random small problems. What no kernel serves yet is named, and drawn as soon as one does.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import lru_cache
from typing import Iterator, NamedTuple

from ..core.config import Config
from ..core.gpu import Gpu
from ..core.masks import KINDS, Bounds, telling
from ..core.problem import Problem, ProblemError
from ..kernels import KERNELS
from ..kernels.base import Kernel
from ..kernels.decode.base import MAX_QUERIES
from .reported import reported
from .strides import FORMS, unreadable

# (seqlen_q, seqlen_k) at which kernels elsewhere broke: one row or key, none, tails of every tile, Sq above and below Sk, caches.
LENGTHS = ((1, 1), (1, 3), (2, 1), (2, 5), (64, 128), (128, 192), (239, 1), (799, 3), (511, 1), (3, 513), (113, 203), (113, 128),
           (128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (307, 256), (640, 128), (512, 256), (1023, 1024),
           (1024, 1023), (4096, 4096), (4224, 4224), (1, 128), (1, 339), (3, 1024), (64, 800), (3, 799), (64, 2048), (16, 20000),
           (2048, 3577), (2048, 1024), (64, 0), (1, 0))
WINDOWS = ((127, 0), (33, 7), (None, 5), (0, 0), (7, None), (300, 300))

# What is compiled in, and what is not. Pairs are covered over both; problems share the statics of a first cover of STATIC alone,
# so that a binary serves several problems.
STATIC: dict[str, tuple] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "head_dims": ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (80, 48), (40, 40), (16, 24), (120, 248)),
    "mask": tuple(KINDS),
    "softcap": (0.0, 30.0),
    "alibi": (False, True),
    "kv": ("dense", "varlen", "paged"),
}
RUNTIME: dict[str, tuple] = {
    "window": WINDOWS,  # of problems whose mask is a window
    "page_size": (16, 1, 3, 64, 128),  # of problems with pages
    "heads": ((2, 2), (4, 1), (5, 1), (6, 1), (14, 2), (16, 1)),
    "sinks": (False, True),
    "batch": (1, 3),
    "form": tuple(FORMS),
    "lengths": LENGTHS,
}
FACTORS = {"forward": STATIC | RUNTIME, "backward": STATIC | RUNTIME | {"deterministic": (False, True)}}
BELONGS_TO = {"window": ("mask", "window"), "page_size": ("kv", "paged")}

TRIED = 200  # draws until a pair counts as one that a kernel does not serve
COMPARED = 30  # of those that are served: the one with most new pairs is kept

HEAD_DIMS = range(16, 257, 8)
ODD_HEAD_DIMS = ((1, 1), (7, 5), (33, 33), (100, 36), (300, 24), (512, 512))  # for the kernel that takes any

class Case(NamedTuple):
    """A problem and the form of its arrays (`strides.FORMS`)."""

    problem: Problem
    form: str

    def __str__(self) -> str:
        return self.problem.text if self.form == "packed" else f"{self.problem.text} {self.form}"


def serving(case: Case, gpu: Gpu) -> list[Kernel]:
    """The kernels that take `case` as it is."""
    return [kernel for kernel in KERNELS.values() if serves(kernel, case, gpu)]


def serves(kernel: Kernel, case: Case, gpu: Gpu) -> bool:
    return kernel.reject(case.problem, gpu) is None and unreadable(case.form, case.problem, kernel) is None


def cover(gpu: Gpu, seed: int, op: str = "forward") -> tuple[list[Case], dict[str, list[str]]]:
    """(cases, kernel -> what it does not serve). For each kernel of `op` the cases that it serves hold every pair of values of
    two factors that it can serve, every multiple of 8 as a head dim twice, and what was reported; in a random order."""
    rng = random.Random(seed)
    draws = _Draws(rng, gpu, op)
    refused = {}
    for kernel in KERNELS.values():
        if any(draws.serves(kernel, draws.values({})) for _ in range(TRIED)):
            refused[kernel.name] = draws.cover_pairs_of(kernel)
    for head_dims in [*((d, d) for d in HEAD_DIMS), *((d, rng.choice(HEAD_DIMS)) for d in HEAD_DIMS), *ODD_HEAD_DIMS]:
        draws.add_most_served({"head_dims": head_dims})
    cases = draws.cases + [Case(Problem.parse(text), form) for text, form in reported(op).values()]
    cases = list(dict.fromkeys(case for case in cases if serving(case, gpu)))
    rng.shuffle(cases)
    return cases, refused


def unserved(refused: dict[str, list[str]], gpu: Gpu, op: str = "forward") -> list[str]:
    """What no kernel serves: of what `cover` says of each, what all say, and reported cases."""
    common = set.intersection(*map(set, refused.values())) if refused else set()
    left = [f"{what}: {text}" for what, (text, form) in reported(op).items() if not serving(Case(Problem.parse(text), form), gpu)]
    return sorted(common) + left


class _Draws:
    """Draws assignments of values to factors, of which problems are made, and keeps those that add to the cover."""

    def __init__(self, rng: random.Random, gpu: Gpu, op: str):
        self._rng, self._gpu, self._op, self._factors = rng, gpu, op, FACTORS[op]
        self._chosen: list[dict] = []
        self._statics: list[dict] = []

    @property
    def cases(self) -> list[Case]:
        return [_case(values, self._op) for values in self._chosen]

    def values(self, fixed: dict, statics: list[dict] | None = None) -> dict:
        """A random assignment with the values of `fixed`, if given with the static part of one of `statics`."""
        fixed = {**fixed, **{BELONGS_TO[name][0]: BELONGS_TO[name][1] for name in fixed if name in BELONGS_TO}}
        values = {name: self._rng.choice(options) for name, options in self._factors.items()}
        like = [s for s in statics or () if all(s.get(name, value) == value for name, value in fixed.items())]
        values |= self._rng.choice(like) if like else {}
        values |= fixed
        for name, (owner, value) in BELONGS_TO.items():
            if values[owner] != value:
                del values[name]
        return values

    def serves(self, kernel: Kernel, values: dict) -> bool:
        case = _case(values, self._op)
        return case is not None and serves(kernel, case, self._gpu)

    def cover_pairs_of(self, kernel: Kernel) -> list[str]:
        """Adds what `kernel` lacks of its pairs. Returns the values and pairs that it does not serve."""
        refused = [(name, value) for name, options in self._factors.items() for value in options
                   if not any(self.serves(kernel, self.values({name: value})) for _ in range(TRIED))]
        usable = {name: tuple(value for value in options if (name, value) not in refused)
                  for name, options in self._factors.items()}
        static = {name: options for name, options in usable.items() if name in STATIC}
        chosen, _ = self._cover(kernel, static, self._statics, None)
        self._statics += [{name: values[name] for name in STATIC} for values in chosen]
        chosen, impossible = self._cover(kernel, usable, self._chosen, self._statics)
        self._chosen += chosen
        told = [(each,) for each in refused if BELONGS_TO.get(each[0]) not in refused]
        told += [pair for pair in impossible
                 if not any(set(general) <= set(_owned(pair)) for general in impossible if general != pair)]
        return [" with ".join(f"{name} {value}" for name, value in each) for each in told]

    def _cover(self, kernel: Kernel, factors: dict, covered: list[dict], statics: list[dict] | None) -> tuple[list[dict], list]:
        """(assignments that together with `covered` hold every pair of `factors` that `kernel` serves, pairs that it does not)"""
        order = _possible_pairs(factors)
        self._rng.shuffle(order)
        missing = set(order)
        for values in covered:
            if statics is None or self.serves(kernel, values):
                missing -= _pairs(values)
        chosen, impossible = [], []
        for pair in order:
            if pair not in missing:
                continue
            draws = (self.values(dict(pair), statics if n < TRIED // 3 else None) for n in range(TRIED))
            drawn = list(itertools.islice((values for values in draws if self.serves(kernel, values)), COMPARED))
            if drawn:
                chosen.append(max(drawn, key=lambda values: len(_pairs(values) & missing)))
                missing -= _pairs(chosen[-1])
            else:
                impossible.append(pair)
        return chosen, impossible

    def add_most_served(self, fixed: dict) -> None:
        """Adds the one of some random assignments that most kernels serve."""
        drawn = [values for values in (self.values(fixed) for _ in range(TRIED)) if _case(values, self._op)]
        self._chosen.append(max(drawn, key=lambda values: len(serving(_case(values, self._op), self._gpu))))


def _possible_pairs(factors: dict) -> list[tuple]:
    pairs = []
    for a, b in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            needs = [BELONGS_TO[name] for name in (a, b) if name in BELONGS_TO]
            if all({a: x, b: y}.get(owner, value) == value for owner, value in needs):
                pairs.append(((a, x), (b, y)))
    return pairs


def _owned(pair: tuple) -> tuple:
    """`pair` and what its values need."""
    return (*pair, *(BELONGS_TO[name] for name, _ in pair if name in BELONGS_TO))


def _pairs(values: dict) -> set[tuple]:
    """Of an assignment whose factors stand in their order, as all do."""
    return set(itertools.combinations(values.items(), 2))


def _case(values: dict, op: str = "forward") -> Case | None:
    return _cached_case(tuple(sorted(values.items())), op)


@lru_cache(maxsize=None)
def _cached_case(items: tuple, op: str) -> Case | None:
    """None if there is no such problem."""
    v = dict(items)
    (head_dim, head_dim_v), (heads_q, heads_kv), (seqlen_q, seqlen_k) = v["head_dims"], v["heads"], v["lengths"]
    bounds = Bounds(*v["window"]) if "window" in v else telling(v["mask"], seqlen_k)
    try:
        return Case(Problem(op=op, dtype=v["dtype"], batch=v["batch"], heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q,
                            seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, **bounds._asdict(),
                            softcap=v["softcap"], alibi=v["alibi"], sinks=v["sinks"], kv=v["kv"],
                            page_size=v.get("page_size", 0), deterministic=v.get("deterministic", False)), v["form"])
    except ProblemError:
        return None


# Configs

DRAWS = 5000  # of values, for a config that is legal


def drawn_configs(kernel: Kernel, case: Case, gpu: Gpu, count: int, seed: int) -> list[Config]:
    """Up to `count` random legal configs, always the same for a static part. Drawn, not chosen from the whole space: making that
    takes a second. Blocks of more heads than share keys are among them."""
    static = case.problem.static
    rng = random.Random(f"{seed} {kernel.name} {static.text}")
    found: dict[Config, None] = {}
    for _ in range(DRAWS * count):
        config = kernel.config(static, kernel.draw(rng.choice))
        if kernel.illegal(static, config, gpu) is None:
            found[config] = None
        if len(found) == count:
            break
    return list(found)


# Random small problems

ALIKE = 6  # problems of one static part that follow each other, and share binaries


def random_cases(gpu: Gpu, rng: random.Random) -> Iterator[list[Case]]:
    """Without end: some cases of one static part, all served by the same kernels."""
    while True:
        static = {name: rng.choice(options) for name, options in STATIC.items()}
        static |= {"dtype": rng.choice(("bf16", "fp16", "bf16", "fp16", "fp32")), "kv": rng.choice(("dense",) * 3 + STATIC["kv"])}
        static["head_dims"] = tuple(8 * rng.choice((2, 4, 8, rng.randint(2, 16), rng.randint(2, 32))) for _ in "kv")
        if rng.random() < 0.7:
            static["head_dims"] = static["head_dims"][:1] * 2
        decode = rng.random() < 0.25
        cases = list(filter(None, (_random_case(rng, static, decode) for _ in range(4 * ALIKE))))
        served = [case for case in cases if serving(case, gpu)]
        if served:
            yield served[:ALIKE]


def _random_case(rng: random.Random, static: dict, decode: bool) -> Case | None:
    def length(most: int) -> int:
        return min(most, int(2 ** rng.uniform(0, most.bit_length())))

    def bound() -> int | None:
        return rng.choice((None, 0, length(600)))

    heads_kv = rng.randint(1, 3)
    values = {**static, "window": rng.choice(((length(300), 0), (bound(), length(90)))),
              "page_size": rng.choice((1, 3, 16, 19, 64)), "batch": rng.randint(1, 3),
              "heads": (heads_kv * rng.choice((1, 1, 2, 4, rng.randint(1, 9), 16)), heads_kv), "sinks": rng.random() < 0.3,
              "form": rng.choice(tuple(FORMS)), "lengths": rng.choice((rng.choice(LENGTHS[:22]), (length(500), length(700))))}
    if values["kv"] != "paged":
        del values["page_size"]
    case = _case(values)
    if case is None or not decode:
        return case
    return _decode_case(rng, case)


def _decode_case(rng: random.Random, case: Case) -> Case | None:
    try:
        return Case(replace(case.problem, op="decode", seqlen_q=rng.choice((1, 1, 2, rng.randint(1, MAX_QUERIES))),
                            seqlen_k=case.problem.seqlen_k * rng.choice((1, 4)),
                            kv_dtype=rng.choice(("", "", "e4m3")) or case.problem.dtype), case.form)
    except ProblemError:
        return None
