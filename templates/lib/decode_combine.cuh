// Merges the splits of each sequence, head and tile of rows, one a block, after decode_mma without tickets.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 1) decode_combine(const __grid_constant__ Params p) {
    const int unsplit = unsplit_pieces(p, p.seqlen_q), batch = block_id() / unsplit, number = block_id() - batch * unsplit;
//% if dependent_launch
    launch_dependents();
    wait_for_dependencies();
//% endif
    const Cut cut = cut_of_batch(p, batch);
    if (cut.splits == 1 || number >= unsplit_pieces(p, cut.queries.count)) return;  // finished, or no such rows
    merge_splits<COMBINE_THREADS>(p, Rows(p, cut, number), cut, smem_base(), COMBINE_BYTES);
}
