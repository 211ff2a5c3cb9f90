#include "lib/base.cuh"
#include "lib/ptx/math.cuh"
#include "lib/ptx/fragment.cuh"
#include "lib/softmax/rescale.cuh"

// Online softmax over C fragments of scores. Each lane holds two rows a fragment: index 0 is row c_row(), 1 is c_row() + 8.
//
// The running maximum is kept in units of raw scores; p = exp2(s * scale_log2 - maximum * scale_log2) is one fused
// multiply-add and one exp2. Row sums stay partial in each lane and are added up once, at the end.
template <int TILES_M> struct RowStatistics {
    float maximum[TILES_M][2], sum[TILES_M][2];
    DEVICE RowStatistics() {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) maximum[m][0] = maximum[m][1] = -INF, sum[m][0] = sum[m][1] = 0;
    }
};

// Moves the running maximum to cover the scores of one more tile.
//
// RESCALE_SLACK < 0 does so at every tile. Otherwise the maximum moves only when it has grown by more than RESCALE_SLACK (a
// power of two) in some row of the warp: probabilities then reach at most 2^RESCALE_SLACK, and the division at the end
// makes the result exact again. ROWS_MAY_BE_EMPTY guards rows that have seen no key so far.
template <int RESCALE_SLACK, bool ROWS_MAY_BE_EMPTY, int TILES_M, int TILES_N>
DEVICE Rescale<TILES_M> move_maximum(const float (&s)[TILES_M][TILES_N][4], RowStatistics<TILES_M>& rows, float scale_log2) {
    Rescale<TILES_M> rescale;
    float maximum[TILES_M][2];
    bool grown = RESCALE_SLACK < 0;
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            maximum[m][half] = max_of(rows.maximum[m][half], row_max(lane_max(s[m], half)));
            grown |= (maximum[m][half] - rows.maximum[m][half]) * scale_log2 > RESCALE_SLACK;
        }
    rescale.needed = RESCALE_SLACK < 0 || any_in_warp(grown);
    if (rescale.needed) {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                maximum[m][half] = min_of(GREATEST, maximum[m][half]);
                float reference = ROWS_MAY_BE_EMPTY && maximum[m][half] == -INF ? 0 : maximum[m][half];
                rescale.factor[m][half] = exp2_approx((rows.maximum[m][half] - reference) * scale_log2);
                rows.maximum[m][half] = maximum[m][half];
                rows.sum[m][half] *= rescale.factor[m][half];
            }
    }
    return rescale;
}

// Replaces scores by probabilities relative to the running maximum, and adds them to the sums.
template <bool ROWS_MAY_BE_EMPTY, int TILES_M, int TILES_N>
DEVICE void exponentiate(float (&s)[TILES_M][TILES_N][4], RowStatistics<TILES_M>& rows, float scale_log2) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float reference = ROWS_MAY_BE_EMPTY && rows.maximum[m][half] == -INF ? 0 : rows.maximum[m][half] * scale_log2;
            if (is_large(reference)) {
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; ++i) s[m][n][i] = min_of(GREATEST, s[m][n][i]) - rows.maximum[m][half];
                reference = 0;
            }
#pragma unroll
            for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; ++i) {
                    s[m][n][i] = exp2_approx(s[m][n][i] * scale_log2 - reference);
                    rows.sum[m][half] += s[m][n][i];
                }
        }
}
