// From global memory to a warp's own tiles in shared memory by cp.async.

// Copies tiles of ROWS x COLUMNS 16-bit columns with the 32 lanes of a warp, in passes: neighbouring lanes copy neighbouring chunks of 16
// bytes, and a lane's chunk is the same in all passes.
template <int ROWS, int COLUMNS, int PREFETCH> struct WarpLoader {
    static constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;  // the last one is zeros where COLUMNS is an odd multiple of 8
    static constexpr int CHUNKS_OF_HEAD = CHUNKS / BLOCK_HEADS_KV;
    static constexpr int ROWS_PER_PASS = WARP_SIZE / CHUNKS;
    static constexpr int PASSES = ceil_div(ROWS, ROWS_PER_PASS);

    DEVICE static int lane_row() { return lane_id() / CHUNKS; }  // in the first pass
    // This lane's chunk of a row of the first of the block's heads, of which `heads` exist; others repeat the last one.
    DEVICE static i64 lane_element(i64 head_stride, int heads) {
        const int chunk = lane_id() % CHUNKS;
        return min_of(chunk / CHUNKS_OF_HEAD, heads - 1) * head_stride + chunk % CHUNKS_OF_HEAD * (16 / KV_BYTES);
    }

    // Starts copying rows [begin, end) of a tile and makes the others zeros. `source` is this lane's chunk of its row in the
    // first pass, `pass_stride` leads to that of the next pass.
    DEVICE static void start(const SmemTile<ROWS, COLUMNS>& tile, const KvElement* source, i64 pass_stride, int begin, int end) {
        gather(tile, begin, end, [&](int) {
            const KvElement* here = source;
            source += pass_stride;
            return here;
        });
    }
    // The same from wherever the rows are: row_pointer(r) is this lane's chunk of row r. All lanes call it, in every pass.
    template <typename RowPointer>
    DEVICE static void gather(const SmemTile<ROWS, COLUMNS>& tile, int begin, int end, RowPointer row_pointer) {
        const int row = lane_row(), chunk = lane_id() % CHUNKS;
        const bool column_exists = COLUMNS % 16 == 0 || chunk * 8 < COLUMNS;
        const bool lane_copies = WARP_SIZE % CHUNKS == 0 || row < ROWS_PER_PASS;
        const u32 first_address = tile.address(row, chunk);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int later = pass * ROWS_PER_PASS;
            const bool exists = later < end - row && (!Mask::HAS_ROW_BEGIN || later >= begin - row);
            // Rows of a pass and passes share no bits if there are 2^n rows a pass, so their swizzles add up by exclusive or.
            const u32 address = ROWS_PER_PASS & (ROWS_PER_PASS - 1) ? tile.address(row + later, chunk)
                                                                     : (first_address ^ (later % 8 * 16)) + later * 128;
            const KvElement* source = row_pointer(row + later);
            if (lane_copies && (ROWS % ROWS_PER_PASS == 0 || row + later < ROWS))
                stream_async_16<PREFETCH>(address, source, exists && column_exists);
        }
    }
};
