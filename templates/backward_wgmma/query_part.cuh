// The part of dQ that comes of a tile. Groups are in step by two barriers for each of the two buffers of dS: that all have written
// it, and that it has been read.
struct QueryPart {
    static constexpr int FILLED = 8, READ = 10, THREADS = KEY_GROUPS * WARPGROUP_SIZE;
    static constexpr int TURNS = DQ_PARTS == 1 ? KEY_GROUPS : 1;  // with parts of columns all multiply
    int group;
    int tiles = 0;  // so far

    DEVICE int part() const { return DQ_PARTS == 1 ? 0 : group; }
    DEVICE static bool turn_of(int group, int tile) { return TURNS == 1 || tile % TURNS == group; }
    // Leaves this group's dS; then, if it is its turn, starts the product.
    DEVICE bool start(float (&dq)[DQ_TILES][4], const u32 (&ds_fragments)[QUERY_STEPS][4], int row) const {
        const int buffer = tiles % 2, id = FILLED + buffer;
        if (TURNS > 1 && tiles >= 2 && !turn_of(group, tiles - 2)) named_barrier_sync(READ + buffer, THREADS);
        const KeySpace::dS tile = KeySpace::ds(buffer);
        if (COLUMN_PARTS == 1 || group == 0) {
#pragma unroll
            for (int step = 0; step < QUERY_STEPS; ++step)
                store_a_transposed(tile, lane_id(), step * 16, row / 8 + thread_id() % WARPGROUP_SIZE / WARP_SIZE * 2, ds_fragments[step]);
        }
        fence_async_proxy();
        if (!turn_of(group, tiles)) {
            named_barrier_arrive(id, THREADS);
            return false;
        }
        named_barrier_sync(id, THREADS);
        const u64 b = descriptor_mn_major(KeySpace::k().base + part() * (DQ_TILES / 8) * KeySpace::K::PANEL_BYTES, KeySpace::K::PANEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < KEY_ROWS / 16; ++step)
            wgmma_shared(dq, descriptor_advance(descriptor_k_major(tile.base + step / 4 * KeySpace::dS::PANEL_BYTES), step % 4 * 32),
                         descriptor_advance(b, step * 16 * 128), step > 0);
        wgmma_commit();
        return true;
    }
    // Adds the product, which has been waited for, to the sums of the tile's queries. They stand in the order of C fragments.
    DEVICE void add(const float (&dq)[DQ_TILES][4], float* sums) const {
        if (TURNS > 1) named_barrier_arrive(READ + tiles % 2, THREADS);
        const int warp = thread_id() % WARPGROUP_SIZE / WARP_SIZE;
#pragma unroll
        for (int n = 0; n < DQ_TILES; ++n) {
            if (part() * DQ_TILES + n >= HEAD_DIM / 8) break;
            add_global_floats(sums + ((warp * (HEAD_DIM / 8) + part() * DQ_TILES + n) * WARP_SIZE + lane_id()) * 4, dq[n]);
        }
    }
};
