// Twin of lib/ptx/stmatrix.cuh: each lane stores its own elements, where the matrices put them.

template <typename Tile> DEVICE void store_a(const Tile& tile, int lane, int row, int chunk, const u32 (&a)[4], AT) {
    for (int i = 0; i < 4; ++i)
        sim::shared_write(tile.address(row + i % 2 * 8 + lane / 4, chunk + i / 2) + lane % 4 * 4, &a[i], 4, line);
}
