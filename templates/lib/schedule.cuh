// Which rows, head and batch entry a block works on. `head_group` neighbouring (batch, head) pairs run together, all of
// one row block before the next, so that their K and V stay in L2; with `longest_first` the last rows, which see most
// keys under a causal mask, start first and the short blocks fill the tail.
struct WorkTile {
    int row_block, head, batch;

    DEVICE WorkTile(int block, int row_blocks, int heads, int batches, int head_group, int longest_first) {
        int pairs = heads * batches;
        int section = block / (row_blocks * head_group);
        int within = block - section * row_blocks * head_group;
        int pairs_here = min_of(head_group, pairs - section * head_group);
        int row = within / pairs_here;
        int pair = section * head_group + within - row * pairs_here;
        row_block = longest_first ? row_blocks - 1 - row : row;
        batch = pair / heads;
        head = pair - batch * heads;
    }
};
