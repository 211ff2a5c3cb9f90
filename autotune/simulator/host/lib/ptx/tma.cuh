// Twin of lib/ptx/tma.cuh. A TensorMap holds a sim::Tensor.

struct alignas(64) TensorMap { u64 words[16]; };
static_assert(sizeof(TensorMap) == sizeof(sim::Tensor), "both are 128 bytes");

constexpr u64 CACHE_EVICT_FIRST = 0x12F0000000000000ull;
constexpr u64 CACHE_EVICT_LAST = 0x14F0000000000000ull;

DEVICE void tma_prefetch_map(const TensorMap&) {}
DEVICE void tma_load(u32 smem_address, const TensorMap& map, u32 barrier, int column, int row, int head, int batch, u64, AT) {
    sim::tma_load(smem_address, &map, barrier, {column, row, head, batch}, line);
}
DEVICE void tma_store(const TensorMap& map, u32 smem_address, int column, int row, int head, int batch, AT) {
    sim::tma_store(&map, smem_address, {column, row, head, batch}, line);
}
DEVICE void tma_store_commit(AT) { sim::tma_store_commit(line); }
DEVICE void tma_store_wait_read(AT) { sim::tma_store_wait_read(line); }
DEVICE void fence_async_proxy(AT) { sim::fence_async_proxy(line); }
