// Finds the work of this block, for blocks of ROWS keys or queries of `heads` heads.
template <int ROWS, bool KEYS> DEVICE bool find_share(const Params& p, int heads, Share& share) {
    const int blocks = ceil_div(KEYS ? p.seqlen_k : p.seqlen_q, ROWS);
    int row_block, head;
    split_turn(p, block_id(), blocks, heads * p.batch, row_block, head);
    share.batch = head / heads;
    share.head = head - share.batch * heads;
    share.sequence = Sequence(p, share.batch);
    share.begin = (!KEYS && p.longest_first ? blocks - 1 - row_block : row_block) * ROWS;
    return true;
}
