// What a warpgroup and its loader do with whole tiles: copies, products, and the way out of the gradients.

// Starts the copies of ROWS rows of a tile from row `row` of a tensor on, a box of 64 columns at a time.
template <int ROWS, int BOX_ROWS, typename Tile>
DEVICE void load_boxes(Tile tile, int tile_row, const TensorMap& map, u32 barrier, int row, int head, int batch, u64 hint) {
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
#pragma unroll 1
        for (int r = 0; r < ROWS; r += BOX_ROWS)
            tma_load(tile.base + panel * Tile::PANEL_BYTES + (tile_row + r) * 128, map, barrier, panel * 64, row + r, head, batch, hint);
}

// Starts C = A B^T of 64 rows of A from `row` on and all rows of B, over COLUMNS columns that both have. Descriptors of an A that
// stays are made each time: hoisted out of a loop they would be 4 registers for each 16 columns.
template <int COLUMNS, int TILES, typename ATile, typename BTile>
DEVICE void start_transposed(float (&c)[TILES][4], const ATile& a, int row, const BTile& b) {
    const u32 rows = a.base + opaque(row) * 128;
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < ceil_div(COLUMNS, 16); ++d)
        wgmma_qk(c, descriptor_advance(descriptor_k_major(rows + d / 4 * ATile::PANEL_BYTES), d % 4 * 32),
                 descriptor_advance(descriptor_k_major(b.base + d / 4 * BTile::PANEL_BYTES), d % 4 * 32), d > 0);
    wgmma_commit();
}
// Starts C += A B with A in registers: as many columns of B as C has, from its panel `panel` on.
template <int STEPS, int TILES, typename BTile>
DEVICE void start_rounded(float (&c)[TILES][4], const u32 (&a)[STEPS][4], const BTile& b, int panel, bool accumulate) {
    const u64 descriptor = descriptor_mn_major(b.base + panel * BTile::PANEL_BYTES, BTile::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) wgmma_pv(c, a[k], descriptor_advance(descriptor, k * 16 * 128), k > 0 || accumulate);
    wgmma_commit();
}
template <int STEPS, int TILES> DEVICE void pack(u32 (&a)[STEPS][4], const float (&c)[TILES][4]) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) c_to_a<Element>(a[k], c[2 * k], c[2 * k + 1]);
}
template <int STEPS, int TILES> DEVICE void pack_products(u32 (&a)[STEPS][4], float (&c)[TILES][4], const float (&factors)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[n][i] *= factors[n][i];
    pack(a, c);
}

// Zeroes rows [first, end) of a tile that TMA has filled with what no row of this block may meet: 0 * NaN is NaN. All
// threads of a group call it.
template <int ROWS, int COLUMNS> DEVICE void zero_rows(const SmemTile<ROWS, COLUMNS>& tile, int first, int end) {
    constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;
#pragma unroll 1
    for (int i = thread_id() % WARPGROUP_SIZE; i < (end - first) * CHUNKS; i += WARPGROUP_SIZE)
        store_shared_16(tile.address(first + i / CHUNKS, i % CHUNKS), Chunk{});
}

// Stores 64 rows of C fragments, times `factor` and rounded, by way of a tile that this group alone uses from row `row` on:
// columns of the result from 8 * `chunk` on. `rows` of them exist.
template <int ROWS, int COLUMNS, int TILES>
DEVICE void store_rows(const SmemTile<ROWS, COLUMNS>& tile, int row, int chunk, const float (&c)[TILES][4], float factor, Element* to,
                       i64 row_stride, int rows) {
    const int warp_row = opaque(row + thread_id() % WARPGROUP_SIZE / WARP_SIZE * 16);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_shared_4(tile.address(warp_row + half * 8 + c_row(), chunk + n) + c_column() * 2,
                           pack2<Element>(c[n][half * 2] * factor, c[n][half * 2 + 1] * factor));
    sync_warp();
#pragma unroll 4
    for (int i = lane_id(); i < 16 * TILES; i += WARP_SIZE) {
        const int r = warp_row + i / TILES, column = chunk + i % TILES;
        if (r - row < rows) store_global_16(to + (r - row) * row_stride + column * 8, load_shared_16(tile.address(r, column)));
    }
}
