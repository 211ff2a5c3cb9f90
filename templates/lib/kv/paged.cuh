// Keys and values in pages: key j of a sequence is slot j % page_size of the page that its table names at j / page_size.
// Table entries of keys that do not exist are not read.
struct KvRows {
    const Element *k, *v;
    const int* table;
    i64 k_page_stride, v_page_stride, k_stride, v_stride;
    int begin, end;  // keys that exist
    int page_size, page_shift;
    u32 page_magic;

    DEVICE KvRows(const Params& p, int batch, int head_kv, int first, int last)
        : k(p.k + head_kv * p.k_head_stride), v(p.v + head_kv * p.v_head_stride),
          table(p.page_table + batch * p.page_table_stride), k_page_stride(p.k_batch_stride), v_page_stride(p.v_batch_stride),
          k_stride(p.k_row_stride), v_stride(p.v_row_stride), begin(first), end(last), page_size(p.page_size),
          page_shift(p.page_shift), page_magic(p.page_magic) {}

    static constexpr int ENTRIES = ceil_div(BLOCK_N, WARP_SIZE);
    // Lane l holds page and slot of rows l, l + 32, ... of a tile.
    struct Place { int first_key, page[ENTRIES], slot[ENTRIES]; };

    DEVICE bool has_key(int key) const { return begin <= key && key < end; }
    DEVICE Place find(int first_key) const {
        Place place;
        place.first_key = first_key;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const int key = first_key + lane_id() + i * WARP_SIZE;
            // key / page_size for keys below 2^31: a product with 2^(31 + shift) / page_size, rounded up
            const int index = int(u64(u32(key)) * page_magic >> (31 + page_shift));
            place.slot[i] = key - index * page_size;
            place.page[i] = has_key(key) ? table[index] : 0;
        }
        return place;
    }
    template <int PREFETCH, typename Tile> DEVICE void start_k(const Tile& tile, const Place& place) const {
        start<PREFETCH, HEAD_DIM>(tile, k, k_page_stride, k_stride, place);
    }
    template <int PREFETCH, typename Tile> DEVICE void start_v(const Tile& tile, const Place& place) const {
        start<PREFETCH, HEAD_DIM_V>(tile, v, v_page_stride, v_stride, place);
    }
    template <int PREFETCH, int COLUMNS, typename Tile>
    DEVICE void start(const Tile& tile, const Element* matrix, i64 page_stride, i64 stride, const Place& place) const {
        auto exists = [&](int row) { return has_key(place.first_key + row); };
        i64 offset[ENTRIES];
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) offset[i] = place.page[i] * page_stride + place.slot[i] * stride;
        if (page_size % BLOCK_N == 0) {  // tiles begin at multiples of BLOCK_N, so each lies within a page
            // The first row that exists says where the page is; the rows before it are not read.
            const int known = max_of(begin - place.first_key, 0);
            i64 base = shuffle(offset[0], known);
#pragma unroll
            for (int i = 1; i < ENTRIES; ++i) {
                const i64 other = shuffle(offset[i], known);
                if (known >= i * WARP_SIZE) base = other;
            }
            const Element* first = matrix + (base - known * stride);
            WarpLoader<BLOCK_N, COLUMNS, PREFETCH>::start(tile, [&](int row) { return first + row * stride; }, exists);
        } else {
            WarpLoader<BLOCK_N, COLUMNS, PREFETCH>::start(tile, [&](int row) {
                i64 here = shuffle(offset[0], row);
#pragma unroll
                for (int i = 1; i < ENTRIES; ++i) {
                    const i64 other = shuffle(offset[i], row);
                    if (row >= i * WARP_SIZE) here = other;
                }
                return matrix + here;
            }, exists);
        }
    }
};
