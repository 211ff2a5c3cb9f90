"""What a backward is given and must give: `GradientInputs` and, in float64, `expect_gradients`.

The tolerance comes, as the forward's, from a *plain* computation: S, P, dP and dS rounded to the dtype, products in fp32, each
gradient rounded once. It holds per (batch entry, head, block of 64 rows). As dS is a difference, plain may happen to be right
where another order of the same sums is not: two deviations of the rounding of P, dS and the output, taken as random, are allowed
for too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from ..calls.dense import attention
from ..calls.varlen import attention_varlen
from ..core.problem import Problem
from .inputs import ROWS, Inputs, _Generator, make_inputs, visible_range
from .numerics import MANTISSA_BITS, SMALLEST, bits, empty, from_float32, host, matmul, rounded, to_float32, ulp
from .reference import expect

CHUNK_ELEMENTS = {"numpy": 1 << 22, "cupy": 1 << 27}  # of scores handled at once
DLSE_KINDS = ("large", "equal", "needles", "mixed")  # inputs whose lse was used too
FACTOR, FACTOR_SOFTCAP = 2, 3
EXACT_FLOPS = 2e12  # of a backward, up to which its out and lse are those of the float64 reference: seconds of an H200


class Gradients(NamedTuple):
    """dq (B, Sq, Hq, D), dk (B, Sk, Hkv, D), dv (B, Sk, Hkv, Dv), dsinks (Hq,) float32 or None; packed as q and k are."""

    dq: object
    dk: object
    dv: object
    dsinks: object


@dataclass(frozen=True)
class GradientInputs:
    """`inputs` of the forward, what it gave (out (B, Sq, Hq, Dv), lse (B, Hq, Sq) float32), and the gradients of that: dout as
    out, dlse as lse or None."""

    inputs: Inputs = field(repr=False)
    out: object = field(repr=False)
    lse: object = field(repr=False)
    dout: object = field(repr=False)
    dlse: object = field(default=None, repr=False)

    @property
    def problem(self) -> Problem:
        return self.inputs.problem

    @property
    def layout(self):
        return self.inputs.layout

    def empty_gradients(self) -> Gradients:
        """Arrays for the results, not initialised."""
        i, dtype = self.inputs, self.problem.dtype
        return Gradients(*(empty(i.xp, array.shape, dtype) for array in (i.q, i.k, i.v)),
                         None if i.sinks is None else i.xp.empty(i.sinks.shape, np.float32))


def make_gradient_inputs(problem: Problem, kind: str, seed: int = 0, xp=np, sequences: Sequence[tuple[int, int]] | None = None,
                         exact: bool = True, make: Callable[..., Inputs] = make_inputs) -> GradientInputs:
    """Inputs of `kind` for a backward, allocated by `xp`; `make` makes the forward's. Where not `exact`, which is enough for
    timing, out and lse are of the size that they would have, but nobody computed them."""
    inputs = make(problem, kind, seed, xp) if sequences is None else make(problem, kind, seed, xp, sequences)
    drawn = _Generator(xp, seed + 1)
    shape = (*inputs.layout.rows, problem.heads_q, problem.head_dim_v)
    dout = drawn.normal(shape, problem.dtype, 4.0 if kind == "large" else 1.0)
    if kind == "mixed":  # one block of 64 rows in 4 has no gradient
        words = bits(dout, problem.dtype)
        turn = (xp.arange(shape[1]).reshape(-1, 1) // ROWS + xp.arange(shape[2])) % 4
        words[...] = xp.where((turn == 3)[None, :, :, None], words.dtype.type(0), words)
    lse_shape = (shape[0], shape[2], shape[1])
    dlse = drawn.normal(lse_shape, "fp32", 1.0) if kind in DLSE_KINDS else None
    if exact:
        out, lse = _forward(inputs, shape, lse_shape)
    else:
        out = drawn.normal(shape, problem.dtype, 0.1)
        lse = xp.full(lse_shape, np.log(max(problem.visible_pairs / max(problem.seqlen_q, 1), 1)) + 0.5, np.float32)
    return GradientInputs(inputs, out, lse, dout, dlse)


def _forward(inputs: Inputs, shape, lse_shape):
    """(out, lse) of the float64 reference, rounded, or of large problems on a GPU those of the forward kernel, checked
    elsewhere."""
    problem, xp = inputs.problem, inputs.xp
    if xp is not np and problem.flops > EXACT_FLOPS:
        return _launched(inputs)
    out, lse = xp.zeros(shape, np.float32), xp.full(lse_shape, -np.inf, np.float32)
    if 0 not in shape:
        expected = expect(inputs)
        batch, rows, head = expected.index
        keep = xp.asarray(host(xp.logical_not(expected.skip)) | (inputs.exempt is not None))
        where = [xp.broadcast_to(each, keep.shape)[keep] for each in (batch, rows, head)]
        out[tuple(where)] = expected.out[keep]
        lse[where[0], where[2], where[1]] = expected.lse[keep]
    return from_float32(xp, out, problem.dtype), lse


def _launched(inputs: Inputs):
    problem = inputs.problem
    options = dict(**problem.bounds.arguments, softcap=problem.softcap, sinks=inputs.sinks,
                   alibi_slopes=inputs.alibi_slopes, return_lse=True)
    if not problem.packed:
        return attention(inputs.q, inputs.k, inputs.v, **options)
    starts = [inputs.layout.device_starts(name) for name in ("query", "key")]
    longest = [max(int(each.max()), 1) for each in (inputs.layout.queries, inputs.layout.lengths)]
    out, lse = attention_varlen(inputs.q[0], inputs.k[0], inputs.v[0], *starts, *longest, **options)
    return out[None], lse[None]


@dataclass(frozen=True)
class ExpectedGradients:
    """What the gradients of one sequence and key/value head must be: name -> (float64 array (heads, rows, columns), what an error
    may be for each block of 64 rows (heads, blocks)). Of dsinks, (heads,) each."""

    sequence: int
    head_kv: int
    gradients: dict[str, tuple[object, np.ndarray]]


def units(inputs: Inputs, budget_flops: float | None, seed: int = 0) -> list[tuple[int, int]]:
    """The (sequence, key/value head) pairs to check: all, or so many, drawn by `seed`, that their reference takes about
    `budget_flops`, at least two; the longest sequence is among them."""
    problem, layout = inputs.problem, inputs.layout
    every = [(b, h) for b in range(problem.batch) for h in range(problem.heads_kv)]
    if budget_flops is None or not every:
        return every
    count = max(2, int(budget_flops / max(problem.flops / len(every), 1)))
    if count >= len(every):
        return every
    drawn = np.random.default_rng([seed, 65]).permutation(len(every))[:count - 1]
    longest = int(np.argmax(layout.queries * layout.lengths))
    return sorted({every[n] for n in drawn} | {(longest, problem.heads_kv - 1)})


def expect_gradients(given: GradientInputs, sequence: int, head_kv: int) -> ExpectedGradients:
    """The reference and the tolerance for one sequence and key/value head."""
    problem, xp = given.problem, given.inputs.xp
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        exact, variance = _differentiate(given, sequence, head_kv, np.float64)
        plain, _ = _differentiate(given, sequence, head_kv, np.float32)
    factor = FACTOR_SOFTCAP if problem.softcap else FACTOR
    rounding = 2.0 ** -(MANTISSA_BITS[problem.dtype] + 1)
    gradients = {}
    for name, values in exact.items():
        error = xp.abs(plain[name].astype(np.float64) - values)
        noise = rounding * xp.sqrt(variance[name])
        if name == "dsinks":
            allowed = host(factor * error + 4 * noise) + 1e-6 * (1 + abs(host(values)))
        else:
            worst = [_blocks(xp, each) for each in (error, noise, xp.abs(values))]
            allowed = factor * worst[0] + 2 * worst[1] + ulp(worst[2], problem.dtype)
        gradients[name] = values, allowed
    return ExpectedGradients(sequence, head_kv, gradients)


def _blocks(xp, values) -> np.ndarray:
    """(heads, rows, columns) -> (heads, blocks of 64 rows) float64 on the host: the largest of each block."""
    heads, rows, _ = values.shape
    each = xp.zeros((heads, -(-rows // ROWS) * ROWS), np.float64)
    each[:, :rows] = values.max(-1)
    return host(each.reshape(heads, -1, ROWS).max(-1))


def of_unit(layout, array, sequence: int, heads: slice, keys: bool):
    """The rows of one sequence of (B, rows, heads, columns), as (heads, rows, columns): a view."""
    starts, packed = (layout.key_starts, layout.problem.kv == "varlen") if keys else (layout.query_starts, layout.problem.packed)
    rows = array[0, int(starts[sequence]):int(starts[sequence + 1]), heads] if packed else array[sequence, :, heads]
    return rows.transpose(1, 0, 2)


@dataclass(frozen=True)
class _Rows:
    """Consecutive queries of one head, with the keys that some of them see."""

    head: int  # in the group
    begin: int
    end: int
    first: int  # keys
    last: int


def _chunks(problem: Problem, queries: int, keys: int, budget: int) -> Iterator[_Rows]:
    for head in range(problem.group):
        begin = 0
        while begin < queries:
            end = min(queries, begin + max(ROWS, budget // max(keys, 1) // ROWS * ROWS))
            first, last = visible_range(problem, np.array([begin, end - 1]), keys, queries)
            yield _Rows(head, begin, end, int(first[0]), max(int(last[1]), int(first[0])))
            begin = end


def _differentiate(given: GradientInputs, sequence: int, head_kv: int, dtype):
    """(gradients, the variance of what rounding P and dS adds to them, up to a factor): name -> (heads, rows, columns), or of
    dsinks (heads,). Exact if `dtype` is float64; plain, with its roundings, if it is float32."""
    inputs, problem, layout = given.inputs, given.problem, given.layout
    xp, group, plain = inputs.xp, problem.group, dtype == np.float32
    heads = slice(head_kv * group, (head_kv + 1) * group)

    def part(array, heads, keys):
        words = xp.ascontiguousarray(of_unit(layout, bits(array, problem.dtype), sequence, heads, keys))
        return to_float32(words.view(array.dtype), problem.dtype).astype(dtype)

    def low(values):
        return rounded(xp, values, problem.dtype) if plain else values

    q, dout = part(inputs.q, heads, False), part(given.dout, heads, False)
    k, v = (part(array, slice(head_kv, head_kv + 1), True)[0] for array in (inputs.k, inputs.v))
    queries, keys = q.shape[1], k.shape[0]
    zeros = {"dq": xp.zeros(q.shape, dtype), "dk": xp.zeros((1, *k.shape), dtype), "dv": xp.zeros((1, *v.shape), dtype)}
    if inputs.sinks is not None:
        zeros["dsinks"] = xp.zeros(group, dtype)
    result, variance = zeros, {name: array.copy() for name, array in zeros.items()}
    for rows in _chunks(problem, queries, keys, CHUNK_ELEMENTS["numpy" if xp is np else "cupy"]):
        head = head_kv * group + rows.head
        at, seen = slice(rows.begin, rows.end), slice(rows.first, rows.last)
        qs, ds_out, ks, vs = q[rows.head, at], dout[rows.head, at], k[seen], v[seen]
        s = low(matmul(xp, qs, xp.ascontiguousarray(ks.T)) * dtype(inputs.scale))
        slack = dtype(1)
        if problem.softcap:
            t = xp.tanh(s / dtype(problem.softcap))
            s, slack = t * dtype(problem.softcap), 1 - t * t
        index, key = xp.arange(rows.begin, rows.end)[:, None], xp.arange(rows.first, rows.last)[None]
        if inputs.alibi_slopes is not None:
            slopes = inputs.alibi_slopes
            slope = slopes[head] if slopes.ndim == 1 else slopes[sequence, head]
            s = s - slope.astype(dtype) * xp.abs(index + (keys - queries) - key).astype(dtype)
        first, end = visible_range(problem, index, keys, queries)
        visible = (key >= first) & (key < end)
        s = xp.where(visible, s, dtype(-np.inf))
        p, lse = _softmax(xp, s, None if inputs.sinks is None else inputs.sinks[head].astype(dtype), dtype)
        out = low(matmul(xp, low(p), vs))
        delta = (out * ds_out).sum(-1)
        products = (out * ds_out)**2
        if given.dlse is not None:
            dlse = given.dlse[0, head, int(layout.query_starts[sequence]) + rows.begin:][:rows.end - rows.begin] \
                if problem.packed else given.dlse[sequence, head, at]
            delta = delta - dlse.astype(dtype)
        delta = xp.where(lse == -np.inf, dtype(0), delta)
        dp = low(matmul(xp, ds_out, xp.ascontiguousarray(vs.T)))
        beyond = dp - delta[:, None]
        ds = low(xp.where(visible, p * beyond * slack, dtype(0)))
        lost = _lost_of(xp, p, problem.dtype)  # of P, which dS is made from, and of dS
        scale = dtype(inputs.scale)
        size = (xp.where(visible, xp.maximum(lost * abs(beyond), _lost_of(xp, p * beyond, problem.dtype)), dtype(0)) * scale)**2
        result["dq"][rows.head, at] = low(matmul(xp, ds, ks) * scale)
        result["dk"][0, seen] += matmul(xp, xp.ascontiguousarray(ds.T), qs) * scale
        result["dv"][0, seen] += matmul(xp, xp.ascontiguousarray(low(p).T), ds_out)
        if not plain:
            of_delta, weights = products.sum(-1), p * slack * scale  # D is of the rounded output: one error for a row's every key
            variance["dq"][rows.head, at] = matmul(xp, size, ks**2) + of_delta[:, None] * matmul(xp, weights, ks)**2
            variance["dk"][0, seen] += matmul(xp, xp.ascontiguousarray((size + of_delta[:, None] * weights**2).T), qs**2)
            variance["dv"][0, seen] += matmul(xp, xp.ascontiguousarray((lost**2).T), ds_out**2)
        if inputs.sinks is not None:
            weight = xp.where(lse == -np.inf, dtype(0), xp.exp(inputs.sinks[head].astype(dtype) - lse))
            result["dsinks"][rows.head] -= (weight * delta).sum()
            variance["dsinks"][rows.head] += (weight[:, None]**2 * products).sum()
    for name in ("dk", "dv"):
        result[name] = low(result[name])
    return result, variance


def _lost_of(xp, values, name: str):
    """The size that a normal number would have that loses as much as `values` when they are rounded to the dtype `name`: below
    its normal numbers half a step, which is a larger share, and never more than all of it."""
    digits, size = 2.0 ** (MANTISSA_BITS[name] + 1), abs(values)
    return xp.minimum(size * digits, xp.maximum(size, SMALLEST[name] * digits / 2))


def _softmax(xp, s, sink, dtype):
    """(probabilities, lse) of rows of scores; the sink is one more column, with no value."""
    column = xp.zeros((s.shape[0], 1), dtype) + (dtype(-np.inf) if sink is None else sink)
    s = xp.concatenate([s, column], -1)
    peak = s.max(-1, keepdims=True)
    p = xp.exp(s - xp.where(peak == -np.inf, dtype(0), peak))
    total = p.sum(-1, keepdims=True)
    some = xp.where(total == 0, dtype(1), total)
    lse = xp.where(total == 0, dtype(-np.inf), peak + xp.log(some))[:, 0]
    return p[:, :-1] / some, lse
