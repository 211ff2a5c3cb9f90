"""How long it takes only to read a cache: a kernel that does nothing else, for `bench` to time beside attention over it.

Attention of a few queries can be no faster than this, so the share of its bandwidth says how much is left.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, Sequence

from ..check.inputs import Inputs
from ..core.problem import Problem

# (blocks for each SM, threads): which is fastest depends on how much there is to read, so all take part and the best counts.
SHAPES = ((4, 512), (2, 1024), (16, 256))

# Each thread has 8 loads in flight. The sum is stored only if it is a number that it never is, so that no load can be left out.
SOURCE = r"""
__device__ float read(const float4* data, long long count) {
    const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
    float sum = 0;
    long long i = first;
    for (; i + 7 * step < count; i += 8 * step) {
        float4 four[8];
        #pragma unroll
        for (int n = 0; n < 8; ++n) four[n] = __ldcs(data + i + n * step);
        #pragma unroll
        for (int n = 0; n < 8; ++n) sum += four[n].x + four[n].y + four[n].z + four[n].w;
    }
    for (; i < count; i += step) {
        const float4 four = __ldcs(data + i);
        sum += four.x + four.y + four.z + four.w;
    }
    return sum;
}
extern "C" __global__ void read_cache(const float4* k, const float4* v, long long k_count, long long v_count, float* sink) {
    const float sum = read(k, k_count) + read(v, v_count);
    if (sum == 1.2345e38f) *sink = sum;
}
"""


@lru_cache(maxsize=1)
def _kernel():
    import cupy

    return cupy.RawKernel(SOURCE, "read_cache")


def readers(problem: Problem, sets: Sequence[Inputs], sms: int) -> list[Callable[[int], None]]:
    """For each of `SHAPES`, a function that enqueues, for input set i, a read of as many bytes of K and of V as the queries see,
    on CuPy's current stream."""
    import cupy
    import numpy as np

    each = problem.cache_bytes // (problem.head_dim + problem.head_dim_v)
    counts = tuple(np.int64(each * dim // 16) for dim in (problem.head_dim, problem.head_dim_v))
    sink = cupy.zeros(1, cupy.float32)

    def reader(blocks: int, threads: int) -> Callable[[int], None]:
        return lambda i: _kernel()((sms * blocks,), (threads,), (sets[i].k, sets[i].v, *counts, sink))

    return [reader(*shape) for shape in SHAPES]
