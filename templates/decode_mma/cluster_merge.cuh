// The splits of the same rows, put together by the blocks of a cluster in their shared memory: each block merges a share of the
// rows and columns of all of them, in the order of the keys.
#include "lib/ptx/cluster.cuh"

constexpr int MAX_CLUSTER = 16, AT_ONCE_IN_CLUSTER = 8;  // blocks, and those of which O is on its way to a thread at a time

// Leaves 8 columns of the block's own result where its first warp's stood, which nobody else reads. Maximum and sum stand behind
// a row's end, where rows are padded.
DEVICE u32 kept_partial(int row, int column) { return smem_base() + (row * PITCH + column) * 4; }
DEVICE void keep_partial(int row, int column, const Partial& part) {
    const SharedArray<float> to{kept_partial(row, column)};
#pragma unroll
    for (int c = 0; c < COLUMNS_PER_THREAD; ++c) to.set(c, part.o[c]);
    if (column == 0) store_shared_floats(kept_partial(row, HEAD_DIM_V), part.maximum, part.sum);
}

// All loads of a loop are under way at once: those of blocks that do not exist go to the last one. A round trip takes about 200
// clocks.
DEVICE void merge_cluster(const Params& p, const Piece& piece) {
    const int splits = piece.cut.splits, items = piece.rows.count * THREADS_PER_ROW, each = quotient(items + splits - 1, splits);
    const int end = min_of((piece.split + 1) * each, items);
    sync_cluster();  // all have left their results
#pragma unroll 1
    for (int i = piece.split * each + thread_id(); i < end; i += THREADS) {
        const int row = i / THREADS_PER_ROW, column = i % THREADS_PER_ROW * COLUMNS_PER_THREAD;
        if (BLOCK_HEADS_KV > 1 && !piece.rows.exists(row)) continue;
        float weight[MAX_CLUSTER], sum[MAX_CLUSTER];
        Partial whole;
#pragma unroll
        for (int s = 0; s < MAX_CLUSTER; ++s)
            load_remote_floats(remote_address(kept_partial(row, HEAD_DIM_V), min_of(s, splits - 1)), weight[s], sum[s]);
#pragma unroll
        for (int s = 0; s < MAX_CLUSTER; ++s) whole.maximum = max_of(whole.maximum, weight[s]);
#pragma unroll
        for (int s = 0; s < MAX_CLUSTER; ++s) {
            weight[s] = s < splits ? weight_of(weight[s], whole.maximum) : 0;
            if (s < splits) whole.sum += weight[s] * sum[s];
        }
#pragma unroll
        for (int first = 0; first < MAX_CLUSTER; first += AT_ONCE_IN_CLUSTER) {
            if (first >= splits) break;
            Floats4 left[AT_ONCE_IN_CLUSTER], right[AT_ONCE_IN_CLUSTER];
#pragma unroll
            for (int s = 0; s < AT_ONCE_IN_CLUSTER; ++s) {
                const u32 from = remote_address(kept_partial(row, column), min_of(first + s, splits - 1));
                left[s] = load_remote_floats(from);
                right[s] = load_remote_floats(from + 16);
            }
#pragma unroll
            for (int s = 0; s < AT_ONCE_IN_CLUSTER; ++s) {
                if (first + s >= splits) continue;
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    whole.o[c] += weight[first + s] * left[s].x[c], whole.o[4 + c] += weight[first + s] * right[s].x[c];
            }
        }
        finish(p, piece.rows, row, column, whole);
    }
    leave_cluster();  // when nobody reads this block's result any more
}
