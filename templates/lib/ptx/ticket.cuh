#include "lib/base.cuh"

// Counters in global memory that several blocks draw numbers from.

// Adds 1 to a counter that runs from 0 to `last` and around, and gives its value before. So whoever draws `last` leaves the
// counter as it was found.
DEVICE u32 take_ticket(u32* counter, u32 last) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(__cvta_generic_to_global(counter)), "r"(last) : "memory");
    return before;
}
