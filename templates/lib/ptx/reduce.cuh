#include "lib/base.cuh"

// Sums that several blocks add to, in global memory (sm_90). In what order they do is not said, so the last bits may differ.

// Adds four floats to those at `global`, a multiple of 16 bytes.
DEVICE void add_global_floats(float* global, const float (&v)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(global)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
