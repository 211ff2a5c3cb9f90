// Twin of lib/ptx/ldmatrix.cuh.

DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address, AT) { sim::ldmatrix_x4(r, address, false, line); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address, AT) { sim::ldmatrix_x4(r, address, true, line); }

template <typename Tile> DEVICE void load_a(u32 (&a)[4], const Tile& tile, int row, int chunk, AT) {
    int lane = lane_id();
    ldmatrix_x4(a, tile.address(row, chunk, lane % 16, lane / 16), line);
}
template <typename Tile> DEVICE void load_b_transposed(u32 (&b)[4], const Tile& tile, int row, int chunk, AT) {
    int lane = lane_id();
    ldmatrix_x4(b, tile.address(row, chunk, lane / 16 * 8 + lane % 8, lane / 8 % 2), line);
}
template <typename Tile> DEVICE void load_b(u32 (&b)[4], const Tile& tile, int row, int chunk, AT) {
    int lane = lane_id();
    ldmatrix_x4_trans(b, tile.address(row, chunk, lane % 16, lane / 16), line);
}
