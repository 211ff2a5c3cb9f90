// Keys and values that stand in order: key j of a sequence is row j of its part of the cache.
struct KvRows {
    using KLoader = WarpLoader<BLOCK_N, K_COLUMNS, L2_PREFETCH>;
    using VLoader = WarpLoader<BLOCK_N, V_COLUMNS, L2_PREFETCH>;
    const KvElement *k, *v;  // this lane's chunks in the first pass over the next tile to load
    i64 k_stride, v_stride;
    int begin, end;  // keys that exist

    DEVICE KvRows(const Params& p, const Rows& rows, int first, int last, int first_key)
        : k(p.k + rows.batch * p.k_batch_stride + rows.head_kv * p.k_head_stride + (first_key + KLoader::lane_row()) * p.k_row_stride
            + KLoader::lane_element(p.k_head_stride, p.heads_kv - rows.head_kv)),
          v(p.v + rows.batch * p.v_batch_stride + rows.head_kv * p.v_head_stride + (first_key + VLoader::lane_row()) * p.v_row_stride
            + VLoader::lane_element(p.v_head_stride, p.heads_kv - rows.head_kv)),
          k_stride(p.k_row_stride), v_stride(p.v_row_stride), begin(first), end(last) {}

    // What must be known of a tile before it is loaded, asked for early: nothing here.
    struct Place {};
    DEVICE Place find(int) const { return {}; }

    // Starts copying a warp's next tile, which begins at `first_key`.
    template <typename Tile> DEVICE void start_k(const Tile& tile, int first_key, Place) {
        KLoader::start(tile, k, k_stride * KLoader::ROWS_PER_PASS, begin - first_key, end - first_key);
        k += k_stride * (NUM_WARPS * BLOCK_N);
    }
    template <typename Tile> DEVICE void start_v(const Tile& tile, int first_key, Place) {
        VLoader::start(tile, v, v_stride * VLoader::ROWS_PER_PASS, begin - first_key, end - first_key);
        v += v_stride * (NUM_WARPS * BLOCK_N);
    }
};
