#include "lib/base.cuh"

// What blocks that share a result need: partial results in fp32, and a ticket that tells the last of them.

struct Floats4 { float x[4]; };

DEVICE void store_shared_floats(u32 smem_address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(smem_address), "f"(first), "f"(second) : "memory");
}
DEVICE Floats4 load_shared_floats(u32 smem_address) {
    Floats4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x[0]), "=f"(v.x[1]), "=f"(v.x[2]), "=f"(v.x[3]) : "r"(smem_address) : "memory");
    return v;
}
DEVICE void store_global_floats(float* global, const Floats4& v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(global)), "f"(v.x[0]), "f"(v.x[1]), "f"(v.x[2]), "f"(v.x[3]) : "memory");
}
DEVICE void store_global_floats(float* global, float first, float second) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" :: "l"(__cvta_generic_to_global(global)), "f"(first), "f"(second) : "memory");
}
// Past L1, which does not see what other SMs write.
DEVICE Floats4 load_global_floats(const float* global) {
    Floats4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x[0]), "=f"(v.x[1]), "=f"(v.x[2]), "=f"(v.x[3]) : "l"(__cvta_generic_to_global(global)) : "memory");
    return v;
}
DEVICE void load_global_floats(const float* global, float& first, float& second) {
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(first), "=f"(second) : "l"(__cvta_generic_to_global(global)) : "memory");
}

DEVICE u32 load_global_4(const void* global) {
    u32 value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(global)) : "memory");
    return value;
}

// Orders this thread's accesses to global memory before its later ones, for every thread of the GPU.
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Starts an asynchronous copy of 16 bytes that will not be needed again, and has L2 fetch the PREFETCH bytes around them. They
// are the first that L2 gives up, so that what is prefetched for the next kernel stays. Where `valid` is false nothing is read
// and zeros are written. ptxas makes an instruction of it that an H200 does not know where `smem_address` is the sum of a uniform
// and another register; after an exclusive or, as in swizzled tiles, it is none. Such a binary is refused (compile.flaw).
template <int PREFETCH> DEVICE void stream_async_16(u32 smem_address, const void* global, bool valid) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if constexpr (PREFETCH == 256)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;"
                     :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0), "l"(policy) : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                     :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0), "l"(policy) : "memory");
}
