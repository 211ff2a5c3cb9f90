// Copies between global and shared memory, 16 bytes at a time.

// Starts an asynchronous copy that bypasses L1. Where `valid` is false nothing is read and zeros are written.
DEVICE void copy_async_16(u32 smem_address, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0) : "memory");
}
// Closes the group of copies that this thread has started since the last commit.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` of this thread's newest groups are still in flight.
template <int PENDING> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

struct Chunk { u32 word[4]; };  // 16 bytes

DEVICE void store_shared_4(u32 smem_address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(smem_address), "r"(value) : "memory");
}
DEVICE Chunk load_shared_16(u32 smem_address) {
    Chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "r"(smem_address) : "memory");
    return c;
}
DEVICE void store_global_16(void* global, const Chunk& c) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(global)), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}

// The same value, of which the compiler knows nothing: what is computed from it is computed here, not hoisted out of the
// loop to occupy registers all along.
DEVICE int opaque(int x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}
