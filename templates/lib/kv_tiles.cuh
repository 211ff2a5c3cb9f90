// The key tiles that a block of query rows has to visit, from the last to the first. Tiles that no row sees are not
// among them; tiles that every row sees whole need no mask.
template <int BLOCK_N> struct KvTiles {
    int begin, end;                    // tiles [begin, end) hold a visible key
    int unmasked_begin, unmasked_end;  // tiles [unmasked_begin, unmasked_end), within them, need no mask
    int key_begin, key_end;            // keys outside are loaded as zeros

    DEVICE KvTiles(const Mask& mask, int row_begin, int row_end) {
        key_begin = mask.key_begin(row_begin);
        key_end = mask.key_end(row_end);
        begin = key_begin / BLOCK_N;
        end = key_end > key_begin ? ceil_div(key_end, BLOCK_N) : begin;
        unmasked_begin = min_of(end, max_of(begin, ceil_div(mask.shared_begin(row_end), BLOCK_N)));
        unmasked_end = max_of(unmasked_begin, min_of(end, mask.shared_end(row_begin) / BLOCK_N));
    }
    DEVICE bool empty() const { return begin >= end; }
    DEVICE int first() const { return end - 1; }
    DEVICE static int next(int tile) { return tile - 1; }
    DEVICE bool is_last(int tile) const { return tile == begin; }
    DEVICE bool contains(int tile) const { return tile >= begin; }
    DEVICE bool needs_mask(int tile) const { return tile < unmasked_begin || tile >= unmasked_end; }
    DEVICE bool has_key(int key) const { return key_begin <= key && key < key_end; }
};
