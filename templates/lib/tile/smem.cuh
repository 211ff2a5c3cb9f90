#include "lib/base.cuh"
#include "lib/ptx/math.cuh"
#include "lib/ptx/fragment.cuh"
#include "lib/ptx/access.cuh"

// 16-bit tiles in shared memory, and the way out through them.
//
// A tile of ROWS x COLUMNS lies as panels of 64 columns, so that a row of a panel is 128 bytes: all 32 banks once. The
// 16-byte chunk c of row r stands at place c ^ (r % 8) of its row: the 8 rows that one ldmatrix reads, or the 8 chunks
// that neighbouring threads write, then lie in different banks. This is also TMA's 128-byte swizzle.
template <int ROWS, int COLUMNS> struct SmemTile {
    static constexpr int PANELS = ceil_div(COLUMNS, 64);
    static constexpr int PANEL_BYTES = ROWS * 128;
    static constexpr int BYTES = PANELS * PANEL_BYTES;
    u32 base;  // a multiple of 1024

    DEVICE u32 address(int row, int chunk) const {
        return base + chunk / 8 * PANEL_BYTES + row * 128 + ((chunk ^ row) % 8) * 16;
    }
    // address(row + lane_row, chunk + lane_chunk) for row % 8 == 0, even `chunk` and lane_chunk in {0, 1}: `row` and
    // `chunk` are constants in unrolled loops, so all but one exclusive or becomes an immediate offset.
    DEVICE u32 address(int row, int chunk, int lane_row, int lane_chunk) const {
        u32 lane_address = base + lane_row * 128 + ((lane_chunk ^ lane_row) % 8) * 16;
        return (lane_address ^ (chunk % 8 * 16)) + row * 128 + chunk / 8 * PANEL_BYTES;
    }
};

// Stores a warp's C fragments, rounded to Element, by way of the warp's own rows of a tile, so that the stores are whole
// 16-byte chunks. Row r of the tile goes to row_pointer(r), unless that is null.
template <typename Element, int ROWS, int COLUMNS, int TILES_M, int TILES_N, typename RowPointer>
DEVICE void store_fragments(const SmemTile<ROWS, COLUMNS>& tile, int tile_row, const float (&c)[TILES_M][TILES_N][4],
                            RowPointer row_pointer) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_shared_4(tile.address(tile_row + m * 16 + half * 8 + c_row(), n) + c_column() * 2,
                               pack2<Element>(c[m][n][half * 2], c[m][n][half * 2 + 1]));
    sync_warp();
    constexpr int CHUNKS = COLUMNS / 8;
#pragma unroll
    for (int i = lane_id(); i < TILES_M * 16 * CHUNKS; i += WARP_SIZE) {
        const int row = tile_row + i / CHUNKS, chunk = i % CHUNKS;
        if (Element* to = row_pointer(row)) store_global_16(to + chunk * 8, load_shared_16(tile.address(row, chunk)));
    }
}
