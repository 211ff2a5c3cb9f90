// Programmatic dependent launch (sm_90): a kernel may be put in place while those before it in the stream still run.

// Waits until the kernels before this one have ended and all that they wrote is visible here: nothing of global memory is
// touched before. Every block waits before it ends, so that this kernel's end means the end of those before it too.
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The same, when these have been computed: ptxas would wait first, and put off until then whatever does not depend on it.
DEVICE void wait_for_dependencies(const void* first, const void* second, int third) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, %1;\nsetp.ne.xor.s32 p, %2, 0, p;\n"
                 "@p griddepcontrol.wait;\n@!p griddepcontrol.wait;\n}" :: "l"(first), "l"(second), "r"(third) : "memory");
}

// Says that the next kernel in the stream may be put in place; it is once all blocks have said so or ended.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
