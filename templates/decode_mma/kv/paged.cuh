// Keys and values in pages: key j of a sequence is slot j % page_size of the page that its table names at j / page_size.
// Table entries of keys that do not exist are not read.
struct KvRows {
    using KLoader = WarpLoader<BLOCK_N, K_COLUMNS, L2_PREFETCH>;
    using VLoader = WarpLoader<BLOCK_N, V_COLUMNS, L2_PREFETCH>;
    const KvElement *k, *v;  // this lane's chunks of slot 0 of page 0
    const int* table;
    i64 k_page_stride, v_page_stride, k_stride, v_stride;
    int begin, end;  // keys that exist
    int page_size, page_shift;
    u32 page_magic;

    DEVICE KvRows(const Params& p, const Rows& rows, int first, int last, int)
        : k(p.k + rows.head_kv * p.k_head_stride + KLoader::lane_element(p.k_head_stride, p.heads_kv - rows.head_kv)),
          v(p.v + rows.head_kv * p.v_head_stride + VLoader::lane_element(p.v_head_stride, p.heads_kv - rows.head_kv)),
          table(p.page_table + rows.batch * p.page_table_stride), k_page_stride(p.k_batch_stride), v_page_stride(p.v_batch_stride),
          k_stride(p.k_row_stride), v_stride(p.v_row_stride), begin(first), end(last), page_size(p.page_size),
          page_shift(p.page_shift), page_magic(p.page_magic) {}

    static constexpr int ENTRIES = ceil_div(BLOCK_N, WARP_SIZE);
    // Lane l holds page and slot of rows l, l + 32, ... of a tile.
    struct Place { int page[ENTRIES], slot[ENTRIES]; };

    DEVICE Place find(int first_key) const {
        return find(first_key, [](const int* entry) { return *entry; });
    }
    // The same with the table read by read(place of an entry).
    template <typename Read> DEVICE Place find(int first_key, Read read) const {
        Place place;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const int key = first_key + lane_id() + i * WARP_SIZE;
            const int index = divide(key, page_magic, page_shift);
            place.slot[i] = key - index * page_size;
            place.page[i] = begin <= key && key < end ? read(table + index) : 0;
        }
        return place;
    }
    // Starts copying a warp's next tile, which begins at `first_key`.
    template <typename Tile> DEVICE void start_k(const Tile& tile, int first_key, const Place& at) const {
        start<KLoader>(tile, k, k_page_stride, k_stride, first_key, at);
    }
    template <typename Tile> DEVICE void start_v(const Tile& tile, int first_key, const Place& at) const {
        start<VLoader>(tile, v, v_page_stride, v_stride, first_key, at);
    }
    template <typename Loader, typename Tile>
    DEVICE void start(const Tile& tile, const KvElement* matrix, i64 page_stride, i64 stride, int first_key, const Place& at) const {
        i64 offset[ENTRIES];
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) offset[i] = at.page[i] * page_stride + at.slot[i] * stride;
        Loader::gather(tile, begin - first_key, end - first_key, [&](int row) {
            i64 here = shuffle(offset[0], row);
#pragma unroll
            for (int i = 1; i < ENTRIES; ++i) {
                const i64 other = shuffle(offset[i], row);
                if (row >= i * WARP_SIZE) here = other;
            }
            return matrix + here;
        });
    }
};
