// Which queries of which sequence a block works on, and in what order, where the lengths stand on the device.
//
// A block owns BLOCK_QUERIES consecutive queries of each of BLOCK_HEADS query heads that share a key/value head. Its rows
// come in units of UNIT_ROWS, each of which holds the same queries of one head after the other. The first block of a sequence
// is the one that is not full: under a causal mask its rows see the fewest keys, so those that are missing cost little.
//
// The work of a launch is counted in items, one for a block of queries and a set of heads. Within a sequence, `head_group`
// neighbouring sets of heads run together, all of one block of queries before the one before it, so that their K and V stay in
// L2. With `longest_first`, sequences with many keys come before those with a quarter as many, and short items fill the tail.
constexpr int BLOCK_QUERIES = BLOCK_M / BLOCK_HEADS;
constexpr int UNIT_QUERIES = UNIT_ROWS / BLOCK_HEADS;
static_assert(BLOCK_M % UNIT_ROWS == 0 && UNIT_ROWS % BLOCK_HEADS == 0, "every head has the same queries");

DEVICE int head_sets(const Params& p) { return p.heads_q / p.group * ceil_div(p.group, BLOCK_HEADS); }
DEVICE int query_blocks(const Sequence& s) { return ceil_div(s.row_end - s.row_begin, BLOCK_QUERIES); }
DEVICE int items_of(const Params& p, const Sequence& s) { return query_blocks(s) * head_sets(p); }

struct Work : Keys {
    static constexpr int batch = 0;  // packed arrays are one batch entry
    int head_kv;
    int head_begin, head_count;  // query heads; none if there is nothing to do
    int query_begin, query_end;  // rows that exist

    Work() = default;
    DEVICE Work(const Params& p, const Sequence& sequence, int item) : Keys(sequence) {
        const int blocks = query_blocks(sequence), sets_per_kv = ceil_div(p.group, BLOCK_HEADS);
        const int section = item / (blocks * p.head_group);
        const int within = item - section * blocks * p.head_group;
        const int sets_here = min_of(p.head_group, head_sets(p) - section * p.head_group);
        const int later_blocks = within / sets_here;
        const int set = section * p.head_group + within - later_blocks * sets_here;
        head_kv = set / sets_per_kv;
        const int head_in_group = (set - head_kv * sets_per_kv) * BLOCK_HEADS;
        head_begin = head_kv * p.group + head_in_group;
        head_count = min_of(BLOCK_HEADS, p.group - head_in_group);
        query_end = sequence.row_end - later_blocks * BLOCK_QUERIES;
        query_begin = max_of(query_end - BLOCK_QUERIES, sequence.row_begin);
    }
    DEVICE bool exists() const { return head_count > 0; }
    DEVICE int query(int row) const {
        return query_begin + (BLOCK_HEADS == 1 ? row : row / UNIT_ROWS * UNIT_QUERIES + row % UNIT_QUERIES);
    }
    DEVICE int head(int row) const { return head_begin + (BLOCK_HEADS == 1 ? 0 : row % UNIT_ROWS / UNIT_QUERIES); }
    DEVICE bool exists(int row) const {
        return query(row) < query_end && (BLOCK_HEADS == 1 || head(row) < head_begin + head_count);
    }
};

DEVICE int sum_in_warp(int x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
DEVICE int most_in_warp(int x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x = max_of(x, shuffle_xor(x, mask));
    return x;
}

// Goes through the items of a launch in order, as a warp: its lanes look at as many sequences at a time, and all of them call.
struct Walk {
    int items;              // of the launch
    int level, next_level;  // of the sequences that are visited, and the highest below it that this lane has met
    int first, before;      // sequence of lane 0, and items before it

    DEVICE explicit Walk(const Params& p) : items(0), level(-1), next_level(-1), first(0), before(0) {
#pragma unroll 1
        for (int n = lane_id(); n < p.batch; n += WARP_SIZE) {
            const Sequence sequence(p, n);
            items += items_of(p, sequence);
            level = max_of(level, level_of(p, sequence));
        }
        items = sum_in_warp(items);
        level = most_in_warp(level);
    }
    // A power of 4 that the key tiles of a sequence's last block reach; -1 without rows.
    DEVICE static int level_of(const Params& p, const Sequence& s) {
        if (s.row_end == s.row_begin) return -1;
        if (!p.longest_first) return 0;
        int level = 0;
        const KvTiles<BLOCK_N> last(Mask(p, s), max_of(s.row_end - BLOCK_QUERIES, s.row_begin), s.row_end);
        for (int tiles = last.end; tiles >= 4; tiles /= 4) ++level;
        return level;
    }
    // The work of an item, which must not come before those that were asked for earlier; none beyond the last one.
    DEVICE Work find(const Params& p, int item) {
        while (level >= 0) {
            const Sequence mine(p, first + lane_id());
            const int my_level = level_of(p, mine);
            const int my_items = my_level == level ? items_of(p, mine) : 0;
            int through = my_items;  // those of this sequence and of lanes before it
#pragma unroll
            for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
                const int below = shuffle(through, max_of(lane_id() - distance, 0));
                if (lane_id() >= distance) through += below;
            }
            const int lane = sum_in_warp(int(item >= before + through));  // the first one that the item is not beyond
            if (lane < WARP_SIZE) {
                Sequence found;
                found.number = first + lane, found.diagonal = shuffle(mine.diagonal, lane);
                found.key_begin = shuffle(mine.key_begin, lane), found.key_end = shuffle(mine.key_end, lane);
                found.row_begin = shuffle(mine.row_begin, lane), found.row_end = shuffle(mine.row_end, lane);
                return Work(p, found, item - before - shuffle(through - my_items, lane));
            }
            before += shuffle(through, WARP_SIZE - 1);
            if (my_level < level) next_level = max_of(next_level, my_level);
            first += WARP_SIZE;
            if (first >= p.batch) first = 0, level = most_in_warp(next_level), next_level = -1;
        }
        return Work{};
    }
};
