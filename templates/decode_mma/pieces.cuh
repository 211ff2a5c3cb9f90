// Which part of which sequence a block works on, cut on the device from the lengths that stand there.
//
// The rows of one key/value head are packed: row r is query r / group of head r % group in the group, so that all of them
// share K and V; a block takes HEAD_ROWS of them, of each of its BLOCK_HEADS_KV heads. The tiles of BLOCK_N keys that a
// sequence's queries see are cut into splits of nearly equal size, about p.pieces over all sequences and heads, in proportion
// to their lengths. Neighbouring blocks work on neighbouring heads of the same keys, because a cache keeps heads side by side.
// Pieces of sequences that are split have slots in the workspace, in order: about p.pieces, however many sequences there are.
//
// Where p.query_starts says how many queries each sequence has, they stand packed, one sequence after the other. A sequence
// without queries has no pieces, and neither has one of more than p.seqlen_q: that is another kernel's.
constexpr int MAX_SPLITS = 4096 / BLOCK_M, HEAD_ROWS = BLOCK_M / BLOCK_HEADS_KV;

// n / d for n >= 0 and d > 0 with a quotient below 2^22: a third of the instructions of a division.
DEVICE int quotient(int n, int d) {
    const int near = int(float(n) * reciprocal_approx(float(d))), rest = n - near * d;
    return near + int(rest >= d) - int(rest < 0);
}
// n / d for 0 <= n < 2^31, given 2^(31 + shift) / d rounded up.
DEVICE int divide(int n, u32 magic, int shift) { return int(u64(u32(n)) * magic >> (31 + shift)); }

struct Queries { int begin, count; };  // of a sequence: the first one's row among those that are packed, and how many

// The sequence of a piece, and how it is cut.
struct Cut {
    int batch, length;
    Queries queries;
    int splits;
    int first_piece, first_slot;  // of the sequence
};

template <typename T> DEVICE T total_in_warp(T x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

DEVICE int row_tiles(const Params& p, int queries) { return ceil_div(p.group * queries, HEAD_ROWS); }
// Pieces of a sequence of so many queries that is not split.
DEVICE int unsplit_pieces(const Params& p, int queries) { return ceil_div(p.heads_kv, BLOCK_HEADS_KV) * row_tiles(p, queries); }

// How lengths and query_starts are read.
struct Plainly { DEVICE static int read(const int* place) { return *place; } };

template <typename How> DEVICE int length_of(const Params& p, int batch) {
    return p.lengths ? max_of(min_of(How::read(p.lengths + batch), p.seqlen_k), 0) : p.seqlen_k;
}
template <typename How> DEVICE Queries queries_of(const Params& p, int batch) {
    if (!p.query_starts) return {0, p.seqlen_q};
    const int begin = How::read(p.query_starts + batch), count = int(u32(How::read(p.query_starts + batch + 1)) - u32(begin));
    return {begin, count > p.seqlen_q ? 0 : max_of(count, 0)};
}
// The tiles of a sequence's keys that some query sees, first to last. They begin at multiples of BLOCK_N, so that none lies
// across the border of two pages unless pages are smaller than tiles.
struct Tiles {
    int key_begin, key_end;     // keys that some query sees; keys outside are loaded as zeros
    int origin, count;          // the first tile's first key
    int left_edge, right_edge;  // tiles before left_edge hold keys that a query is past, tiles from right_edge on keys to come

    DEVICE Tiles(const Mask& mask, int queries) : key_begin(mask.key_begin(0)) {
        key_end = max_of(mask.key_end(queries), key_begin);
        origin = key_begin / BLOCK_N * BLOCK_N;
        count = key_end > key_begin ? ceil_div(key_end - origin, BLOCK_N) : 0;
        left_edge = ceil_div(max_of(mask.shared_begin(queries) - origin, 0), BLOCK_N);
        right_edge = max_of(mask.shared_end(0) - origin, 0) / BLOCK_N;
    }
    DEVICE bool needs_mask(int tile) const { return tile < left_edge || tile >= right_edge; }
    DEVICE int first_key(int tile) const { return origin + tile * BLOCK_N; }
    DEVICE bool has_key(int key) const { return key_begin <= key && key < key_end; }
};
DEVICE int tile_count(const Params& p, int queries, int length) { return Tiles(Mask(p, queries, length), queries).count; }
// Tiles of a piece: `work`, those of all sequences, heads and tiles of rows, dealt out to p.pieces, but at least one for each
// warp. Rounding here moves cuts, never the result.
DEVICE float tile_share(const Params& p, i64 work) {
    return max_of(float(NUM_WARPS), float(work) * (reciprocal_approx(float(p.pieces)) * (1 - 1e-6f)));
}
DEVICE int split_count(const Params& p, int tiles, float share) {
    const int wanted = p.num_splits > 0 ? min_of(p.num_splits, tiles) : int(float(tiles) * reciprocal_approx(share));
    return max_of(1, min_of(wanted, MAX_SPLITS));
}

// The first sequence for which passed(batch, pieces of all sequences up to and with it) holds; batch is p.batch if there is
// none. All lanes of a warp call it. length_at(batch) is a sequence's length.
template <typename How, typename Length, typename Passed> DEVICE Cut find_cut(const Params& p, Length length_at, Passed passed) {
    i64 work = 0;
#pragma unroll 1
    for (int batch = lane_id(); batch < p.batch; batch += WARP_SIZE) {
        const int queries = queries_of<How>(p, batch).count;
        work += i64(tile_count(p, queries, length_at(batch))) * unsplit_pieces(p, queries);
    }
    const float share = tile_share(p, total_in_warp(work));
    int before = 0, slots_before = 0;
#pragma unroll 1
    for (int batch = lane_id(); batch - lane_id() < p.batch; batch += WARP_SIZE) {
        const int length = batch < p.batch ? length_at(batch) : 0;
        const Queries queries = batch < p.batch ? queries_of<How>(p, batch) : Queries{0, 0};
        const int splits = split_count(p, tile_count(p, queries.count, length), share);
        const int pieces = splits * unsplit_pieces(p, queries.count), slots = splits > 1 ? pieces : 0;
        int through = before + pieces;
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int below = shuffle(through, max_of(lane_id() - distance, 0));
            if (lane_id() >= distance) through += below - before;
        }
        const int lane = total_in_warp(int(!passed(batch, through)));  // it holds from one lane on
        if (lane < WARP_SIZE)
            return {shuffle(batch, lane), shuffle(length, lane), {shuffle(queries.begin, lane), shuffle(queries.count, lane)},
                    shuffle(splits, lane), shuffle(through - pieces, lane),
                    slots_before + total_in_warp(lane_id() < lane ? slots : 0)};
        before = shuffle(through, WARP_SIZE - 1);
        slots_before += total_in_warp(slots);
    }
    return {p.batch, 0, {0, 0}, 1, before, slots_before};
}
template <typename How, typename Passed> DEVICE Cut find_cut(const Params& p, Passed passed) {
    return find_cut<How>(p, [&](int batch) { return length_of<How>(p, batch); }, passed);
}

