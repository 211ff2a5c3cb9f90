#include "lib/base.cuh"

// Asynchronous copies from global to shared memory, 16 bytes at a time (sm_80).

// Starts an asynchronous copy that bypasses L1. Where `valid` is false nothing is read and zeros are written.
DEVICE void copy_async_16(u32 smem_address, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0) : "memory");
}
// Closes the group of copies that this thread has started since the last commit.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` of this thread's newest groups are still in flight.
template <int PENDING> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }
