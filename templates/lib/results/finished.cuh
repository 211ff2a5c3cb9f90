// The way out of a block of queries that has seen all of its keys.

// Stores a group's output from its tile: by the copy engine, which goes on reading the tile for a while, unless the block has
// fewer heads than its box.
DEVICE void store_output(const Params& p, const OTile& tile, const float (&o)[1][TILES_V][4], const Work& work, int group) {
    const int warp_row = thread_id() % WARPGROUP_SIZE / WARP_SIZE * 16;
#pragma unroll
    for (int d = 0; d + 1 < TILES_V; d += 2) {
        u32 a[4];
        c_to_a<Element>(a, o[0][d], o[0][d + 1]);
        store_a(OTile{tile.base + warp_row * 128}, lane_id(), 0, d, a);
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
// The leader of a group waits here until the copy engine has read what the group stored last.
DEVICE void wait_until_read() { tma_store_wait_read(); }

// A sink is a key whose value is 0: where there is one, rows begin with it. `row` is this lane's first one.
DEVICE RowStatistics begin_rows(const Params& p, const Work& work, int row) {
    RowStatistics rows(p.scale_log2);
    if (!p.sinks) return rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half == 1 && UNIT_QUERIES % 16 == 0) {  // both rows are of one head
            rows.reference[1] = rows.reference[0], rows.sum[1] = rows.sum[0];
        } else {
            const float sink = sink_logit_log2(p.sinks, p.sink_dtype, min_of(work.head(row + half * 8), p.heads_q - 1));
            rows.reference[half] = max_of(LOWEST, sink);
            rows.sum[half] = c_column() == 0 ? exp2_approx(sink - rows.reference[half]) : 0;
        }
    }
    return rows;
}
// Divides by the sums and stores O and LSE. `tile` takes the place of the group's Q.
DEVICE void end_rows(const Params& p, float (&o)[1][TILES_V][4], const RowStatistics& rows, const Task& task, const OTile& tile,
              int group, int row) {
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] = row_sum(rows.sum[half]);
        const float factor = reciprocal_approx(sum[half] == 0 ? 1 : sum[half]);  // a row that saw no key is 0 already
#pragma unroll
        for (int d = 0; d < TILES_V; ++d) o[0][d][half * 2] *= factor, o[0][d][half * 2 + 1] *= factor;
    }
    if (p.lse && c_column() == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
            if (task.work.exists(row))
                p.lse[(i64(task.work.batch) * p.heads_q + task.work.head(row)) * p.seqlen_q + task.work.query(row)] =
                    (rows.reference_log2(half, p.scale_log2) + log2_approx(sum[half])) * LN2;
    }
    // No barrier: the group's products are done, and a warp's rows of the tile take the place of its own rows of Q.
    store_output(p, tile, o, task.work, group);
}
