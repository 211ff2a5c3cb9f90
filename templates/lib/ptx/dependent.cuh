#include "lib/base.cuh"

// Programmatic dependent launch (sm_90): a kernel may be put in place while those before it in the stream still run.

// Waits until the kernels before this one have ended and all that they wrote is visible here: nothing that they touch is
// touched before. Every block waits before it ends, so that this kernel's end means the end of those before it too.
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The same, when these have been computed: ptxas would wait first, and put off until then whatever does not depend on it.
DEVICE void wait_for_dependencies(const void* first, const void* second, int third) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, %1;\nsetp.ne.xor.s32 p, %2, 0, p;\n"
                 "@p griddepcontrol.wait;\n@!p griddepcontrol.wait;\n}" :: "l"(first), "l"(second), "r"(third) : "memory");
}

// Has L2 fetch so many bytes, which is right before wait_for_dependencies too: nothing comes to registers or to L1, and what
// kernels before this one still write lands in L2 as well. The address and `bytes` are multiples of 16.
DEVICE void prefetch_l2(const void* global, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(__cvta_generic_to_global(global)), "r"(bytes) : "memory");
}
// What kernels before this one may still write: a guess of what will stand there. Past L1, which would give the old value to
// later loads too.
DEVICE int load_guess(const int* global) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(global)) : "memory");
    return value;
}

// Says that the next kernel in the stream may be put in place; it is once all blocks have said so or ended.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
