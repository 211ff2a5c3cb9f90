//% include "lib/rescale.cuh"
//% include "lib/warpgroup_mask.cuh"

// Online softmax over one C fragment of scores: of a lane's two rows, index 0 is row c_row(), 1 is c_row() + 8.
//
// What probabilities are relative to is kept in log2 units and begins at a finite number below all scores: nothing is ever -inf
// minus -inf, and no tile asks whether a row has seen a key yet. Row sums stay partial in each lane and are added up at the end.
constexpr float LOWEST = -GREATEST;

struct RowStatistics {
    float reference[2] = {LOWEST, LOWEST}, sum[2] = {};
};

// Moves the reference to cover the scores of one more tile: at every tile if RESCALE_SLACK < 0, otherwise only where it would
// grow by more than RESCALE_SLACK (a power of two) in some row of the warp: probabilities then reach at most 2^RESCALE_SLACK, and
// the division at the end makes the result exact again. Until then each lane looks at its own scores only: no shuffles.
template <int RESCALE_SLACK, bool INTEGER_MAX, int TILES_N>
DEVICE Rescale<1> move_reference(const float (&s)[1][TILES_N][4], RowStatistics& rows, float scale_log2) {
    Rescale<1> rescale;
    const float maximum[2] = {lane_max<INTEGER_MAX>(s[0], 0), lane_max<INTEGER_MAX>(s[0], 1)};
    rescale.needed = RESCALE_SLACK < 0 || any_in_warp(maximum[0] * scale_log2 - rows.reference[0] > RESCALE_SLACK ||
                                                      maximum[1] * scale_log2 - rows.reference[1] > RESCALE_SLACK);
    if (rescale.needed) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float reference = max_of(rows.reference[half], in_log2(row_max(maximum[half]), scale_log2));
            rescale.factor[0][half] = exp2_approx(rows.reference[half] - reference);
            rows.reference[half] = reference;
            rows.sum[half] *= rescale.factor[0][half];
        }
    }
    return rescale;
}

// Replaces scores by probabilities relative to the reference, and adds them to the sums.
template <int TILES_N> DEVICE void exponentiate(float (&s)[1][TILES_N][4], RowStatistics& rows, float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float reference = rows.reference[half];
        if (is_large(reference)) {
            const float inverse = reciprocal_approx(scale_log2);
#pragma unroll
            for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; ++i) s[0][n][i] = (in_log2(s[0][n][i], scale_log2) - reference) * inverse;
            reference = 0;
        }
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i) {
                s[0][n][i] = exp2_approx(s[0][n][i] * scale_log2 - reference);
                rows.sum[half] += s[0][n][i];
            }
    }
}
