"""What a kernel is: a template, its parameters, its rules and its plan. One module in this package for each kernel."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cached_property
from typing import Callable, Iterator, Mapping, NamedTuple, Protocol

from ..core.config import Config, Parameter, Value, typed
from ..core.gpu import Gpu
from ..core.problem import Problem, Static
from .fields import (LEAST_ALIBI_SCALE, LOG2E, MAX_FLOAT, Field, bounded, mask_fields, params_bytes,  # noqa: F401  asked here too
                     params_format, reciprocal)
from .space import Space, legal_configs
from .traits import Account, apart, sizes

WARP_SIZE = 32
RECENT_SIZES = 1024  # exact sizes of calls of which a plan keeps how they are launched
NOTHING = "lib/nothing.cuh"  # the header of what a problem or a config lacks


class Map(NamedTuple):
    """One TensorMap member of Params: boxes of `heads` x `rows` x `columns` of a tensor (q, k, v or out), with the 128-byte
    swizzle."""

    tensor: str
    rows: int
    columns: int
    heads: int = 1


class Step(NamedTuple):
    """One launch of a plan. A tuple, because a call with new sizes makes one, and a frozen dataclass takes 0.8 us longer."""

    entry: str
    grid: int  # flattened into x: only x may exceed 65535
    block: int  # threads
    smem_bytes: int
    carveout: int = -1  # percent of the SM's L1 to set aside as shared memory; -1: the driver's choice
    blocks_per_sm: int = 0  # above 0: launch at most this many for each SM, and blocks draw the rest of the grid
    dependent: bool = False  # may be put in place before the kernels before it have ended: it waits for them itself (sm_90)
    cluster: int = 1  # blocks that run together and read each other's shared memory (sm_90); the grid is a multiple


class Sized(Protocol):
    """What a launch is sized by, and what it needs: fields of a `Call` (calls/call.py has all of them).

    A sizer may set `lent`, (name of a pointer, float32 values) for each workspace that the launch needs, `counters`, how many
    counters that are 0 it draws from, and `cluster`, blocks of a cluster of the first step.
    """

    batch: int
    seqlen_q: int  # of sequences that are packed: of all together
    seqlen_k: int
    lent: tuple[tuple[str, int], ...]
    counters: int
    cluster: int


Sizer = Callable[[Sized], "tuple[int, ...]"]  # gives the grid of each step of the plan, 0 for one that is not needed
# Values of launch parameters that follow from sizes: of (batch, seqlen_q, seqlen_k), lengths of a sequence.
Resized = Callable[[int, int, int], "dict[str, Value]"]
Rule = Callable[[Static, Mapping[str, Value], Gpu], "str | None"]  # of compile parameters only


def header_if(wanted: bool, name: str) -> str:
    """The header `name`, or the empty one."""
    return name if wanted else NOTHING


class Kernel:
    """Base of the kernels. A subclass fills in the class attributes and the methods that raise NotImplementedError.

    What is not declared here, no caller may ask of a kernel without knowing its class.
    """

    op: str  # of the problems that it computes
    name: str
    template: str
    summary: str
    parameters: tuple[Parameter, ...]  # compile parameters first, then those of the launch
    rules: tuple[Rule, ...]  # each returns why a config is illegal, or None
    fields: tuple[Field, ...]  # of Params, in order
    min_arch: int
    sized: tuple[str, ...] = ()  # launch parameters that follow from sizes: what `fitted` chooses
    dtypes: tuple[str, ...]  # of q, and of what has its dtype
    sources: tuple[str, ...]  # of keys and values
    aligned: bool  # needs 16-byte aligned bases and strides that are multiples of 16 bytes
    draws = False  # whether Params has `tickets` from which blocks may draw their work

    def reject(self, problem: Problem, gpu: Gpu) -> str | None:
        """Why this kernel cannot serve `problem` on `gpu`, or None. A subclass asks this first or last."""
        if problem.op != self.op:
            return f"it computes {self.op} problems, not {problem.op}"
        if gpu.arch < self.min_arch:
            return f"it needs compute capability {self.min_arch / 10}, the GPU has {gpu.arch / 10}"
        if problem.dtype not in self.dtypes:
            return f"it computes {', '.join(self.dtypes)}, not {problem.dtype}"
        if reason := self.reject_dtypes(problem, gpu):
            return reason
        if problem.kv not in self.sources:
            return f"it reads {' and '.join(self.sources)} keys and values, not {problem.kv} ones"
        return None

    def reject_dtypes(self, problem: Problem, gpu: Gpu) -> str | None:
        """Why dtypes other than that of the queries cannot be served, or None."""
        if problem.kv_dtype != problem.dtype or problem.out_dtype != problem.dtype:
            return "keys, values and output must have the dtype of the queries"
        return None

    def target(self, gpu: Gpu) -> str:
        """The -arch to compile for."""
        return f"sm_{gpu.arch}"

    def derive(self, static: Static, values: Mapping[str, Value]) -> dict[str, Value]:
        """Values of the derived parameters for the searched ones in `values`."""
        raise NotImplementedError

    def constants(self, static: Static, config: Config) -> list[tuple[str, str, Value]]:
        """(C type, NAME, value) of each constexpr that the template prints at the top."""
        values = [("int", "HEAD_DIM", static.head_dim), ("int", "HEAD_DIM_V", static.head_dim_v)]
        for parameter in self.parameters:
            if parameter.kind == "compile":
                value = config[parameter.name]
                values.append(("bool" if isinstance(value, bool) else "int", parameter.name.upper(), value))
        return values

    def operands(self, static: Static, config: Config) -> dict[str, object]:
        """Further names for the template: texts that neither C++ nor a constant can make, such as operand lists of asm."""
        return {}

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        """A legal config known to be good without tuning, from the literature; its source stands beside it."""
        raise NotImplementedError

    def preferred(self, problem: Problem, gpu: Gpu) -> bool:
        """Whether its default comes before those of kernels that follow it in the order."""
        return True

    def suited(self, problem: Problem, config: Config, gpu: Gpu) -> dict[str, Value]:
        """Values of `sized` that suit the sizes of `problem`: nothing if `config` has none that matters."""
        return {}

    def plan(self, problem: Problem, config: Config) -> list[Step]:
        """The launches that compute `problem`, in order."""
        raise NotImplementedError

    def bind(self, problem: Problem, config: Config, resized: Resized | None = None) -> Sizer:
        """What sizes a launch of `config`, for problems like `problem` but for batch and lengths. A warm call runs it: 0.3 us,
        where a Problem of new sizes and its plan take 2 even without validation. Of `sized` it has what `resized` gives for the
        sizes of the call, without that what `config` has, and puts it in the call under its name."""
        raise NotImplementedError

    def known(self, problem: Problem, config: Config) -> dict[str, Value]:
        """What fields of Params may name besides those of a call: the same for every problem of a plan."""
        values = {parameter.name: int(config[parameter.name]) for parameter in self.parameters
                  if parameter.kind == "launch" and parameter.name not in self.sized}
        page = reciprocal(problem.page_size) if problem.page_size else (0, 0)
        return {**values, "heads_q": problem.heads_q, "heads_kv": problem.heads_kv, "group": problem.group,
                "window_left": bounded(problem.window_left), "window_right": bounded(problem.window_right),
                "softcap": problem.softcap, "page_size": problem.page_size, "page_magic": page[0], "page_shift": page[1],
                "LOG2E": LOG2E, "MAX_FLOAT": MAX_FLOAT, "LEAST_ALIBI_SCALE": LEAST_ALIBI_SCALE}

    def most_cluster(self, config: Config) -> int:
        """Blocks of a cluster of the first step at the most, 1 if there are none."""
        return 1

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        """Of device memory that a launch is lent."""
        return 0

    def maps(self, problem: Problem, config: Config) -> tuple[Map, ...]:
        """The tensor maps with which Params begins. Of sizes they depend on the page size only."""
        return ()

    def params(self, static: Static, config: Config) -> tuple[Field, ...]:
        """The members of Params for problems of `static`: `fields`, and what only some features or configs need, after them."""
        return self.fields

    @property
    def mapped(self) -> bool:
        """Whether arrays reach this kernel through tensor maps, which cannot describe every array."""
        return any(field.type == "TensorMap" for field in self.fields)

    def estimate_us(self, problem: Problem, config: Config, gpu: Gpu, registers: int) -> float:
        """Predicted time from resources and roofline, given what ptxas said of registers."""
        raise NotImplementedError

    def expected_registers(self, problem: Problem, config: Config, gpu: Gpu) -> int:
        """Of a thread, before compiling: as many as it can have at most."""
        return min(255, gpu["registers_per_sm"] // max(step.block for step in self.plan(problem, config)))

    # What follows is the same for every kernel.

    def fitted(self, problem: Problem, config: Config, gpu: Gpu) -> Config:
        """`config` with those launch parameters that follow from sizes chosen for the sizes of `problem`."""
        return self.with_sized(problem.static, config, self.suited(problem, config, gpu))

    def with_sized(self, static: Static, config: Config, values: Mapping[str, Value]) -> Config:
        """`config` with these values of `sized`, from which nothing else follows."""
        if all(config[name] == value for name, value in values.items()):
            return config
        return Config.of(self.name, {**config.values, **values})

    def resized(self, known: Problem, config: Config, gpu: Gpu) -> Resized:
        """What of `sized` a config that was chosen for `known` should have for other sizes: what suits those, times how much more
        or less than what suits `known` the config has."""
        there = self.suited(known, config, gpu)

        def values(batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Value]:
            sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
            here = self.suited(replace(known, **sizes), config, gpu) if there else {}
            return {name: value if config[name] == there[name] else self.nearest(name, value * config[name] / there[name], config)
                    for name, value in here.items()}

        return values

    def nearest(self, name: str, wanted: float, config: Config) -> int:
        """The value nearest to `wanted` that a parameter may have beside the compile parameters of `config`."""
        values = next(parameter for parameter in self.parameters if parameter.name == name).values_beside(config.values)
        return min(values, key=lambda value: abs(value - wanted))

    def account_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """`estimate_us` before compiling. Of `config` it reads values only."""
        return self.estimate_us(problem, config, gpu, self.expected_registers(problem, config, gpu))

    def account(self, problem: Problem, config: Config, gpu: Gpu) -> Account:
        """`account_us`, and where the launch stands among others of this kernel and static part."""
        traits = apart(self.parameters, config.values, self.sized)
        return Account(self.account_us(problem, config, gpu), (*sizes(problem, gpu), *traits))

    def family(self, config: Config) -> tuple:
        """What of `config` does not follow from sizes: what was measured of one of a family is evidence of all."""
        return self.name, tuple([pair for pair in config.items if pair[0] not in self.sized])

    def config(self, static: Static, values: Mapping[str, Value]) -> Config:
        """The config with these searched values, of which those with a value for configs without them may be missing, and the
        derived ones that follow."""
        searched = {p.name: values[p.name] if p.absent is None else values.get(p.name, p.absent)
                    for p in self.parameters if not p.derived}
        derived = self.derive(static, searched)
        return Config.of(self.name, {p.name: derived[p.name] if p.derived else searched[p.name] for p in self.parameters})

    def typed_config(self, raw: Mapping[str, object], where: str) -> Config:
        """A config from untyped values. Raises `ConfigError`. Legality for a problem is `illegal`'s business."""
        return Config.of(self.name, typed(self.parameters, raw, where))

    def illegal(self, static: Static, config: Config, gpu: Gpu) -> str | None:
        """The first rule that `config` breaks on `gpu`, as a sentence, or None."""
        derived = self.derive(static, config.values)
        for name, value in derived.items():
            if config[name] != value:
                return f"{name} is {config[name]}, but the other values need exactly {value}"
        for parameter in self.parameters:
            if (other := parameter.needs or parameter.barred) and \
                    config[parameter.name] not in (allowed := parameter.values_beside(config.values)):
                return (f"{parameter.name} is {config[parameter.name]}; {'with' if config[other] else 'without'} "
                        f"{other} it must be {' or '.join(map(str, allowed))}")
        return next(filter(None, (rule(static, config.values, gpu) for rule in self.rules)), None)

    def space(self, problem: Problem, gpu: Gpu) -> Space:
        """Every legal config of this kernel for `problem` on `gpu`, in canonical order."""
        return legal_configs(self, problem.static, gpu) if self.reject(problem, gpu) is None else Space(self, ())

    def searched(self, static: Static, values: Mapping[str, Value], gpu: Gpu) -> bool:
        """Whether a search on `gpu` should try these compile parameters; legal ones that it should not may be asked for."""
        return True

    def compile_key(self, config: Config) -> tuple:
        """What of `config` reaches the source: configs with the same key share a binary."""
        return config.items[:self._compiled]

    @cached_property
    def _compiled(self) -> int:
        kinds = [p.kind for p in self.parameters]
        count = kinds.count("compile")
        assert "launch" not in kinds[:count], f"{self.name} declares a launch parameter before a compile parameter"
        return count

    def launch_combinations(self, compiled: Mapping[str, Value]) -> Iterator[dict[str, Value]]:
        """Every combination of the launch parameters that may go with these compile parameters."""
        launch = [p for p in self.parameters if p.kind == "launch"]
        for combination in itertools.product(*(p.values_beside(compiled) for p in launch)):
            yield dict(zip((p.name for p in launch), combination))

    def draw(self, choice: Callable[[tuple[Value, ...]], Value]) -> dict[str, Value]:
        """A value for each searched parameter, drawn with `choice` (of a `random.Random`); rules may refuse them."""
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if not parameter.derived:
                values[parameter.name] = choice(parameter.values_beside(values))
        return values
