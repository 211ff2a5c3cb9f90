#include "lib/base.cuh"
#include "lib/ptx/math.cuh"

// Soft cap: a score s becomes cap * tanh(s * scale / cap), before the mask. What is left here is the tanh; the softmax's own
// factor is then cap * log2(e).
// 1 - 2 / (e^2x + 1) has an absolute error of 2^-23, where tanh.approx has 2^-11; near 0, where that is too much for a large
// cap, the series takes its place.
DEVICE float tanh_approx(float x) {
    if (x * x < 1e-3f) return x * (1.0f - x * x * (1.0f / 3));
    return 1.0f - 2.0f * reciprocal_approx(exp2_approx(2.0f * LOG2E * x) + 1.0f);
}
template <int TILES_M, int TILES_N, int ELEMENTS>
DEVICE void cap_scores(float (&s)[TILES_M][TILES_N][ELEMENTS], float softcap_scale) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) s[m][n][i] = tanh_approx(s[m][n][i] * softcap_scale);
}
