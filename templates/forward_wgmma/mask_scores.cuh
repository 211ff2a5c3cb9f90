// Sets the scores of hidden keys in one tile to -inf. `row` is that of the warp's first row within the block. Columns that all
// rows see are left alone, 16 at a time: of 143 keys that 16 queries see under a window of 128, 30 need to be compared.
template <int TILES_N, typename Tiles>
DEVICE void mask_scores(float (&s)[1][TILES_N][4], const Mask& mask, const Work& work, int row, const Tiles& tiles, int tile) {
    if (!tiles.needs_mask(tile)) return;
    const int left = tiles.left(tile), right = tiles.right(tile), first_key = tiles.first_key(tile) + c_column();
    const int query = work.query(row + c_row());
    const int queries[2] = {query, UNIT_QUERIES % 16 == 0 ? query + 8 : work.query(row + c_row() + 8)};
    if (left > 0) {
#pragma unroll
        for (int step = 0; step < TILES_N; step += 2) {
            if (step * 8 >= left) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int begin = max_of(mask.row_begin(queries[half]), tiles.own_key(tile)) - first_key;
#pragma unroll
                for (int n = step; n < step + 2; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i < begin) s[0][n][half * 2 + i] = -INF;
            }
        }
    }
    if (right < BLOCK_N) {
#pragma unroll
        for (int step = TILES_N - 2; step >= 0; step -= 2) {
            if (step * 8 + 16 <= right) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int end = mask.row_end(queries[half]) - first_key;
#pragma unroll
                for (int n = step; n < step + 2; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i >= end) s[0][n][half * 2 + i] = -INF;
            }
        }
    }
}
