#include "lib/base.cuh"

// The same value, of which the compiler knows nothing: what is computed from it is computed here, not hoisted out of the
// loop to occupy registers all along.
DEVICE int opaque(int x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}
