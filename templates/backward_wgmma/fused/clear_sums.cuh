// The sums of dQ begin with 0; each block clears a share of them.
DEVICE void clear_sums(const Params& p) {
    const i64 count = dq_places(p) * (64 * HEAD_DIM / 4), each = ceil_div(count, i64(grid_size()));
    const i64 end = min_of(count, (block_id() + 1) * each);
    for (i64 i = block_id() * each + thread_id(); i < end; i += ROWS_THREADS) store_global_16(p.dq_sums + i * 4, Chunk{});
}
