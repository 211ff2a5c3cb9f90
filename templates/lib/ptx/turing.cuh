#include "lib/base.cuh"
#include "lib/ptx/math.cuh"
#include "lib/ptx/fp16.cuh"
#include "lib/ptx/mma.cuh"
#include "lib/ptx/access.cuh"

// Half precision with what sm_75 has: a type of its own, for which the wrappers of the matrix multiply and of rounding stand for
// other instructions, and a copy through registers, as there is no asynchronous one.

struct half_turing { unsigned short bits; };

// The type of a tensor's elements in a kernel that can do without sm_80. There is none for bf16 under TURING.
template <bool TURING, typename Element> struct ElementOf { using Type = Element; };
template <typename Element> struct ElementOf<true, Element>;
template <> struct ElementOf<true, fp16> { using Type = half_turing; };

template <> DEVICE u32 pack2<half_turing>(float low, float high) {
    return u32(float_to_half(low).bits) | u32(float_to_half(high).bits) << 16;
}

DEVICE void mma_m16n8k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
template <> DEVICE void mma_m16n8k16<half_turing>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_m16n8k8(c, a[0], a[1], b0);  // the left half of A and the upper one of B
    mma_m16n8k8(c, a[2], a[3], b1);
}

// Where `valid` is false nothing is read and the result is zeros.
DEVICE Chunk load_global_16(const void* global, bool valid) {
    Chunk c;
    asm volatile(
        "{\n"
        ".reg .pred valid;\n"
        "setp.ne.b32 valid, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}\n" : "=&r"(c.word[0]), "=&r"(c.word[1]), "=&r"(c.word[2]), "=&r"(c.word[3])
        : "l"(__cvta_generic_to_global(global)), "r"(int(valid)) : "memory");
    return c;
}
