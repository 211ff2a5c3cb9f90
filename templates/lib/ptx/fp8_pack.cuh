#include "lib/base.cuh"

// Floats to 8-bit floats, e4m3 without infinities, to nearest, ties to even (sm_89). Beyond the largest it gives the largest.

DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
    u32 four;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}" : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}
