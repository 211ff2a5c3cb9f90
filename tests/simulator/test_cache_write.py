"""The kernel that writes into caches, on the simulator: every slot, nothing but it, nearest 8-bit floats, strides of callers."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from autotune.check.numerics import array_dtype, from_float32, to_float32
from autotune.cuda.render import render_write
from autotune.kernels.base import params_format
from autotune.kernels.writing import FIELDS, STRIDES, CacheWrite
from autotune.simulator.job import TARGET, launch
from autotune.simulator.memory import Memory

pytestmark = pytest.mark.slow

TOKENS, HEADS, PAGES, PAGE_SIZE = 9, 3, 4, 5
SLOTS = np.array([7, -1, 0, 19, 4, 20, 12, 5, 2**40])  # one that is nobody's, two beyond the cache, first and last of pages


def values(shape, dtype, seed):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 4
    return from_float32(np, x, dtype)


@pytest.mark.parametrize("dtype, cache_dtype, dims, wide, scales, seed",
                         [("bf16", "bf16", (64, 64),
                           True, "none", 0),
                          ("fp16", "fp16", (16, 40),
                           False, "none", 1),
                          ("bf16", "e4m3", (64, 64),
                           True, "heads", 2),
                          ("fp16", "e4m3", (24, 8),
                           False, "one", 3),
                          ("bf16", "e4m3", (16, 16),
                           True, "number", 4)])
def test_write(dtype, cache_dtype, dims, wide, scales, seed):
    write = CacheWrite(dtype, cache_dtype, *dims)
    packed = values((TOKENS, HEADS, sum(dims) + 8), dtype, seed)
    new = {"k": packed[..., :dims[0]], "v": packed[..., dims[0] + 8:]}  # views, as of a fused projection
    if cache_dtype == "e4m3":
        new["k"][0, 0, :2] = from_float32(np, np.float32([60000, -60000]), dtype)  # beyond the largest 8-bit float
    caches = {name: np.full((PAGES, HEADS, PAGE_SIZE, dim), 0x3c, np.uint8).transpose(0, 2, 1, 3) if cache_dtype == "e4m3" else
              np.full((PAGES, PAGE_SIZE, HEADS, dim), 7).astype(array_dtype(cache_dtype)) for name, dim in zip("kv", dims)}
    before = {name: cache.copy() for name, cache in caches.items()}
    slots = SLOTS.astype(np.int64) if wide else SLOTS.clip(max=2**31 - 1).astype(np.int32)
    of_heads = np.array([0.5, 2.0, 1.25], np.float32) if scales == "heads" else np.array([0.75], np.float32)
    memory = Memory(at_end=bool(seed & 1))
    for name, array, writable in (("k", new["k"], False), ("v", new["v"], False), ("k_cache", caches["k"], True),
                                  ("v_cache", caches["v"], True), ("slots", slots, False), ("scales", of_heads, False)):
        memory.add(name, array, writable)
    where = memory.address
    lent = where["scales"] if scales in ("heads", "one") else 0
    strides = {**{f"{n}_{a}": new[n].strides[i] //
    2 for n in "kv" for i, a in enumerate(("token", "head"))}, **{f"{n}_{a}": caches[n].strides[i] //
     caches[n].itemsize for n in "kv" for i, a in enumerate(("page", "row", "cache_head"))}}
    params = struct.pack(
        params_format(FIELDS),
        where["k"],
        where["v"],
        where["k_cache"],
        where["v_cache"],
        where["slots"],
        lent, lent, *(strides[name] for name in STRIDES),
        PAGES * PAGE_SIZE, TOKENS, HEADS, PAGE_SIZE, int(wide),
        *(int(scales =="heads"),) *2, 0.75, 0.75)
    simulation = launch(render_write(write, TARGET, "host"), [write.step(TOKENS, HEADS)], memory, params, seed)
    assert simulation.ok, simulation.findings
    divisor = of_heads[:, None] if scales == "heads" else np.float32(0.75 if scales != "none" else 1)
    for name, cache in caches.items():
        expected = before[name]
        for token, slot in enumerate(SLOTS):
            if 0 <= slot < PAGES * PAGE_SIZE:
                row = new[name][token]
                if cache_dtype == "e4m3":
                    row = from_float32(np, np.clip(to_float32(row, dtype) / divisor, -448, 448), "e4m3").view(np.uint8)
                expected[slot // PAGE_SIZE, slot % PAGE_SIZE] = row
        assert np.array_equal(cache.view(f"u{cache.itemsize}"), expected.view(f"u{cache.itemsize}")), name


@pytest.mark.parametrize(
    "write, arch, match", [
        (CacheWrite(
            "fp32", "fp32", 64, 64), 90, "keys and values are fp32"), (CacheWrite(
                "bf16", "fp16", 64, 64), 90, "the cache is fp16"), (CacheWrite(
                    "bf16", "bf16", 60, 64), 90, "multiples of 8"), (CacheWrite(
                        "bf16", "e4m3", 64, 64), 80, "compute capability 8.9")])
def test_what_cannot_be_written(write, arch, match):
    assert match in write.reject(arch)
    assert CacheWrite("bf16", "bf16", 64, 128).reject(75) is None


@pytest.mark.parametrize("cache_dtype, target", [("bf16", "sm_80"), ("e4m3", "sm_90")])
def test_it_compiles(cache_dtype, target):
    from autotune.cuda import compile

    binary = compile.cached(render_write(CacheWrite("bf16", cache_dtype, 128, 128), target), target)
    assert compile.flaw(binary) is None and list(binary.entries) == ["cache_write"]
