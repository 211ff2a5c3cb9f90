#include "lib/base.cuh"

// Single accesses to shared and global memory of chosen widths.

struct Chunk { u32 word[4]; };  // 16 bytes

DEVICE void store_shared_4(u32 smem_address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(smem_address), "r"(value) : "memory");
}
DEVICE void store_shared_16(u32 smem_address, const Chunk& c) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(smem_address), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}
DEVICE Chunk load_shared_16(u32 smem_address) {
    Chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "r"(smem_address) : "memory");
    return c;
}
DEVICE void store_global_16(void* global, const Chunk& c) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(global)), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}
