"""Array arithmetic that inputs and references share: the same code for numpy and cupy, given as `xp`.

bfloat16 arrays carry ml_dtypes' dtype, but all arithmetic on them goes through their bits, so nothing depends on how
much of bfloat16 an array library implements. Matrix products on the GPU use a kernel of our own: cuBLAS is a download of
half a gigabyte that the check of a kernel does not need.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

MANTISSA_BITS = {"bf16": 7, "fp16": 10, "fp32": 23, "e4m3": 3}
SMALLEST = {"bf16": 2.0**-133, "fp16": 2.0**-24, "fp32": 2.0**-149, "e4m3": 2.0**-9}  # subnormal
NAN_BITS = {"bf16": 0x7FC0, "fp16": 0x7E00, "fp32": 0x7FC00000, "e4m3": 0x7F}
E4M3_LARGEST = 448.0
EXPONENT_BITS = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}  # all ones in the exponent: inf or NaN


class DtypeMissing(RuntimeError):
    """numpy has no such dtype, and the package that brings it is not installed."""


@lru_cache(maxsize=None)
def array_dtype(name: str) -> np.dtype:
    """The numpy dtype of a problem's dtype name (bf16, fp16, fp32; e4m3 as unsigned bytes, which CuPy has)."""
    if name == "bf16":
        try:
            import ml_dtypes
        except ImportError as error:
            raise DtypeMissing(f"bf16 needs ml_dtypes, which cannot be imported ({error}); pip install "
                               f"'ml_dtypes>=0.5'") from None
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"fp16": np.float16, "fp32": np.float32, "e4m3": np.uint8}[name])


_WORDS = {"fp32": np.uint32, "e4m3": np.uint8}


def bits(array, name: str):
    """`array` of dtype `name` as unsigned integers of the same size. A view."""
    return array.view(_WORDS.get(name, np.uint16))


def to_float32(array, name: str):
    """`array` of dtype `name` as float32, exactly."""
    if name == "bf16":
        return (bits(array, name).astype(np.uint32) << 16).view(np.float32)
    if name == "e4m3":
        word = array.astype(np.int32)
        exponent, mantissa = word >> 3 & 15, (word & 7).astype(np.float32)
        power = np.float32(2) ** (exponent + (exponent == 0) - 10).astype(np.float32)
        size = (mantissa + (exponent > 0) * np.float32(8)) * power
        size[(word & 127) == NAN_BITS["e4m3"]] = np.nan
        return size * (1 - (word >> 7) * 2).astype(np.float32)
    return array.astype(np.float32)


def from_float32(xp, array, name: str):
    """float32 `array` rounded to dtype `name`, to nearest, ties to even; NaN stays NaN. e4m3 has no infinity: larger numbers
    become its largest."""
    if name == "e4m3":
        return _to_e4m3(xp, array)
    if name != "bf16":
        return array.astype(array_dtype(name))
    word = xp.ascontiguousarray(array).view(np.uint32)
    rounded = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)
    rounded |= xp.isnan(array).astype(np.uint16) * np.uint16(NAN_BITS["bf16"])  # rounding may carry a NaN over to zero
    return rounded.view(array_dtype("bf16"))


def _to_e4m3(xp, array):
    size = xp.minimum(xp.abs(array), np.float32(E4M3_LARGEST))
    word = xp.ascontiguousarray(size).view(np.uint32)
    normal = (word + 0x7FFFF + ((word >> 20) & 1)) >> 20  # 3 bits of mantissa; the exponent's bias is 127
    small = xp.rint(size * np.float32(2**9)).astype(np.uint32)
    result = xp.where(size < 2.0**-6, small, normal - (120 << 3)).astype(np.uint8)
    result = xp.where(xp.isnan(array), np.uint8(NAN_BITS["e4m3"]), result)
    return result | (xp.signbit(array).astype(np.uint8) << 7)


def rounded(xp, array, name: str):
    """float32 `array` rounded to dtype `name` and back to float32."""
    return array if name == "fp32" else to_float32(from_float32(xp, array, name), name)


def empty(xp, shape, name: str):
    """An uninitialised array of dtype `name`."""
    return xp.empty(shape, _WORDS.get(name, np.uint16)).view(array_dtype(name))


def host(array) -> np.ndarray:
    """`array` as numpy; waits for the GPU if it lives there."""
    return array.get() if hasattr(array, "get") else array


def ulp(value: np.ndarray, name: str) -> np.ndarray:
    """The distance between neighbouring numbers of dtype `name` at magnitude `value` (float64)."""
    exponent = np.floor(np.log2(np.maximum(value, SMALLEST[name])))
    return np.maximum(np.exp2(exponent - MANTISSA_BITS[name]), SMALLEST[name])


def matmul(xp, a, b):
    """(..., M, K) @ (..., K, N) of one dtype, float32 or float64, accumulated in that dtype. Batch dims must be equal."""
    if xp is np:
        return np.matmul(a, b)
    *batch, m, k = a.shape
    n = b.shape[-1]
    out = xp.zeros((*batch, m, n), a.dtype)
    if out.size and k:
        blocks = prod(batch) * -(-m // 8) * -(-n // 64)
        _kernel("product_f32" if a.dtype == np.float32 else "product_f64")(
            (blocks,), (64,),
            (xp.ascontiguousarray(a), xp.ascontiguousarray(b), out, np.int32(m), np.int32(n), np.int32(k)))
    return out


# A thread computes 8 rows of one column: neighbouring threads read neighbouring elements of b and the same ones of a.
PRODUCT_SOURCE = r"""
template <typename T>
__device__ void product(const T* a, const T* b, T* c, int m, int n, int k) {
    const long long columns = (n + 63) / 64, bands = (m + 7) / 8, block = blockIdx.x;
    const int j = (int)(block % columns) * 64 + threadIdx.x;
    const int i0 = (int)(block / columns % bands) * 8;
    const long long z = block / columns / bands;
    if (j >= n) return;
    const T* row[8];
    T sum[8];
    for (int r = 0; r < 8; ++r) {
        row[r] = a + (z * m + (i0 + r < m ? i0 + r : m - 1)) * k;
        sum[r] = 0;
    }
    const T* column = b + z * k * n + j;
    #pragma unroll 4
    for (int x = 0; x < k; ++x) {
        const T value = column[(long long)x * n];
        #pragma unroll
        for (int r = 0; r < 8; ++r) sum[r] += row[r][x] * value;
    }
    for (int r = 0; r < 8; ++r)
        if (i0 + r < m) c[(z * m + i0 + r) * n + j] = sum[r];
}
extern "C" __global__ void product_f32(const float* a, const float* b, float* c, int m, int n, int k) {
    product(a, b, c, m, n, k);
}
extern "C" __global__ void product_f64(const double* a, const double* b, double* c, int m, int n, int k) {
    product(a, b, c, m, n, k);
}
"""


@lru_cache(maxsize=None)
def _kernel(name: str):
    import cupy

    return cupy.RawKernel(PRODUCT_SOURCE, name, options=("--std=c++17",))
