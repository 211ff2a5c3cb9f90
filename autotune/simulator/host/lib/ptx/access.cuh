// Twin of lib/ptx/access.cuh.

struct Chunk { u32 word[4]; };

DEVICE void store_shared_4(u32 smem_address, u32 value, AT) { sim::shared_write(smem_address, &value, 4, line); }
DEVICE void store_shared_16(u32 smem_address, const Chunk& c, AT) { sim::shared_write(smem_address, c.word, 16, line); }
DEVICE Chunk load_shared_16(u32 smem_address, AT) {
    Chunk c;
    memcpy(c.word, sim::shared_read(smem_address, 16, line), 16);
    return c;
}
DEVICE void store_global_16(void* global, const Chunk& c, AT) { sim::global_write(global, c.word, 16, line); }
