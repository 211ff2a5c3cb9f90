// What the warps of a block leave in shared memory for each other, and how it is put together.

// Leaves a warp's O, row maxima and row sums in shared memory.
DEVICE void store_warp(const float (&o)[TILES_M][TILES_V][4], const RowStatistics<TILES_M>& rows, float scale_log2,
                       const Rows& block) {
    const u32 base = smem_base() + warp_id() * WARP_O_BYTES;
    const SharedArray<float> statistics{smem_base() + STATISTICS_OFFSET + warp_id() * BLOCK_M * 8};
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + c_row();
            const float sum = row_sum(rows.sum[m][half]);
            if (!block.exists(row)) continue;
            store_row(base + row * PITCH * 4, o[m], head_of(m, half) * TILES_OF_HEAD, half);
            if (c_column() == 0) {
                statistics.set(2 * row, in_log2(rows.maximum[m][half], scale_log2));
                statistics.set(2 * row + 1, sum);
            }
        }
}

// The warps' results for 8 columns of a row, put together.
DEVICE Partial merge_warps(int row, int column) {
    const SharedArray<float> statistics{smem_base() + STATISTICS_OFFSET};
    Partial whole;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; ++warp)
        whole.maximum = max_of(whole.maximum, statistics.get(2 * (warp * BLOCK_M + row)));
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; ++warp) {
        const int at = 2 * (warp * BLOCK_M + row);
        const float weight = weight_of(statistics.get(at), whole.maximum);
        whole.sum += weight * statistics.get(at + 1);
        const u32 from = smem_base() + warp * WARP_O_BYTES + (row * PITCH + column) * 4;
        const Floats4 left = load_shared_floats(from), right = load_shared_floats(from + 16);
#pragma unroll
        for (int c = 0; c < 4; ++c) whole.o[c] += weight * left.x[c], whole.o[4 + c] += weight * right.x[c];
    }
    return whole;
}
