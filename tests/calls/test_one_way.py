"""A warm call goes straight: how often it changes modules."""

import sys
from pathlib import Path

import numpy as np
import pytest
from fake_arrays import FakeGpu, Tensor, aligned, fake_gpu  # noqa: F401 (a fixture)

import autotune
from autotune.check.numerics import array_dtype

ROOT = str(Path(autotune.__file__).parent)


def tensor(*shape):
    array = aligned(shape, array_dtype("bf16"))
    array[...] = 0
    return Tensor(array)


def integers(numbers):
    return Tensor(np.array(numbers, np.int32))


def calls():
    q, k, v = tensor(1, 64, 4, 64), tensor(1, 64, 2, 64), tensor(1, 64, 2, 64)
    starts, pages = integers([0, 30, 64]), tensor(40, 16, 2, 64)
    lengths, table = integers([100, 200]), integers(np.arange(32).reshape(2, 16))
    paged = dict(cache_seqlens=lengths, page_table=table)
    token, cache, ragged, begins = tensor(2, 1, 4, 64), tensor(2, 256, 2, 64), tensor(44, 4, 64), integers([0, 1, 44])
    return {
        "dense": (8, lambda: autotune.attention(q, k, v, causal=True)),
        "varlen": (11, lambda: autotune.attention_varlen(q[0], k[0], v[0], starts, starts, 40, 40, causal=True)),
        "decode": (8, lambda: autotune.attention_with_kvcache(token, cache, cache, cache_seqlens=lengths)),
        "paged decode": (8, lambda: autotune.attention_with_kvcache(token, pages, pages, **paged)),
        "mixed": (14, lambda: autotune.attention_with_kvcache(ragged, pages, pages, cu_seqlens_q=begins, max_seqlen_q=43,
                                                              **paged)),
    }


@pytest.mark.parametrize("name", calls())
def test_a_warm_call_changes_modules_seldom(gpu, name, monkeypatch):
    monkeypatch.setattr(FakeGpu, "launchKernel", lambda self, *arguments: self.launches.append(arguments))  # computes nothing
    made = {}
    for maker in ("empty", "dense"):  # gives the same array each time, as a caching allocator does: it has maps already
        make = getattr(gpu.library, maker)

        def again(like, *shape, make=make):
            return made.setdefault((like.shape, *shape), make(like, *shape))

        monkeypatch.setattr(gpu.library, maker, again)
    most, call = calls()[name]
    call(), call()
    stack, steps = [None], []

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        if not file.startswith(ROOT):
            return
        if event == "call":
            if file != stack[-1]:
                steps.append(Path(file).stem)
            stack.append(file)
        elif event == "return" and len(stack) > 1:
            stack.pop()

    before, count = sys.getprofile(), len(gpu.launches)
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert len(gpu.launches) > count and len(steps) <= most, " ".join(steps)
