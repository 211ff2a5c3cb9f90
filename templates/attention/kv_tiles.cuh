// The key tiles that a block of query rows has to visit, from the last to the first. Tiles are counted from the first key
// that some row sees, so that a window of W keys never costs a tile more than it must. Tiles that no row sees are not
// among them; tiles that every row sees whole need no mask.
template <int BLOCK_N> struct KvTiles {
    int key_begin, key_end;     // keys that some row sees; keys outside are loaded as zeros
    int end;                    // tiles [0, end)
    int left_edge, right_edge;  // tiles before left_edge hold keys that a row is past, tiles from right_edge on keys to come

    KvTiles() = default;
    DEVICE KvTiles(const Mask& mask, int query_begin, int query_end) {
        key_begin = mask.key_begin(query_begin);
        key_end = max_of(mask.key_end(query_end), key_begin);
        end = ceil_div(key_end - key_begin, BLOCK_N);
        left_edge = ceil_div(max_of(mask.shared_begin(query_end) - key_begin, 0), BLOCK_N);
        right_edge = max_of(mask.shared_end(query_begin) - key_begin, 0) / BLOCK_N;
    }
    DEVICE bool empty() const { return end == 0; }
    DEVICE int first() const { return end - 1; }
    DEVICE static int next(int tile) { return tile - 1; }
    DEVICE static bool contains(int tile) { return tile >= 0; }
    DEVICE bool needs_mask(int tile) const { return tile < left_edge || tile >= right_edge; }
    DEVICE int first_key(int tile) const { return key_begin + tile * BLOCK_N; }
    DEVICE bool has_key(int key) const { return key_begin <= key && key < key_end; }
};
