#include "lib/sequences/pages.cuh"

// From the pages of a cache to tiles in shared memory: as TileLoader, with the places of a tile's rows looked up first.
template <int THREADS, int ROWS, int COLUMNS, typename Element> struct PagedLoader {
    static constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;  // the last one is zeros where COLUMNS is an odd multiple of 8
    static constexpr int ROWS_PER_PASS = THREADS / CHUNKS;
    static constexpr int PASSES = ceil_div(ROWS, ROWS_PER_PASS);
    const Element* matrix;  // of page 0
    i64 page_stride, row_stride;
    Pages pages;

    // Starts copying keys [first_key, first_key + ROWS). Rows for which has_key is false become zeros.
    template <typename HasKey>
    DEVICE void start(const SmemTile<ROWS, COLUMNS>& tile, int first_key, HasKey has_key) const {
        const int thread = opaque(thread_id());
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        const Element* source[PASSES];
        Copies<TURING> copies;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int key = first_key + row + pass * ROWS_PER_PASS;
            source[pass] = has_key(key) ? matrix + pages.offset(key, page_stride, row_stride) + chunk * 8 : nullptr;
        }
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int r = row + pass * ROWS_PER_PASS;
            const bool writes = (THREADS % CHUNKS == 0 || row < ROWS_PER_PASS) && (ROWS % ROWS_PER_PASS == 0 || r < ROWS);
            const bool valid = source[pass] && (COLUMNS % 16 == 0 || chunk * 8 < COLUMNS);
            copies.start(pass, writes, tile.address(r, chunk), valid ? source[pass] : matrix, valid);
        }
        copies.finish();
    }
};
