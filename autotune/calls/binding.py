"""From a `Call` to what a launch takes: the grid of each step, and Params, made of a kernel's fields.

The one place where Params are put together. Each `Field` says where its value comes from; of these expressions one function is
made for each plan, as `namedtuple` makes its methods, so that a warm call runs no loop over fields.
"""

from __future__ import annotations

import ast
import struct
from typing import Callable, Mapping, NamedTuple

from ..core.config import Config, Value
from ..core.problem import Problem
from ..device.tensormap import encode as encode_map
from ..kernels import kernel_of
from ..kernels.base import Map, params_format
from .call import Call

FUNCTIONS = {"min": min, "max": max}  # that a field's expression may call
KEYS = ("k", "v", "dk", "dv")
VALUES = ("v", "out", "dout", "dv")  # tensors whose rows have head_dim_v columns


class Binding(NamedTuple):
    """`sized(call)` gives the grid of each step, and says in `call` what must be lent; when that has been lent, `fields(call)` gives
    the fields of Params, for `packer`. Raises `tensormap.Unmappable` for arrays that the kernel's maps cannot describe."""

    sized: Callable[[Call], tuple[int, ...]]
    fields: Callable[[Call], tuple]
    packer: struct.Struct


def bind(problem: Problem, config: Config, blocks: Callable[[int], int], encode: Callable = encode_map) -> Binding:
    """The binding of `config` for problems like `problem` but for their batch and lengths. `blocks` gives how many blocks are
    launched of a step that allows some for each SM; `encode` makes tensor maps."""
    kernel = kernel_of(config)
    first, *others = [step.blocks_per_sm for step in kernel.plan(problem, config)]
    assert not any(others), f"{kernel.name}: only the blocks of the first step may draw"
    sized = kernel.bind(problem, config)
    if first:
        sized = _drawing(sized, blocks(first), problem.packed)
    fields = kernel.params(problem.static, config)
    known = kernel.known(problem, config)
    maps = kernel.maps(problem, config)
    texts = [_map_text(n, shape, problem) for n, shape in enumerate(maps)]
    texts += [field.of or field.name for field in fields if field.type != "TensorMap"]
    scope = {"encode": encode, "dtype": problem.dtype, **{f"map{n}": shape for n, shape in enumerate(maps)}}
    return Binding(sized, reader(texts, known, scope), struct.Struct(params_format(fields)))


def reader(texts: list[str], known: Mapping[str, Value], scope: Mapping[str, object]) -> Callable[[Call], tuple]:
    """A function of a call that gives the values of these expressions. Names that are not `known`, nor in `scope`, are fields of the
    call."""
    names = _Names(known, {**FUNCTIONS, **scope})
    values = [ast.unparse(names.visit(ast.parse(text, mode="eval").body)) for text in texts]
    loads = "".join(f"    {name} = call.{name}\n" for name in names.used)  # once each: maps and pointers name the same ones
    made: dict[str, Callable] = {}
    exec(f"def fields(call):\n{loads}    return ({', '.join(values)},)", {"__builtins__": {}, **FUNCTIONS, **scope}, made)
    return made["fields"]


class _Names(ast.NodeTransformer):
    def __init__(self, known, scope):
        self.known, self.scope = known, scope
        self.used: dict[str, None] = {}  # fields of the call, in order

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.known:
            return ast.Constant(self.known[node.id])
        if node.id in self.scope:
            return node
        assert node.id in Call.__slots__, f"a field of Params is to come from {node.id}, which no call has"
        self.used[node.id] = None
        return node


def _map_text(n: int, shape: Map, problem: Problem) -> str:
    """The expression that encodes the map of a tensor."""
    tensor, of_keys = shape.tensor, shape.tensor in KEYS
    heads = problem.heads_kv if of_keys else problem.heads_q
    columns = problem.head_dim_v if tensor in VALUES else problem.head_dim
    rows, entries = "seqlen_k" if of_keys else "seqlen_q", "1" if problem.packed else "batch"
    if of_keys and problem.page_size:
        rows, entries = "page_size", "pages"
    strides = ", ".join(f"{tensor}_{axis}_stride" for axis in ("batch", "row", "head"))
    return f"encode(map{n}, dtype, {tensor}, {columns}, {rows}, {heads}, {entries}, {strides})"


def _drawing(sized: Callable, most: int, always: bool) -> Callable:
    """The same with at most `most` blocks of the first step, which draw what is beyond that from a counter: `always`, or only where
    there is more."""

    def drawing(call):
        grids = sized(call)
        if always or grids[0] > most:
            call.counters = 1
            return min(grids[0], most), *grids[1:]
        return grids

    return drawing
