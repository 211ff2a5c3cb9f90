// Sets the scores of hidden keys in one tile to -inf. `row` is that of the first element within the block. Bounds are made
// relative to this lane's first column, so that each element is compared with a constant.
template <int TILES_M, int TILES_N, typename Tiles>
DEVICE void mask_scores(float (&s)[TILES_M][TILES_N][4], const Mask& mask, const Work& work, int row, const Tiles& tiles, int tile) {
    const int first_key = tiles.first_key(tile) + c_column();
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = work.query(row + m * 16 + half * 8 + c_row());
            if (!Mask::HAS_ROW_BEGIN || tile >= tiles.right_edge) {
                const int end = mask.row_end(query) - first_key;
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i >= end) s[m][n][half * 2 + i] = -INF;
            }
            if (Mask::HAS_ROW_BEGIN && tile < tiles.left_edge) {
                const int begin = mask.row_begin(query) - first_key;
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i < begin) s[m][n][half * 2 + i] = -INF;
            }
        }
}
