// What a warpgroup and its loader do with whole tiles: copies, products, and the way out of the output.

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

// Groups take turns to multiply. Named barriers 1.. let the warps of a group meet; those after them pass a turn on.
struct Turns {
    int mine, following;
    DEVICE Turns(int group) : mine(1 + NUM_WARPGROUPS + group), following(1 + NUM_WARPGROUPS + (group + 1) % NUM_WARPGROUPS) {
        if (group == NUM_WARPGROUPS - 1) pass();
    }
    DEVICE void take() const { if constexpr (PING_PONG) named_barrier_sync(mine, 2 * WARPGROUP_SIZE); }
    DEVICE void pass() const { if constexpr (PING_PONG) named_barrier_arrive(following, 2 * WARPGROUP_SIZE); }
};

// The sinks of this lane's two rows, of which `row` is the first.
struct RowSinks {
    float logit_log2[2];
    DEVICE RowSinks(const Params& p, const Work& work, int row) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            logit_log2[half] = sink_logit_log2(p.sinks, p.sink_dtype, min_of(work.head(row + half * 8), p.heads_q - 1));
    }
};
// Divides O by the row sums and writes the LSE, if it is asked for. `row` is this lane's first one.
DEVICE void finish_rows(const Params& p, float (&o)[1][TILES_V][4], const RowStatistics<1>& rows, const RowSinks& sinks, const Work& work, int row) {
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
        const RowEnd end = finish_row(rows.maximum[0][half] * p.scale_log2, row_sum(rows.sum[0][half]), sinks.logit_log2[half]);
#pragma unroll
        for (int d = 0; d < TILES_V; ++d) o[0][d][half * 2] *= end.factor, o[0][d][half * 2 + 1] *= end.factor;
        if (p.lse && work.exists(row) && c_column() == 0)
            p.lse[(i64(work.batch) * p.heads_q + work.head(row)) * p.seqlen_q + work.query(row)] = end.lse;
    }
}

// Stores a group's output from its tile: by the copy engine, which goes on reading the tile for a while, unless the block has
// fewer heads than its box.
DEVICE void store_output(const Params& p, const OTile& tile, const float (&o)[1][TILES_V][4], const Work& work, int group) {
    const int warp_row = thread_id() % WARPGROUP_SIZE / WARP_SIZE * 16;
#pragma unroll
    for (int d = 0; d + 1 < TILES_V; d += 2) {
        u32 a[4];
        c_to_a<Element>(a, o[0][d], o[0][d + 1]);
        store_a(tile, lane_id(), warp_row, d, a);
    }
    if constexpr (TILES_V % 2 == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_shared_4(tile.address(warp_row + half * 8 + c_row(), TILES_V - 1) + c_column() * 2,
                           pack2<Element>(o[0][TILES_V - 1][half * 2], o[0][TILES_V - 1][half * 2 + 1]));
    }
    fence_async_proxy();
    named_barrier_sync(1 + group, WARPGROUP_SIZE);
    if (${sequence.whole}) {
        if (thread_id() % WARPGROUP_SIZE != 0) return;
#pragma unroll
        for (int panel = 0; panel < OTile::PANELS; ++panel)
            tma_store(p.out_map, tile.base + panel * OTile::PANEL_BYTES, panel * 64, work.query(group * UNIT_ROWS),
                      work.head_begin, work.batch);
        tma_store_commit();
    } else {
        for (int i = thread_id() % WARPGROUP_SIZE; i < UNIT_ROWS * TILES_V; i += WARPGROUP_SIZE) {
            const int row = group * UNIT_ROWS + i / TILES_V, chunk = i % TILES_V;
            Element* out = p.out + work.batch * p.out_batch_stride + work.head(row) * p.out_head_stride + work.query(row) * p.out_row_stride;
            if (work.exists(row)) store_global_16(out + chunk * 8, load_shared_16(tile.address(i / TILES_V, chunk)));
        }
        fence_async_proxy();  // these reads come before the copy of the next Q
        named_barrier_sync(1 + group, WARPGROUP_SIZE);
    }
}
