// Which rows of which head a block works on: queries of a query head, or keys of a key/value head.
//
// `head_group` neighbouring heads run together, all of one block of rows before the next, so that what they read stays in L2.
// Blocks of keys run from the first on and, with `longest_first`, blocks of queries from the last on: under a causal mask those
// have most to do.
struct Share {
    Sequence sequence;
    int batch;  // entry of the arrays: packed ones have one
    int head;
    int begin;  // the first row
};

// Block `turn` of those of `blocks` blocks of rows for each of `heads` heads, as (block of rows, head).
DEVICE void split_turn(const Params& p, int turn, int blocks, int heads, int& row_block, int& head) {
    const int section = turn / (blocks * p.head_group);
    const int within = turn - section * blocks * p.head_group;
    const int heads_here = min_of(p.head_group, heads - section * p.head_group);
    row_block = within / heads_here;
    head = section * p.head_group + within - row_block * heads_here;
}
