#include "lib/base.cuh"

// The way back of ldmatrix.cuh's load_a (sm_90): a 16 x 16 tile in the layout of A to rows [row, row + 16), columns
// [8 * chunk, 8 * chunk + 16) of a tile in shared memory.
template <typename Tile> DEVICE void store_a(const Tile& tile, int lane, int row, int chunk, const u32 (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(tile.address(row, chunk, lane % 16, lane / 16)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
