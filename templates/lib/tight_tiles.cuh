// The key tiles that a block of query rows has to visit, from the last to the first. Tiles are counted from the
// first key that some row sees; the last one ends with the last such key and shares with the one before it what does not fill a
// tile. So no tile holds keys that no row sees, unless all there are do not fill one: that tile begins before them. Where there
// are none, there is such a tile all the same, so that no code is needed for that.
template <int BLOCK_N> struct KvTiles {
    int key_begin, key_end;        // keys that some row sees
    int end;                       // tiles [0, end)
    int shared_begin, shared_end;  // keys that every row sees

    KvTiles() = default;
    DEVICE KvTiles(const Mask& mask, int query_begin, int query_end) {
        key_begin = mask.key_begin(query_begin);
        key_end = max_of(mask.key_end(query_end), key_begin);
        end = max_of(ceil_div(key_end - key_begin, BLOCK_N), 1);
        shared_begin = mask.shared_begin(query_end);
        shared_end = mask.shared_end(query_begin);
    }
//% if split_keys
    DEVICE bool empty() const { return end == 0; }
//% else
    static constexpr bool empty() { return false; }
//% endif
    DEVICE int first() const { return end - 1; }
    DEVICE static int next(int tile) { return tile - 1; }
    DEVICE static bool contains(int tile) { return tile >= 0; }
    DEVICE bool needs_mask(int tile) const { return own_key(tile) < shared_begin || own_key(tile) + BLOCK_N > shared_end; }
    DEVICE int first_key(int tile) const { return min_of(own_key(tile), key_end - BLOCK_N); }
    // The first key that no tile before this one holds.
    DEVICE int own_key(int tile) const { return key_begin + tile * BLOCK_N; }
    // Every row sees the columns [left, right) of a tile, as far as it has such.
    DEVICE int left(int tile) const { return max_of(shared_begin, own_key(tile)) - first_key(tile); }
    DEVICE int right(int tile) const { return shared_end - first_key(tile); }
};
