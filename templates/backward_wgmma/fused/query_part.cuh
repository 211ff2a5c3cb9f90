// The part of dQ that comes of a tile: dS K over all keys of the block. The groups leave dS in shared memory, one of them, by
// turns, multiplies, and adds the result to what blocks of other keys add. With DQ_PARTS each multiplies its part of the columns
// instead. Groups are in step by two barriers for each of the two buffers of dS: that all have written
// it, and that it has been read.
struct QueryPart {
    static constexpr int FILLED = 8, READ = 10, THREADS = KEY_GROUPS * WARPGROUP_SIZE;
    static constexpr int TURNS = DQ_PARTS == 1 ? KEY_GROUPS : 1;  // with parts of columns all multiply
    int group;
    int tiles = 0;  // so far

    DEVICE int part() const { return DQ_PARTS == 1 ? 0 : group; }
    DEVICE int buffer() const { return tiles % 2; }
    // Whether it is this group's turn to multiply dS of all groups by K.
    DEVICE bool multiplies() const { return turn_of(tiles); }
    DEVICE bool turn_of(int tile) const { return TURNS == 1 || tile % TURNS == group; }
    // Leaves this group's dS.
    DEVICE void leave(const u32 (&ds_fragments)[QUERY_STEPS][4], int row) const {
        if (TURNS > 1 && tiles >= 2 && !turn_of(tiles - 2)) named_barrier_sync(READ + buffer(), THREADS);
        const int chunk = opaque(row / 8 + thread_id() % WARPGROUP_SIZE / WARP_SIZE * 2);
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; ++step) store_a_transposed(KeySpace::ds(buffer()), lane_id(), step * 16, chunk, ds_fragments[step]);
        fence_async_proxy();
        if (!multiplies()) named_barrier_arrive(FILLED + buffer(), THREADS);
    }
    // Starts the product, once all have left theirs.
    DEVICE void start(float (&dq)[DQ_TILES][4]) const {
        named_barrier_sync(FILLED + buffer(), THREADS);
        const KeySpace::dS tile = KeySpace::ds(buffer());
        const u64 b = descriptor_mn_major(KeySpace::k().base + part() * (DQ_TILES / 8) * KeySpace::K::PANEL_BYTES, KeySpace::K::PANEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < KEY_ROWS / 16; ++step)
            wgmma_shared(dq, descriptor_advance(descriptor_k_major(tile.base + step / 4 * KeySpace::dS::PANEL_BYTES), step % 4 * 32),
                         descriptor_advance(b, step * 16 * 128), step > 0);
        wgmma_commit();
    }
    // Adds the product, which has been waited for, to the sums of the tile's queries. They stand in the order of C fragments.
    DEVICE void add(const float (&dq)[DQ_TILES][4], float* sums, int place) const {
        if (TURNS > 1) named_barrier_arrive(READ + buffer(), THREADS);
        const int warp = opaque(thread_id() % WARPGROUP_SIZE / WARP_SIZE), first = part() * DQ_TILES;
        sums += i64(place) * (KEY_QUERIES * HEAD_DIM) + ((warp * (HEAD_DIM / 8) + first) * WARP_SIZE + lane_id()) * 4;
#pragma unroll
        for (int n = 0; n < DQ_TILES; ++n) {
            if (first + n >= HEAD_DIM / 8) break;
            add_global_floats(sums + n * WARP_SIZE * 4, dq[n]);
        }
    }
};
