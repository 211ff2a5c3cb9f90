// What the loader works out for a block and the groups read: integer divisions are for one thread.
struct alignas(64) Task {
    Work work;
    KvTiles<BLOCK_N> tiles;
};

// A block goes round the work of the grid in lanes that turn back at each end, so that under a causal mask, where work
// shrinks from first to last, the sums come out even.
DEVICE int block_of_round(int round) {
    return round * grid_size() + (round % 2 ? grid_size() - 1 - block_id() : block_id());
}
