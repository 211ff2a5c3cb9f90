// What a warpgroup and its loader do with whole tiles: copies and products.

// Starts the copies of one tile, a panel of 64 columns at a time.
template <typename Tile>
DEVICE void load_tile(Tile tile, const TensorMap& map, u32 barrier, int row, int head, int batch, u64 hint) {
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
        tma_load(tile.base + panel * Tile::PANEL_BYTES, map, barrier, panel * 64, row, head, batch, hint);
}

// A buffer of a ring, and its descriptor as an operand.
template <typename Tile> struct Buffer : Tile { u64 descriptor; };
// The buffers of a ring. The descriptor of the first one has been through a shuffle, so that the compiler keeps it: it would make
// it anew for each product, in 5 instructions.
template <typename Tile> struct Buffers {
    Tile first;
    u32 low;
    u64 high;
    DEVICE Buffers(Tile tile, u64 descriptor) : first(tile), low(shuffle(u32(descriptor), 0)), high(descriptor >> 32 << 32) {}
    DEVICE Buffer<Tile> operator()(int stage) const {
        return {{first.base + stage * Tile::BYTES}, high | u32(low + stage * (Tile::BYTES >> 4))};
    }
};
// Starts S = Q K^T of this group's 64 rows.
DEVICE void start_qk(float (&s)[TILES_N][4], const QTile& q, const Buffer<KTile>& k) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < STEPS_D; ++d)
        wgmma_qk(s, descriptor_advance(descriptor_k_major(q.base + d / 4 * QTile::PANEL_BYTES), d % 4 * 32),
                 descriptor_advance(k.descriptor, d / 4 * KTile::PANEL_BYTES + d % 4 * 32), d > 0);
    wgmma_commit();
}
// Starts O = P V, or O += P V.
DEVICE void start_pv(float (&o)[TILES_V][4], const u32 (&p)[STEPS_N][4], const Buffer<VTile>& v, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < STEPS_N; ++n) wgmma_pv(o, p[n], descriptor_advance(v.descriptor, n * 16 * 128), n > 0 || accumulate);
    wgmma_commit();
}
DEVICE void pack(u32 (&p)[STEPS_N][4], const float (&s)[TILES_N][4]) {
#pragma unroll
    for (int n = 0; n < STEPS_N; ++n) c_to_a<Element>(p[n], s[2 * n], s[2 * n + 1]);
}

// Zeroes `count` rows of a V tile, whose keys no row of the block sees: what lies there may be NaN, and 0 * NaN is NaN.
DEVICE void zero_rows(const VTile& v, int first, int count, int group) {
    if (count <= 0) return;
#pragma unroll 1
    for (int i = thread_id() % WARPGROUP_SIZE; i < count * TILES_V; i += WARPGROUP_SIZE)
        store_shared_16(v.address(first + i / TILES_V, i % TILES_V), Chunk{});
    fence_async_proxy();
    named_barrier_sync(1 + group, WARPGROUP_SIZE);
}
