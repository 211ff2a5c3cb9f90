#include "lib/base.cuh"

// Register tiles to shared memory transposed (sm_90).

// A 16 x 16 tile in the layout of A, transposed, to rows [row, row + 16), columns [8 * chunk, 8 * chunk + 16) of a tile.
template <typename Tile> DEVICE void store_a_transposed(const Tile& tile, int lane, int row, int chunk, const u32 (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(tile.address(row, chunk, lane / 16 * 8 + lane % 8, lane / 8 % 2)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}
