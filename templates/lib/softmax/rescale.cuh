#include "lib/base.cuh"
#include "lib/ptx/math.cuh"

// What online softmax asks of a tile of scores, and does to the output, whatever its sums are relative to.

// Probabilities are exp2(fma(score, scale, -reference)), and the reference is a product that was rounded: at the row's maximum that
// is not 0 but up to half an ulp of the reference, 64 at 2^30, whose power overflows. Beyond LARGE, scores are therefore made
// differences first, which costs a branch a tile. What overflowed in QK counts as GREATEST, so that it is not inf minus inf.
constexpr float LARGE = 1 << 20, GREATEST = 3e38f;

DEVICE bool is_large(float reference_log2) { return reference_log2 > LARGE || (reference_log2 < -LARGE && reference_log2 > -GREATEST); }

// A score in log2 units, rounded by itself: never the product of a fused multiply-add.
DEVICE float in_log2(float score, float scale_log2) { return min_of(GREATEST, multiply_rounded(score, scale_log2)); }

// The maximum of what this lane has of a row. INTEGER_MAX compares three integers at a time, in half as many instructions, and
// again as floats in the rare lane all of whose scores are negative: their order is another one.
template <bool INTEGER_MAX = false, int TILES_N> DEVICE float lane_max(const float (&s)[TILES_N][4], int half) {
    int bits = -1;
    if constexpr (INTEGER_MAX) {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) bits = max_of_three(bits, float_bits(s[n][half * 2]), float_bits(s[n][half * 2 + 1]));
    }
    float x = bits_float(bits);
    if (!INTEGER_MAX || bits < 0) {
        x = max_of(s[0][half * 2], s[0][half * 2 + 1]);
#pragma unroll
        for (int n = 1; n < TILES_N; ++n) x = max_of(x, max_of(s[n][half * 2], s[n][half * 2 + 1]));
    }
    return x;
}

// What the output and the sums have to be multiplied by when the running maximum moves.
template <int TILES_M> struct Rescale {
    float factor[TILES_M][2];
    bool needed;  // the same in all lanes of the warp
};

template <int TILES_M, int TILES_V>
DEVICE void rescale_output(float (&o)[TILES_M][TILES_V][4], const Rescale<TILES_M>& rescale) {
    if (!rescale.needed) return;
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int v = 0; v < TILES_V; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[m][v][i] *= rescale.factor[m][i / 2];
}
