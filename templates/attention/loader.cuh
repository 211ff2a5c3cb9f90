// From global memory to tiles in shared memory, by the means of copies.cuh.

// Copies tiles of ROWS x COLUMNS out of a row-major matrix, with all THREADS threads of the block. Each thread keeps its
// place in the tile, so that a tile costs it one addition for the address and one for each further row.
template <int THREADS, int ROWS, int COLUMNS, typename Element> struct TileLoader {
    static constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;  // the last one is zeros where COLUMNS is an odd multiple of 8
    static constexpr int ROWS_PER_PASS = THREADS / CHUNKS;
    static constexpr int PASSES = ceil_div(ROWS, ROWS_PER_PASS);
    const Element* matrix;
    i64 row_stride;

    // Starts copying rows [first_row, first_row + ROWS). Rows for which has_row is false become zeros.
    template <typename HasRow>
    DEVICE void start(const SmemTile<ROWS, COLUMNS>& tile, int first_row, HasRow has_row) const {
        const int thread = opaque(thread_id());
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        const Element* source = matrix + first_row * row_stride + (row * row_stride + chunk * 8);
        const u32 first_address = tile.address(row, chunk);
        Copies<TURING> copies;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int r = row + pass * ROWS_PER_PASS;
            const bool writes = (THREADS % CHUNKS == 0 || row < ROWS_PER_PASS) && (ROWS % ROWS_PER_PASS == 0 || r < ROWS);
            const bool valid = has_row(first_row + r) && (COLUMNS % 16 == 0 || chunk * 8 < COLUMNS);
            // The swizzle repeats every 8 rows; the compiler does not see that, and would keep an address for each pass.
            const u32 address = ROWS_PER_PASS % 8 == 0 ? first_address + pass * ROWS_PER_PASS * 128 : tile.address(r, chunk);
            copies.start(pass, writes, address, source + pass * ROWS_PER_PASS * row_stride, valid);
        }
        copies.finish();
    }
    // Starts copying rows from wherever they are: row r from row_pointer(r), zeros where that is null.
    template <typename RowPointer>
    DEVICE static void gather(const SmemTile<ROWS, COLUMNS>& tile, RowPointer row_pointer) {
        for (int i = thread_id(); i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            const Element* source = row_pointer(row);
            const bool valid = source && (COLUMNS % 16 == 0 || chunk * 8 < COLUMNS);
            Copies<TURING> copies;
            copies.start(0, true, tile.address(row, chunk), valid ? source + chunk * 8 : source, valid);
            copies.finish();
        }
    }
};
