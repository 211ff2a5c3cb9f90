// The key tiles that a block of query rows has to visit, from the last to the first. Tiles are counted from the first key
// that some row sees, so that a window of W keys never costs a tile more than it must. Tiles that no row sees are not
// among them; tiles that every row sees whole need no mask.
template <int BLOCK_N> struct KvTiles {
    int key_begin, key_end;            // keys that some row sees; keys outside are loaded as zeros
    int end;                           // tiles [0, end)
    int unmasked_begin, unmasked_end;  // tiles [unmasked_begin, unmasked_end), within them, need no mask

    DEVICE KvTiles(const Mask& mask, int row_begin, int row_end) {
        key_begin = mask.key_begin(row_begin);
        key_end = max_of(mask.key_end(row_end), key_begin);
        end = ceil_div(key_end - key_begin, BLOCK_N);
        unmasked_begin = min_of(end, ceil_div(max_of(mask.shared_begin(row_end) - key_begin, 0), BLOCK_N));
        unmasked_end = max_of(unmasked_begin, min_of(end, (mask.shared_end(row_begin) - key_begin) / BLOCK_N));
    }
    DEVICE bool empty() const { return end == 0; }
    DEVICE int first() const { return end - 1; }
    DEVICE static int next(int tile) { return tile - 1; }
    DEVICE static bool contains(int tile) { return tile >= 0; }
    DEVICE bool needs_mask(int tile) const { return tile < unmasked_begin || tile >= unmasked_end; }
    DEVICE int first_key(int tile) const { return key_begin + tile * BLOCK_N; }
    DEVICE bool has_key(int key) const { return key_begin <= key && key < key_end; }
};
