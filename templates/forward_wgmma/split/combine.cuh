// 8 columns of a row, all splits put together in their order, so that the result is the same bit for bit however blocks ran. A
// few splits are loaded at a time, so that one wait covers them.
DEVICE Partial merge_splits(const Params& p, int row, int column) {
    constexpr int AT_ONCE = 4;
    const Workspace workspace = workspace_of(p);
    Partial whole;
#pragma unroll 1
    for (int split = 0; split < p.num_splits; split += AT_ONCE) {
        Partial parts[AT_ONCE];
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            if (split + s >= p.num_splits) continue;
            const float* from = workspace.row(split + s, row) + column;
            load_global_floats(workspace.row_statistics(split + s, row), parts[s].maximum, parts[s].sum);
            const Floats4 left = load_global_floats(from), right = load_global_floats(from + 4);
#pragma unroll
            for (int c = 0; c < 4; ++c) parts[s].o[c] = left.x[c], parts[s].o[4 + c] = right.x[c];
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            const float top = max_of(whole.maximum, parts[s].maximum);
            const float before = weight_of(whole.maximum, top), weight = weight_of(parts[s].maximum, top);
            whole.maximum = top;
            whole.sum = before * whole.sum + weight * parts[s].sum;
#pragma unroll
            for (int c = 0; c < COLUMNS_PER_THREAD; ++c) whole.o[c] = before * whole.o[c] + weight * parts[s].o[c];
        }
    }
    return whole;
}

// Puts the splits of each row together, 8 columns a thread, and adds the sink.
constexpr int COMBINE_THREADS = 128;

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 1) forward_combine(const __grid_constant__ Params p) {
    constexpr int BLOCK_ROWS = COMBINE_THREADS / THREADS_PER_ROW;
    const int blocks = ceil_div(p.seqlen_q, BLOCK_ROWS), head_of_all = block_id() / blocks;
    const int row = thread_id() / THREADS_PER_ROW, column = thread_id() % THREADS_PER_ROW * COLUMNS_PER_THREAD;
    const int query = (block_id() - head_of_all * blocks) * BLOCK_ROWS + row;
    wait_for_dependencies();
    if (row >= BLOCK_ROWS || query >= p.seqlen_q) return;
    const int batch = head_of_all / p.heads_q, head = head_of_all - batch * p.heads_q;
    const Partial whole = merge_splits(p, head_of_all * p.seqlen_q + query, column);
    Element* out = p.out + batch * p.out_batch_stride + head * p.out_head_stride + query * p.out_row_stride + column;
    float* lse = p.lse && column == 0 ? p.lse + i64(head_of_all) * p.seqlen_q + query : nullptr;
    finish(whole, sink_logit_log2(p.sinks, p.sink_dtype, head), 1, out, lse);
}
