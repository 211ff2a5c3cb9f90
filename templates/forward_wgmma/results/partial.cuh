// The way out of rows whose keys are dealt out to p.num_splits blocks: each leaves what comes of its keys in the workspace, in a
// slot for each split with a row for each query of each head, and forward_combine puts that together.
DEVICE Workspace workspace_of(const Params& p) {
    const int rows = p.batch * p.heads_q * p.seqlen_q;
    return {p.workspace, p.workspace + i64(p.num_splits) * rows * HEAD_DIM_V, rows};
}

DEVICE void wait_until_read() {}

DEVICE RowStatistics begin_rows(const Params& p, const Work&, int) { return RowStatistics(p.scale_log2); }
// Leaves a group's O, row maxima and row sums in the workspace. `row` is this lane's first one.
DEVICE void end_rows(const Params& p, const float (&o)[1][TILES_V][4], const RowStatistics& rows, const Task& task, const OTile&,
              int group, int row) {
    const Workspace workspace = workspace_of(p);
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
        const float sum = row_sum(rows.sum[half]);
        if (!task.work.exists(row)) continue;
        const int r = (task.work.batch * p.heads_q + task.work.head(row)) * p.seqlen_q + task.work.query(row);
        float* to = workspace.row(task.split, r) + c_column();
#pragma unroll
        for (int d = 0; d < TILES_V; ++d) store_global_floats(to + d * 8, o[0][d][half * 2], o[0][d][half * 2 + 1]);
        const float maximum = rows.reference[half] == LOWEST ? -INF : rows.reference_log2(half, p.scale_log2);
        if (c_column() == 0) store_global_floats(workspace.row_statistics(task.split, r), maximum, sum);
    }
    named_barrier_sync(1 + group, WARPGROUP_SIZE);  // all warps of the group are done with Q
}
