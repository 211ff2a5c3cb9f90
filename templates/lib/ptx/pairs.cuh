#include "lib/base.cuh"

// Two floats that stand together in global memory (8 bytes): what a backward keeps of each query.

// Starts an asynchronous copy of a pair to shared memory. Where `valid` is false nothing is read and zeros are written.
DEVICE void copy_async_8(u32 smem_address, const void* global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 8 : 0) : "memory");
}
