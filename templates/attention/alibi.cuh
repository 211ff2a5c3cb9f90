// ALiBi: a score loses slope * |query + seqlen_k - seqlen_q - key|, after the soft cap and before the mask.

// The slope of a query head, in the units of the scores that softmax multiplies by scale_log2.
DEVICE float alibi_slope(const Params& p, int batch, int head, float scale_log2) {
    const float slope = p.alibi_slopes[batch * p.alibi_batch_stride + min_of(head, p.heads_q - 1)];
    return slope * (LOG2E * reciprocal_approx(scale_log2));
}

// The slopes of a lane's rows of C fragments. `row` is the first of them within the block.
template <int TILES_M> struct Alibi {
    float slope[TILES_M][2];
    DEVICE Alibi(const Params& p, int batch, const Work& work, int row, float scale_log2) {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                slope[m][half] = alibi_slope(p, batch, work.head(row + m * 16 + half * 8), scale_log2);
    }
    // `diagonal` is the key that query 0 stands at, counted from the lane's first key. Distances are exact up to 2^24.
    template <int TILES_N>
    DEVICE void subtract(float (&s)[TILES_M][TILES_N][4], const Work& work, int row, int diagonal) const {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float distance = float(work.query(row + m * 16 + half * 8) + diagonal);
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        s[m][n][half * 2 + i] -= slope[m][half] * fabsf(distance - float(n * 8 + i));
            }
    }
};
