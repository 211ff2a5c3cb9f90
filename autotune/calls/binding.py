"""From a `Call` to what a launch takes: the grid of each step, and Params, made of a kernel's fields.

The one place where Params are put together. Each `Field` says where its value comes from; of these expressions one function is
made for each plan, as `namedtuple` makes its methods, so that a warm call runs no loop over fields.
"""

from __future__ import annotations

import ast
import struct
from functools import lru_cache, partial
from typing import Callable, Mapping, NamedTuple

from ..core.config import Config, Value
from ..core.problem import Problem
from ..device.tensormap import encode as encode_map
from ..kernels import kernel_of
from ..kernels.base import Map, Resized, params_format
from .call import Call

FUNCTIONS = {"min": min, "max": max}  # that a field's expression may call
KEYS = ("k", "v", "dk", "dv")
VALUES = ("v", "out", "dout", "dv")  # tensors whose rows have head_dim_v columns


class Binding(NamedTuple):
    """`sized(call)` gives the grid of each step, and says in `call` what must be lent; when that has been lent,
    `pack(call, buffer)` puts the fields of Params there, as `packer` has them. It raises `tensormap.Unmappable` for arrays that
    the kernel's maps cannot describe. `pack_addresses` does it where the fields of a call that differs in addresses only are."""

    sized: Callable[[Call], tuple[int, ...]]
    pack: Callable[[Call, bytearray], None]
    pack_addresses: Callable[[Call, bytearray], None]
    packer: struct.Struct


def bind(problem: Problem, config: Config, blocks: Callable[[int], int], encode: Callable = encode_map,
         resized: Resized | None = None) -> Binding:
    """The binding of `config` for problems like `problem` but for their batch and lengths. `blocks` gives how many blocks are
    launched of a step that allows some for each SM; `encode` makes tensor maps; `resized` chooses what of the config follows from
    sizes, which without it is what the config has."""
    kernel = kernel_of(config)
    first, *others = [step.blocks_per_sm for step in kernel.plan(problem, config)]
    assert not any(others), f"{kernel.name}: only the blocks of the first step may draw"
    sized = kernel.bind(problem, config, resized)
    if first:
        sized = _drawing(sized, blocks(first), problem.packed)
    fields = kernel.params(problem.static, config)
    packer = struct.Struct(params_format(fields))
    maps = kernel.maps(problem, config)
    texts = [_map_text(n, shape, problem) for n, shape in enumerate(maps)]
    texts += [field.of or field.name for field in fields if field.type != "TensorMap"]
    scope = {**FUNCTIONS, "encode": encode, "dtype": problem.dtype, **{f"box{n}": shape for n, shape in enumerate(maps)}}
    known = kernel.known(problem, config)
    pack = pack_addresses = packing(texts, packer, known, scope, bool(maps) and encode is encode_map)
    if not maps:
        last = max(n for n, field in enumerate(fields) if field.type.endswith("*"))
        pack_addresses = packing(texts[:last + 1], struct.Struct(params_format(fields[:last + 1])), known, scope, False)
    return Binding(sized, pack, pack_addresses, packer)


def packing(texts: list[str], packer: struct.Struct, known: Mapping[str, Value], scope: Mapping[str, object],
            keep: bool) -> Callable[[Call, bytearray], None]:
    """`Binding.pack`, of expressions: names that are not `known`, nor in `scope`, are fields of the call. With `keep`, what was
    packed for a call is there for later ones that have the same in all of these fields."""
    names = _Names(known, scope)
    values = ", ".join(ast.unparse(names.visit(ast.parse(text, mode="eval").body)) for text in texts)
    loads, given = ", ".join(f"call.{name}" for name in names.fields), ", ".join(names.fields)
    make = _function("packed", f"def packed({given}): return pack({values})", {**scope, "pack": packer.pack})
    if keep:
        make = partial(_kept, make)
    return _function("pack", f"def pack(call, buffer): buffer[:{packer.size}] = packed({loads})", {"packed": make})


def _function(name: str, source: str, scope: Mapping[str, object]) -> Callable:
    made: dict[str, Callable] = {}
    exec(source, {"__builtins__": {}, **scope}, made)
    return made[name]


@lru_cache(maxsize=4096)
def _kept(packed: Callable, *fields) -> bytes:
    """1 us where encoding four maps, or finding them, and packing takes 3."""
    return packed(*fields)


class _Names(ast.NodeTransformer):
    """Puts in what is known; `fields` are the names that are left, each once."""

    def __init__(self, known: Mapping[str, Value], scope: Mapping[str, object]):
        self.known, self.scope, self.fields = known, scope, {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.known:
            return ast.Constant(self.known[node.id])
        if node.id not in self.scope:
            assert node.id in Call.__slots__, f"a field of Params is to come from {node.id}, which no call has"
            self.fields[node.id] = None
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
    return f"encode(box{n}, dtype, {tensor}, {columns}, {rows}, {heads}, {entries}, {strides})"


def _drawing(sized: Callable, most: int, always: bool) -> Callable:
    """The same with at most `most` blocks of the first step, which draw what is beyond that from a counter: `always`, or only
    where there is more."""

    def drawing(call):
        grids = sized(call)
        if always or grids[0] > most:
            call.counters = 1
            return min(grids[0], most), *grids[1:]
        return grids

    return drawing
