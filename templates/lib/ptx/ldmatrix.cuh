#include "lib/base.cuh"

// Fragments of mma.cuh from 16-bit tiles in shared memory. A Tile has u32 address(row, chunk, lane_row,
// lane_chunk), the byte address of the 16-byte chunk (8 elements) at their sums; each 8 x 8 matrix takes the address of
// one row of 8 elements from each of 8 lanes.

DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// A fragment: rows [row, row + 16), columns [8 * chunk, 8 * chunk + 16) of a row-major tile.
template <typename Tile> DEVICE void load_a(u32 (&a)[4], const Tile& tile, int row, int chunk) {
    int lane = lane_id();
    ldmatrix_x4(a, tile.address(row, chunk, lane % 16, lane / 16));
}

// Two B fragments for C = A * tile^T: n in [row, row + 16), k in [8 * chunk, 8 * chunk + 16).
// b[0], b[1] belong to n < row + 8, b[2], b[3] to the rest.
template <typename Tile> DEVICE void load_b_transposed(u32 (&b)[4], const Tile& tile, int row, int chunk) {
    int lane = lane_id();
    ldmatrix_x4(b, tile.address(row, chunk, lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

// Two B fragments for C = A * tile: k in [row, row + 16), n in [8 * chunk, 8 * chunk + 16).
template <typename Tile> DEVICE void load_b(u32 (&b)[4], const Tile& tile, int row, int chunk) {
    int lane = lane_id();
    ldmatrix_x4_trans(b, tile.address(row, chunk, lane % 16, lane / 16));
}
