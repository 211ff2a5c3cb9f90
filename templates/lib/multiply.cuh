// The two products of attention on register tiles, by warp-level multiplies.

// S += Q K^T for one tile of keys. load_q(fragment, m, d) gives the 16 x 16 tile of Q at rows 16 m and columns 16 d.
template <typename Element, int TILES_M, int TILES_N, typename KTile, typename LoadQ>
DEVICE void multiply_qk(float (&s)[TILES_M][TILES_N][4], const KTile& k, LoadQ load_q) {
#pragma unroll
    for (int d = 0; d < STEPS_D; ++d) {
        u32 a[TILES_M][4];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) load_q(a[m], m, d);
#pragma unroll
        for (int n = 0; n < TILES_N / 2; ++n) {
            u32 b[4];
            load_b_transposed(b, k, n * 16, d * 2);
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                mma_m16n8k16<Element>(s[m][2 * n], a[m], b[0], b[1]);
                mma_m16n8k16<Element>(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// O += P V for one tile of values, P rounded to Element on the way.
template <typename Element, int TILES_M, int TILES_N, int TILES_V, typename VTile>
DEVICE void multiply_pv(float (&o)[TILES_M][TILES_V][4], const float (&p)[TILES_M][TILES_N][4], const VTile& v) {
#pragma unroll
    for (int n = 0; n < TILES_N / 2; ++n) {
        u32 a[TILES_M][4];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) c_to_a<Element>(a[m], p[m][2 * n], p[m][2 * n + 1]);
#pragma unroll
        for (int d = 0; d < TILES_V / 2; ++d) {
            u32 b[4];
            load_b(b, v, n * 16, d * 2);
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                mma_m16n8k16<Element>(o[m][2 * d], a[m], b[0], b[1]);
                mma_m16n8k16<Element>(o[m][2 * d + 1], a[m], b[2], b[3]);
            }
        }
    }
}
