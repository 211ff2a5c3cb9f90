// Twin of lib/ptx/transpose.cuh. Element (i, j) of the 16 x 16 tile goes to row j, column i.

template <typename Tile> DEVICE void store_a_transposed(const Tile& tile, int lane, int row, int chunk, const u32 (&a)[4], AT) {
    for (int i = 0; i < 8; ++i) {
        const int from_row = lane / 4 + i / 2 % 2 * 8, from_column = lane % 4 * 2 + i % 2 + i / 4 * 8;
        const unsigned short element = a[i / 2] >> i % 2 * 16;
        sim::shared_write(tile.address(row + from_column, chunk + from_row / 8) + from_row % 8 * 2, &element, 2, line);
    }
}
