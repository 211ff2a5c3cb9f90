#include "lib/base.cuh"

// Roles within a block: groups of 4 warps, barriers between some of a block's threads, and registers handed from group to
// group (sm_90a).

constexpr int WARPGROUP_SIZE = 4 * WARP_SIZE;

DEVICE int warpgroup_id() { return __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP_SIZE, 0); }

// Barrier `id` (1 to 15; 0 is sync_block) for `threads` threads: those that sync wait for all, those that arrive do not.
DEVICE void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// All warps of a group call it. The kernel needs a fixed register count at entry, from __launch_bounds__(threads, 1).
template <int REGISTERS> DEVICE void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> DEVICE void registers_claim() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
