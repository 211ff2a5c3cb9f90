#include "lib/base.cuh"

// TMA: boxes of a tensor to swizzled tiles in shared memory (sm_90).

// A CUtensorMap as the driver encodes it: rank 4, dimensions (column, row, head, batch).
struct alignas(64) TensorMap { u64 words[16]; };

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
// Starts copying a tile to the map's box whose first element is (column, row, head, batch); what lies outside the tensor is
// left out. The copy belongs to this thread's next commit.
DEVICE void tma_store(const TensorMap& map, u32 smem_address, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(reinterpret_cast<u64>(&map)), "r"(smem_address), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's committed stores have read their shared memory.
DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Orders this thread's ordinary accesses to shared memory before later ones by TMA and the tensor cores.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
