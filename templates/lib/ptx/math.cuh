#include "lib/base.cuh"

// Scalar maths and number conversion as single instructions.

DEVICE float exp2_approx(float x) {  // 2 ulp; subnormal results are flushed to 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A product that is rounded before anything is added to it: the compiler makes no fused multiply-add of it.
DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }

DEVICE float reciprocal_approx(float x) {  // 1 ulp
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Of a row of floats as integers: the same order for floats that are not negative, and any of those is above all that are.
DEVICE int float_bits(float x) { return __float_as_int(x); }
DEVICE float bits_float(int bits) { return __int_as_float(bits); }
DEVICE int max_of_three(int a, int b, int c) { return __vimax3_s32(a, b, c); }  // one instruction from sm_90 on

// Two floats to one register of two 16-bit elements, round to nearest even; `low` takes the low half.
template <typename Element> DEVICE u32 pack2(float low, float high);
template <> DEVICE u32 pack2<bf16>(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <> DEVICE u32 pack2<fp16>(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
