// The key tiles that a block of query rows has to visit, from the last to the first, where keys stand in pages: tiles begin at
// multiples of BLOCK_N, and so boxes of TMA at multiples of their size, none of which lies across the border of two
// pages. Tiles that no row sees are not among them, but for one where there are no keys, so that no code is needed for that;
// tiles that every row sees whole need no mask.
template <int BLOCK_N> struct KvTiles {
    int key_begin, key_end;     // keys that some row sees
    int origin, end;            // first key of tile 0; tiles [0, end)
    int left_edge, right_edge;  // tiles before left_edge hold keys that a row is past, tiles from right_edge on keys to come

    KvTiles() = default;
    DEVICE KvTiles(const Mask& mask, int query_begin, int query_end) {
        key_begin = mask.key_begin(query_begin);
        key_end = max_of(mask.key_end(query_end), key_begin);
        origin = key_begin / BLOCK_N * BLOCK_N;
        end = max_of(ceil_div(key_end - origin, BLOCK_N), 1);
        left_edge = ceil_div(max_of(mask.shared_begin(query_end) - origin, 0), BLOCK_N);
        right_edge = max_of(mask.shared_end(query_begin) - origin, 0) / BLOCK_N;
    }
    static constexpr bool empty() { return false; }
    DEVICE int first() const { return end - 1; }
    DEVICE static int next(int tile) { return tile - 1; }
    DEVICE static bool contains(int tile) { return tile >= 0; }
    DEVICE bool needs_mask(int tile) const { return tile < left_edge || tile >= right_edge; }
    DEVICE int first_key(int tile) const { return origin + tile * BLOCK_N; }
    DEVICE int own_key(int tile) const { return first_key(tile); }  // the first key that no tile before this one holds
    // Every row sees the columns [left, right) of a tile.
    DEVICE int left(int tile) const { return tile < left_edge ? BLOCK_N : 0; }
    DEVICE int right(int tile) const { return tile >= right_edge ? 0 : BLOCK_N; }
};
