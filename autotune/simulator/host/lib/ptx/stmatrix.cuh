// Twin of lib/ptx/stmatrix.cuh.

template <typename Tile> DEVICE void store_a(const Tile& tile, int lane, int row, int chunk, const u32 (&a)[4], AT) {
    sim::stmatrix_x4(tile.address(row, chunk, lane % 16, lane / 16), a, line);
}
