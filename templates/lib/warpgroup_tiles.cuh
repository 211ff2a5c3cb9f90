// What a warpgroup and its loader do with whole tiles: copies and products.

// Starts the copies of one tile, a panel of 64 columns at a time.
template <typename Tile> DEVICE void load_tile(Tile tile, const TensorMap& map, u32 barrier, int row, int head, int batch, u64 hint) {
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
        tma_load(tile.base + panel * Tile::PANEL_BYTES, map, barrier, panel * 64, row, head, batch, hint);
}

// Starts S = Q K^T of this group's 64 rows.
DEVICE void start_qk(float (&s)[TILES_N][4], const QTile& q, const KTile& k) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < STEPS_D; ++d)
        wgmma_qk(s, descriptor_advance(descriptor_k_major(q.base + d / 4 * QTile::PANEL_BYTES), d % 4 * 32),
                 descriptor_advance(descriptor_k_major(k.base + d / 4 * KTile::PANEL_BYTES), d % 4 * 32), d > 0);
    wgmma_commit();
}
// Starts O += P V.
DEVICE void start_pv(float (&o)[TILES_V][4], const u32 (&p)[STEPS_N][4], const VTile& v) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < STEPS_N; ++n)
        wgmma_pv(o, p[n], descriptor_advance(descriptor_mn_major(v.base, VTile::PANEL_BYTES), n * 16 * 128));
    wgmma_commit();
}
DEVICE void pack(u32 (&p)[STEPS_N][4], const float (&s)[TILES_N][4]) {
#pragma unroll
    for (int n = 0; n < STEPS_N; ++n) c_to_a<Element>(p[n], s[2 * n], s[2 * n + 1]);
}

// Zeroes the rows of a V tile whose keys no row of the block sees: what lies there may be NaN, and 0 * NaN is NaN.
DEVICE void zero_hidden_rows(const VTile& v, const KvTiles<BLOCK_N>& tiles, int tile, int group) {
    const int hidden = tiles.first_key(tile) + BLOCK_N - tiles.key_end;  // at the end of the last tile
    if (hidden <= 0) return;
    for (int i = thread_id() % WARPGROUP_SIZE; i < hidden * TILES_V; i += WARPGROUP_SIZE)
        store_shared_16(v.address(BLOCK_N - 1 - i / TILES_V, i % TILES_V), Chunk{});
    fence_async_proxy();
    named_barrier_sync(1 + group, WARPGROUP_SIZE);
}
