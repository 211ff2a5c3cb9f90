#include "lib/base.cuh"

// Rings of buffers between one warp that loads and groups that use what it has loaded.

// The barriers of one ring of buffers: `full` counts TMA's bytes, `empty` the groups that are done with it.
struct Ring {
    u32 barriers;
    DEVICE u32 full(int stage) const { return barriers + stage * 16; }
    DEVICE u32 empty(int stage) const { return barriers + stage * 16 + 8; }
};
// A place in a ring, and the parity of the phase that its barriers are in.
template <int STAGES> struct Place {
    int stage = 0;
    u32 phase = 0;
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};
