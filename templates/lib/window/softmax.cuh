//% include "lib/rescale.cuh"
//% include "lib/window/mask.cuh"

// Online softmax over C fragments of scores, as in lib/softmax.cuh, where a window may hide every key of a row's first tiles.
//
// What probabilities are relative to is kept in log2 units and begins at a finite number below all scores: nothing is ever -inf
// minus -inf, and no tile asks whether a row has seen a key yet.
constexpr float LOWEST = -3e38f;

template <int TILES_M> struct RowStatistics {
    static_assert(TILES_M == 1, "a warp's rows are one fragment");
    float reference[2] = {LOWEST, LOWEST}, sum[2] = {};
};

// Moves the reference to cover the scores of one more tile: at every tile if RESCALE_SLACK < 0, otherwise only where it would
// grow by more than RESCALE_SLACK in some row of the warp. Until then each lane looks at its own scores only. (The bool, here and
// below, is ROWS_MAY_BE_EMPTY in lib/softmax.cuh.)
template <int RESCALE_SLACK, bool, bool INTEGER_MAX, int TILES_N>
DEVICE Rescale<1> move_maximum(const float (&s)[1][TILES_N][4], RowStatistics<1>& rows, float scale_log2) {
    Rescale<1> rescale;
    const float maximum[2] = {lane_max<INTEGER_MAX>(s[0], 0), lane_max<INTEGER_MAX>(s[0], 1)};
    rescale.needed = RESCALE_SLACK < 0 || any_in_warp(maximum[0] * scale_log2 - rows.reference[0] > RESCALE_SLACK ||
                                                      maximum[1] * scale_log2 - rows.reference[1] > RESCALE_SLACK);
    if (rescale.needed) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float reference = max_of(rows.reference[half], row_max(maximum[half]) * scale_log2);
            rescale.factor[0][half] = exp2_approx(rows.reference[half] - reference);
            rows.reference[half] = reference;
            rows.sum[half] *= rescale.factor[0][half];
        }
    }
    return rescale;
}

// Replaces scores by probabilities relative to the reference, and adds them to the sums.
template <bool, int TILES_N> DEVICE void exponentiate(float (&s)[1][TILES_N][4], RowStatistics<1>& rows, float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i) {
                s[0][n][i] = exp2_approx(s[0][n][i] * scale_log2 - rows.reference[half]);
                rows.sum[half] += s[0][n][i];
            }
}
