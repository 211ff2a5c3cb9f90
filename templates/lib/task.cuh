// How blocks come by their work. Without p.tickets each has one block of the grid. With it there is a block for each place on
// the GPU: they begin with their own numbers and draw further ones from the counter, so that whoever is done early takes more.
// The counter comes back to 0 when all have drawn a number beyond the last.
DEVICE int draw_block(const Params& p, int blocks) {
    return p.tickets ? grid_size() + int(take_ticket(p.tickets, blocks - 1)) : blocks;
}

// What the loader works out for a block and the groups read: integer divisions are for one thread.
struct alignas(64) Task {
    Work work;
    KvTiles<BLOCK_N> tiles;
    bool exists;  // false: there is no more work
//% if split_keys
    int split;
//% endif
};
