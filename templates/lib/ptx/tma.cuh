// The copy engine: boxes of a tensor to swizzled tiles in shared memory (sm_90).

// A CUtensorMap as the driver encodes it: rank 4, dimensions (column, row, head, batch).
struct alignas(64) TensorMap { u64 words[16]; };

constexpr u64 CACHE_NORMAL = 0x1000000000000000ull;
constexpr u64 CACHE_EVICT_FIRST = 0x12F0000000000000ull;
constexpr u64 CACHE_EVICT_LAST = 0x14F0000000000000ull;

DEVICE void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(reinterpret_cast<u64>(&map)) : "memory");
}
// Starts copying the map's box whose first element is (column, row, head, batch). Its bytes, those of out-of-bounds
// elements (zeros) included, count towards `barrier`.
DEVICE void tma_load(u32 smem_address, const TensorMap& map, u32 barrier, int column, int row, int head, int batch, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
        :: "r"(smem_address), "l"(reinterpret_cast<u64>(&map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(hint)
        : "memory");
}
// Orders this thread's ordinary accesses to shared memory before later ones by the copy engine and the tensor cores.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
