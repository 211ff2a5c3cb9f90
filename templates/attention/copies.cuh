// How tiles come from global to shared memory: by cp.async, or under TURING through registers. Copies are closed in groups, and
// a wait is for all but the newest ones, as copy.cuh has it; those through registers are done when they are finished.

// The copies of one thread for one tile: `start` for each pass of an unrolled loop, then `finish`.
template <bool THROUGH_REGISTERS> struct Copies {
    DEVICE void start(int, bool copies, u32 address, const void* source, bool valid) {
        if (copies) copy_async_16(address, source, valid);
    }
    DEVICE void finish() {}
};
template <> struct Copies<true> {
    static constexpr int AT_ONCE = 4;  // loads in flight together: 16 registers
    Chunk held[AT_ONCE];
    u32 to[AT_ONCE];
    bool pending[AT_ONCE] = {};

    DEVICE void start(int pass, bool copies, u32 address, const void* source, bool valid) {
        const int place = pass % AT_ONCE;
        pending[place] = copies, to[place] = address;
        if (copies) held[place] = load_global_16(source, valid);
        if (place == AT_ONCE - 1) finish();
    }
    DEVICE void finish() {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (pending[i]) store_shared_16(to[i], held[i]), pending[i] = false;
    }
};

DEVICE void close_copies() { if constexpr (!TURING) copy_async_commit(); }
template <int PENDING> DEVICE void wait_for_copies() { if constexpr (!TURING) copy_async_wait<PENDING>(); }