// The cut of a piece, or of a sequence. Where all have p.seqlen_k keys and p.seqlen_q queries the host has counted the splits.
DEVICE bool uniform(const Params& p) { return !p.lengths && !p.query_starts; }
DEVICE Cut uniform_cut(const Params& p, int batch) {
    const int first = batch * p.num_splits * unsplit_pieces(p, p.seqlen_q);
    return {min_of(batch, p.batch), p.seqlen_k, {0, p.seqlen_q}, p.num_splits, first, first};
}
template <typename How = Plainly> DEVICE Cut cut_of_piece(const Params& p, int piece) {
    return uniform(p) ? uniform_cut(p, quotient(piece, p.num_splits * unsplit_pieces(p, p.seqlen_q)))
                      : find_cut<How>(p, [&](int, int through) { return piece < through; });
}
DEVICE Cut cut_of_batch(const Params& p, int wanted) {
    return uniform(p) ? uniform_cut(p, wanted) : find_cut<Plainly>(p, [&](int batch, int) { return batch >= wanted; });
}

// The packed rows of a block: those of one sequence, BLOCK_HEADS_KV key/value heads and tile of rows. Row r is of head
// head_kv + r / HEAD_ROWS.
struct Rows {
    int batch, head_kv;
    int begin;         // the first packed row of each head
    int count, each;   // rows [0, count), of which each head has the first `each` of HEAD_ROWS
    int first_query;   // of the sequence, where queries of all sequences are packed
    int unsplit;       // number of (heads, row tile) within the sequence

    DEVICE Rows(const Params& p, const Cut& cut, int number)
        : batch(cut.batch), first_query(cut.queries.begin), unsplit(number) {
        const int tiles = row_tiles(p, cut.queries.count), heads = quotient(number, tiles);
        head_kv = heads * BLOCK_HEADS_KV;
        begin = (number - heads * tiles) * HEAD_ROWS;
        each = min_of(HEAD_ROWS, p.group * cut.queries.count - begin);
        count = (min_of(BLOCK_HEADS_KV, p.heads_kv - head_kv) - 1) * HEAD_ROWS + each;
    }
    DEVICE bool exists(int row) const { return row < count && (BLOCK_HEADS_KV == 1 || row % HEAD_ROWS < each); }
    DEVICE int nearest(int row) const {  // that exists: the row itself or one before it
        if (BLOCK_HEADS_KV == 1) return min_of(row, each - 1);
        const int within = min_of(row % HEAD_ROWS, each - 1);
        return min_of(row - row % HEAD_ROWS, count - each) + within;
    }
    DEVICE int kv_head(int row) const { return head_kv + row / HEAD_ROWS; }
    DEVICE int query(const Params& p, int row) const { return divide(begin + row % HEAD_ROWS, p.group_magic, p.group_shift); }
    DEVICE int head(const Params& p, int row) const {
        return kv_head(row) * p.group + begin + row % HEAD_ROWS - query(p, row) * p.group;
    }
    // Query `row`.
    DEVICE const Element* pointer(const Params& p, int row) const {
        return p.q + batch * p.q_batch_stride + head(p, row) * p.q_head_stride + (first_query + query(p, row)) * p.q_row_stride;
    }
};
// Which of the block's heads the rows of a C or A fragment are, whose upper or lower half of 8 rows is meant.
DEVICE constexpr int head_of(int m, int half) { return (m * 16 + half * 8) / HEAD_ROWS; }
