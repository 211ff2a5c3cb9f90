// Finds the work of this block, for blocks of ROWS keys or queries of `heads` heads: each warp's lanes look at as many sequences
// at a time. False if there is none: the grid is made for the worst lengths.
template <int ROWS, bool KEYS> DEVICE bool find_share(const Params& p, int heads, Share& share) {
    int before = 0;  // blocks of the sequences before those that are looked at
#pragma unroll 1
    for (int first = 0; first < p.batch; first += WARP_SIZE) {
        const Sequence mine(p, first + lane_id());
        const int rows = KEYS ? mine.key_end - mine.key_begin : mine.row_end - mine.row_begin;
        const int blocks = ceil_div(rows, ROWS) * heads;
        int through = blocks;  // with those of lanes before this one
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int below = shuffle(through, max_of(lane_id() - distance, 0));
            if (lane_id() >= distance) through += below;
        }
        const int all = shuffle(through, WARP_SIZE - 1);
        if (block_id() >= before + all) {
            before += all;
            continue;
        }
        int lane = int(block_id() >= before + through);  // lanes that the block is beyond, added up
#pragma unroll
        for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) lane += shuffle_xor(lane, mask);
        Sequence found;
        found.number = first + lane, found.diagonal = shuffle(mine.diagonal, lane);
        found.key_begin = shuffle(mine.key_begin, lane), found.key_end = shuffle(mine.key_end, lane);
        found.row_begin = shuffle(mine.row_begin, lane), found.row_end = shuffle(mine.row_end, lane);
        const int blocks_here = ceil_div(KEYS ? found.key_end - found.key_begin : found.row_end - found.row_begin, ROWS);
        int row_block;
        split_turn(p, block_id() - before - shuffle(through - blocks, lane), blocks_here, heads, row_block, share.head);
        share.sequence = found;
        share.batch = 0;
        share.begin = (KEYS ? found.key_begin : found.row_begin)
                      + (!KEYS && p.longest_first ? blocks_here - 1 - row_block : row_block) * ROWS;
        return true;
    }
    return false;
}
