// Products of tiles on the tensor cores, and the way out of the gradients.

// C += A B^T: rows of A from `row` on, all rows of B, over COLUMNS columns that both have.
template <int COLUMNS, int TILES_M, int TILES_N, typename ATile, typename BTile>
DEVICE void multiply_transposed(float (&c)[TILES_M][TILES_N][4], const ATile& left, int row, const BTile& right) {
#pragma unroll
    for (int d = 0; d < ceil_div(COLUMNS, 16); ++d) {
        u32 a[TILES_M][4];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) load_a(a[m], left, row + m * 16, d * 2);
#pragma unroll
        for (int n = 0; n < TILES_N / 2; ++n) {
            u32 b[4];
            load_b_transposed(b, right, n * 16, d * 2);
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                mma_m16n8k16<Element>(c[m][2 * n], a[m], b[0], b[1]);
                mma_m16n8k16<Element>(c[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// C += round(A) B for A in C fragments: columns of B from 8 * `chunk` on, of which there are `chunks` chunks.
template <int TILES_M, int TILES_K, int TILES_N, typename BTile>
DEVICE void multiply_rounded(float (&c)[TILES_M][TILES_N][4], const float (&left)[TILES_M][TILES_K][4], const BTile& right,
                             int chunk, int chunks) {
#pragma unroll
    for (int k = 0; k < TILES_K / 2; ++k) {
        u32 a[TILES_M][4];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) c_to_a<Element>(a[m], left[m][2 * k], left[m][2 * k + 1]);
#pragma unroll
        for (int n = 0; n < TILES_N / 2; ++n) {
            if (chunk + n * 2 >= chunks) break;
            u32 b[4];
            load_b(b, right, k * 16, chunk + n * 2);
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                mma_m16n8k16<Element>(c[m][2 * n], a[m], b[0], b[1]);
                mma_m16n8k16<Element>(c[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Puts a warp's C fragments, times `factor` and rounded, into a tile: rows from `row` on, columns from 8 * `chunk` on, of which
// the tile has `chunks` chunks.
template <int ROWS, int COLUMNS, int TILES_M, int TILES_N>
DEVICE void stage_fragments(const SmemTile<ROWS, COLUMNS>& tile, int row, int chunk, const float (&c)[TILES_M][TILES_N][4],
                            float factor) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            if (chunk + n >= COLUMNS / 8) break;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_shared_4(tile.address(row + m * 16 + half * 8 + c_row(), chunk + n) + c_column() * 2,
                               pack2<Element>(c[m][n][half * 2] * factor, c[m][n][half * 2 + 1] * factor));
        }
}

// Stores the first `rows` rows of a tile, with all THREADS threads.
template <int THREADS, int ROWS, int COLUMNS>
DEVICE void store_tile(const SmemTile<ROWS, COLUMNS>& tile, Element* to, i64 row_stride, int rows) {
    constexpr int CHUNKS = COLUMNS / 8;
#pragma unroll 4
    for (int i = thread_id(); i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i - row * CHUNKS;
        if (row < rows) store_global_16(to + row * row_stride + chunk * 8, load_shared_16(tile.address(row, chunk)));
    }
}
