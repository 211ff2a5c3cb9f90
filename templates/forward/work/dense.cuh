// Which queries a block works on, and in what order blocks do.
//
// A block owns BLOCK_QUERIES consecutive queries of each of BLOCK_HEADS query heads that share a key/value head. Its rows
// come in units of UNIT_ROWS, each of which holds the same queries of one head after the other. More heads and fewer
// queries see fewer keys in all under a window.
//
// `head_group` neighbouring sets of heads run together, all of one block of queries before the next, so that their K and V
// stay in L2; with `longest_first` the last queries, which see most keys under a causal mask, start first and the short
// blocks fill the tail.
constexpr int BLOCK_QUERIES = BLOCK_M / BLOCK_HEADS;
constexpr int UNIT_QUERIES = UNIT_ROWS / BLOCK_HEADS;
static_assert(BLOCK_M % UNIT_ROWS == 0 && UNIT_ROWS % BLOCK_HEADS == 0, "every head has the same queries");

struct Work {
    int batch, head_kv;
    int head_begin, head_count;  // query heads
    int query_begin, query_end;  // queries that exist

    Work() = default;
    DEVICE Work(const Params& p, int block) {
        const int query_blocks = ceil_div(p.seqlen_q, BLOCK_QUERIES);
        const int sets_per_kv = ceil_div(p.group, BLOCK_HEADS), sets = p.heads_q / p.group * sets_per_kv;
        const int section = block / (query_blocks * p.head_group);
        const int within = block - section * query_blocks * p.head_group;
        const int sets_here = min_of(p.head_group, sets * p.batch - section * p.head_group);
        const int query_block = within / sets_here;
        const int set_of_batch = section * p.head_group + within - query_block * sets_here;
        batch = set_of_batch / sets;
        const int set = set_of_batch - batch * sets;
        head_kv = set / sets_per_kv;
        const int head_in_group = (set - head_kv * sets_per_kv) * BLOCK_HEADS;
        head_begin = head_kv * p.group + head_in_group;
        head_count = min_of(BLOCK_HEADS, p.group - head_in_group);
        query_begin = (p.longest_first ? query_blocks - 1 - query_block : query_block) * BLOCK_QUERIES;
        query_end = min_of(query_begin + BLOCK_QUERIES, p.seqlen_q);
    }
    // Blocks of the whole problem.
    DEVICE static int count(const Params& p) {
        return ceil_div(p.seqlen_q, BLOCK_QUERIES) * (p.heads_q / p.group * ceil_div(p.group, BLOCK_HEADS)) * p.batch;
    }
    DEVICE int query(int row) const {
        return query_begin + (BLOCK_HEADS == 1 ? row : row / UNIT_ROWS * UNIT_QUERIES + row % UNIT_QUERIES);
    }
    DEVICE int head(int row) const { return head_begin + (BLOCK_HEADS == 1 ? 0 : row % UNIT_ROWS / UNIT_QUERIES); }
    DEVICE bool exists(int row) const {
        return query(row) < query_end && (BLOCK_HEADS == 1 || head(row) < head_begin + head_count);
    }
};
