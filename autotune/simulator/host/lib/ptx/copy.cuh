// Twin of lib/ptx/copy.cuh.

DEVICE void copy_async_16(u32 smem_address, const void* global, bool valid, AT) {
    sim::copy_async(smem_address, global, 16, valid, line);
}
DEVICE void copy_async_commit(AT) { sim::copy_async_commit(line); }
template <int PENDING> DEVICE void copy_async_wait(AT) { sim::copy_async_wait(PENDING, line); }
