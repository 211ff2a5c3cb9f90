// What pieces leave in the workspace, put together, always in the order of the keys, so that the result is the same bit for bit
// however blocks ran.

DEVICE Workspace workspace_of(const Params& p) {  // a slot for each piece
    return {p.partial_o, p.partial_statistics, BLOCK_M - HEAD_ROWS + min_of(HEAD_ROWS, p.group * p.seqlen_q)};
}

DEVICE void store_partial(const Workspace& workspace, int slot, int row, int column, const Partial& part) {
    float* to = workspace.row(slot, row) + column;
    store_global_floats(to, {part.o[0], part.o[1], part.o[2], part.o[3]});
    store_global_floats(to + 4, {part.o[4], part.o[5], part.o[6], part.o[7]});
    if (column == 0) store_global_floats(workspace.row_statistics(slot, row), part.maximum, part.sum);
}

// Writes 8 columns of a finished row, sink included.
DEVICE void finish(const Params& p, const Rows& rows, int row, int column, const Partial& whole) {
    const int head = rows.head(p, row), query = rows.first_query + rows.query(p, row);
    Element* out = p.out + rows.batch * p.out_batch_stride + head * p.out_head_stride + query * p.out_row_stride + column;
    float* lse = p.lse && column == 0 ? p.lse + rows.batch * p.lse_batch_stride + head * p.lse_head_stride + query : nullptr;
    finish(whole, sink_logit_log2(p.sinks, p.sink_dtype, head), output_scale(p, rows.kv_head(row)), out, lse);
}

// Merges the splits of `rows`, with all THREADS threads of the block. Shared memory takes the statistics of all splits, and O of
// as many splits as there is room for at a time, so that one wait covers them: a wait for L2 takes 0.8 us.
template <int THREADS> DEVICE void merge_splits(const Params& p, const Rows& rows, const Cut& cut, u32 smem, int smem_bytes) {
    const Workspace workspace = workspace_of(p);
    const SharedArray<float> statistics{smem};
    const int stride = unsplit_pieces(p, cut.queries.count), first = cut.first_slot + rows.unsplit;  // slots of the splits
    const int statistics_bytes = round_up(cut.splits * rows.count * 8, 16), slot_bytes = rows.count * HEAD_DIM_V * 4;
    const int at_once = min_of(quotient(smem_bytes - statistics_bytes, slot_bytes), cut.splits);
    const u32 slots = smem + statistics_bytes;
    auto start = [&](int split) {  // copies of O of the splits from this one on
        const int chunks = slot_bytes / 16, here = min_of(at_once, cut.splits - split), slots_ahead = quotient(THREADS, chunks);
        int slot = quotient(thread_id(), chunks), chunk = thread_id() - slot * chunks;
#pragma unroll 4
        for (int i = thread_id(); i < here * chunks; i += THREADS) {
            copy_async_16(slots + i * 16, workspace.row(first + (split + slot) * stride, 0) + chunk * 4, true);
            slot += slots_ahead;
            chunk += THREADS - slots_ahead * chunks;
            if (chunk >= chunks) chunk -= chunks, ++slot;
        }
        copy_async_commit();
    };
    start(0);
#pragma unroll 1
    for (int i = thread_id(); i < cut.splits * rows.count; i += THREADS) {
        const int split = quotient(i, rows.count), row = i - split * rows.count;
        float maximum, sum;
        load_global_floats(workspace.row_statistics(first + split * stride, row), maximum, sum);
        statistics.set(2 * i, maximum);
        statistics.set(2 * i + 1, sum);
    }
    copy_async_wait<0>();
    sync_block();
    int loaded = 0;  // the first split in shared memory
#pragma unroll 1
    for (int begin = 0; begin < rows.count * THREADS_PER_ROW; begin += THREADS) {
        const int i = begin + thread_id(), row = min_of(i / THREADS_PER_ROW, rows.count - 1);
        const int column = i % THREADS_PER_ROW * COLUMNS_PER_THREAD;
        Partial whole;
#pragma unroll 8
        for (int split = 0; split < cut.splits; ++split)
            whole.maximum = max_of(whole.maximum, statistics.get(2 * (split * rows.count + row)));
#pragma unroll 1
        for (int split = 0; split < cut.splits; split += at_once) {
            if (split != loaded) {
                sync_block();  // nobody reads the splits before them any more
                start(split);
                copy_async_wait<0>();
                sync_block();
                loaded = split;
            }
            const int here = min_of(at_once, cut.splits - split);
#pragma unroll 4
            for (int s = 0; s < here; ++s) {
                const int at = 2 * ((split + s) * rows.count + row);
                const u32 from = slots + s * slot_bytes + (row * HEAD_DIM_V + column) * 4;
                const Floats4 left = load_shared_floats(from), right = load_shared_floats(from + 16);
                const float weight = weight_of(statistics.get(at), whole.maximum);
                whole.sum += weight * statistics.get(at + 1);
#pragma unroll
                for (int c = 0; c < 4; ++c) whole.o[c] += weight * left.x[c], whole.o[4 + c] += weight * right.x[c];
            }
        }
        if (i < rows.count * THREADS_PER_ROW && (BLOCK_HEADS_KV == 1 || rows.exists(row))) finish(p, rows, row, column, whole);
    }
}
