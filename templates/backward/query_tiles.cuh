// The query tiles that a block of keys has to visit, from the first to the last. They are counted from the first query that sees
// one of the keys. Tiles that no query of sees a key are not among them; tiles whose queries all exist and see all keys need no mask.
template <int ROWS> struct QueryTiles {
    int query_begin, query_end;  // queries outside are loaded as zeros
    int end;                     // tiles [0, end)
    int whole_begin, whole_end;  // queries that see all keys

    DEVICE explicit QueryTiles(const Observers& o)
        : query_begin(o.begin), query_end(o.end), end(ceil_div(o.end - o.begin, ROWS)), whole_begin(o.whole_begin),
          whole_end(min_of(o.whole_end, o.end)) {}
    // Tiles that are counted from query `origin` on, so that those of other keys are the same ones.
    DEVICE QueryTiles(const Observers& o, int origin) : QueryTiles(o) {
        if (end > 0) query_begin -= (query_begin - origin) % ROWS, end = ceil_div(query_end - query_begin, ROWS);
    }
    // Masks all tiles: where a block's last keys do not exist, of which no query is asked whether it sees them.
    DEVICE void mask_all() { whole_end = query_begin; }
    DEVICE int first_query(int tile) const { return query_begin + tile * ROWS; }
    DEVICE bool has_query(int query) const { return query_begin <= query && query < query_end; }
    DEVICE bool needs_mask(int tile) const { return first_query(tile) < whole_begin || first_query(tile + 1) > whole_end; }
};
