// Twin of lib/ptx/pairs.cuh.

DEVICE void copy_async_8(u32 smem_address, const void* global, bool valid, AT) {
    sim::copy_async(smem_address, global, 8, valid, line);
}
