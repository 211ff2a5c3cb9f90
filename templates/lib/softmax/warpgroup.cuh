#include "lib/base.cuh"
#include "lib/ptx/math.cuh"
#include "lib/ptx/fragment.cuh"
#include "lib/softmax/rescale.cuh"

// Online softmax over one C fragment of scores: of a lane's two rows, index 0 is row c_row(), 1 is c_row() + 8.
//
// What probabilities are relative to is kept in log2 units and begins at a finite number below all scores: nothing is ever -inf
// minus -inf, and no tile asks whether a row has seen a key yet. Row sums stay partial in each lane and are added up at the end.
constexpr float LOWEST = -GREATEST;

//
// A reference is a product that was rounded, and a fused multiply-add is not: it is off by half an ulp of the reference at the row's
// own maximum, 64 at 2^30, whose power overflows. Beyond ENORMOUS the scale of a row is therefore a power of two, whose products are
// exact: scores there are equal or at least 8 apart, and those that are not the maximum weigh nothing at either scale. What is done
// a tile stays what it is: branches in `exponentiate` cost 3 to 11 %.
constexpr float ENORMOUS = 1 << 27, OVERFLOWED = 0x1p100f;  // what stands for products q.k that are beyond fp32

struct RowStatistics {
    float reference[2] = {LOWEST, LOWEST}, sum[2] = {}, scale[2];
    DEVICE explicit RowStatistics(float scale_log2) : scale{scale_log2, scale_log2} {}
    // The reference of a row in log2 units.
    DEVICE float reference_log2(int half, float scale_log2) const {
        return scale[half] == scale_log2 ? reference[half] : reference[half] / scale[half] * scale_log2;
    }
};

// The power of two above `x`.
DEVICE float power_above(float x) { return bits_float((float_bits(x) & 0x7f800000) + (1 << 23)); }

// Moves the reference of a row to `score`, its greatest so far, and gives what sums and output have to be multiplied by.
DEVICE float move_to(RowStatistics& rows, int half, float score, float scale_log2) {
    const float at_scale = in_log2(score, scale_log2);
    const bool enormous = max_of(at_scale, -at_scale) > ENORMOUS;
    const float scale = enormous ? power_above(scale_log2) : scale_log2;
    if (!(score * rows.scale[half] > rows.reference[half])) return 1;
    const float reference = in_log2(score, scale);
    const float factor = scale == rows.scale[half] ? exp2_approx(rows.reference[half] - reference) : 0;
    rows.reference[half] = reference, rows.scale[half] = scale;
    return factor;
}

template <int TILES_N> DEVICE void limit_scores(float (&s)[TILES_N][4], int half) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) s[n][i] = min_of(OVERFLOWED, s[n][i]);
}

// Moves the reference to cover the scores of one more tile: at every tile if RESCALE_SLACK < 0, otherwise only where it would
// grow by more than RESCALE_SLACK (a power of two) in some row of the warp: probabilities then reach at most 2^RESCALE_SLACK, and
// the division at the end makes the result exact again. Until then each lane looks at its own scores only: no shuffles.
template <int RESCALE_SLACK, bool INTEGER_MAX, int TILES_N>
DEVICE Rescale<1> move_reference(float (&s)[1][TILES_N][4], RowStatistics& rows, float scale_log2) {
    Rescale<1> rescale;
    const float maximum[2] = {lane_max<INTEGER_MAX>(s[0], 0), lane_max<INTEGER_MAX>(s[0], 1)};
    rescale.needed = RESCALE_SLACK < 0 || any_in_warp(maximum[0] * rows.scale[0] - rows.reference[0] > RESCALE_SLACK ||
                                                      maximum[1] * rows.scale[1] - rows.reference[1] > RESCALE_SLACK);
    if (rescale.needed) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float score = row_max(maximum[half]);
            if (score == INF) score = OVERFLOWED, limit_scores(s[0], half);
            rescale.factor[0][half] = move_to(rows, half, score, scale_log2);
            rows.sum[half] *= rescale.factor[0][half];
        }
    }
    return rescale;
}

// Replaces scores by probabilities relative to the reference, and adds them to the sums.
template <int TILES_N> DEVICE void exponentiate(float (&s)[1][TILES_N][4], RowStatistics& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i) {
                s[0][n][i] = exp2_approx(s[0][n][i] * rows.scale[half] - rows.reference[half]);
                rows.sum[half] += s[0][n][i];
            }
}
