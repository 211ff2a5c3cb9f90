// Keys and values that stand in order: key j of a sequence is row j of its part of the cache.
struct KvRows {
    const Element *k, *v;
    i64 k_stride, v_stride;
    int begin, end;  // keys that exist

    DEVICE KvRows(const Params& p, int batch, int head_kv, int first, int last)
        : k(p.k + batch * p.k_batch_stride + head_kv * p.k_head_stride),
          v(p.v + batch * p.v_batch_stride + head_kv * p.v_head_stride),
          k_stride(p.k_row_stride), v_stride(p.v_row_stride), begin(first), end(last) {}

    // Where the rows of a tile are. Found well before they are needed, because other sources must ask memory.
    struct Place { int first_key; };
    DEVICE Place find(int first_key) const { return {first_key}; }
    DEVICE bool has_key(int key) const { return begin <= key && key < end; }

    template <int PREFETCH, typename Tile> DEVICE void start_k(const Tile& tile, const Place& place) const {
        start<PREFETCH, HEAD_DIM>(tile, k, k_stride, place);
    }
    template <int PREFETCH, typename Tile> DEVICE void start_v(const Tile& tile, const Place& place) const {
        start<PREFETCH, HEAD_DIM_V>(tile, v, v_stride, place);
    }
    template <int PREFETCH, int COLUMNS, typename Tile>
    DEVICE void start(const Tile& tile, const Element* matrix, i64 stride, const Place& place) const {
        const Element* first = matrix + place.first_key * stride;
        WarpLoader<BLOCK_N, COLUMNS, PREFETCH>::start(tile, [&](int row) { return first + row * stride; },
                                                      [&](int row) { return has_key(place.first_key + row); });
    }
};
