// From global memory to a warp's own tiles in shared memory by cp.async.

// Copies tiles of ROWS x COLUMNS with the 32 lanes of a warp: neighbouring lanes copy neighbouring chunks of 16 bytes.
template <int ROWS, int COLUMNS, int PREFETCH> struct WarpLoader {
    static constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;  // the last one is zeros where COLUMNS is an odd multiple of 8
    static constexpr int ROWS_PER_PASS = WARP_SIZE / CHUNKS;
    static constexpr int PASSES = ceil_div(ROWS, ROWS_PER_PASS);

    // Starts copying row r from row_pointer(r), zeros where row_exists(r) is false. All lanes call row_pointer.
    template <typename RowPointer, typename RowExists>
    DEVICE static void start(const SmemTile<ROWS, COLUMNS>& tile, RowPointer row_pointer, RowExists row_exists) {
        const int row = lane_id() / CHUNKS, chunk = lane_id() % CHUNKS;
        const u32 first_address = tile.address(row, chunk);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int r = row + pass * ROWS_PER_PASS;
            const bool writes = (WARP_SIZE % CHUNKS == 0 || row < ROWS_PER_PASS) && (ROWS % ROWS_PER_PASS == 0 || r < ROWS);
            const bool valid = row_exists(r) && (COLUMNS % 16 == 0 || chunk * 8 < COLUMNS);
            const u32 address = ROWS_PER_PASS % 8 == 0 ? first_address + pass * ROWS_PER_PASS * 128 : tile.address(r, chunk);
            const auto source = row_pointer(r) + chunk * 8;
            if (writes) stream_async_16<PREFETCH>(address, source, valid);
        }
    }
};
