// The two products of attention, and what goes into and comes out of them, where K and V have the dtype of the queries.

// The block's queries as A fragments. Rows that do not exist repeat the last one; columns of another head are zeros. Returns
// what the products with K must be multiplied by to be scores in log2 units.
DEVICE float load_q(u32 (&a)[TILES_M][STEPS_D][4], const Params& p, const Rows& rows) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Element* q = rows.pointer(p, rows.nearest(m * 16 + half * 8 + c_row())) + c_column();
#pragma unroll
            for (int d = 0; d < STEPS_D; ++d) {
                const int column = d % STEPS_OF_HEAD * 16;
                const bool own = d / STEPS_OF_HEAD == head_of(m, half);
                a[m][d][half] = own ? load_global_4(q + column) : 0;
                a[m][d][2 + half] = own && column + 8 < HEAD_DIM ? load_global_4(q + column + 8) : 0;
            }
        }
    return p.scale_log2;
}

// S += Q K^T for one tile of keys. q_fragment(a, m, d) gives the 16 x 16 tile of Q at rows 16 m and columns 16 d.
template <typename KTile, typename QFragment>
DEVICE void multiply_qk(float (&s)[TILES_M][TILES_N][4], const KTile& k, QFragment q_fragment) {
#pragma unroll
    for (int d = 0; d < STEPS_D; ++d) {
        u32 a[TILES_M][4];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) q_fragment(a[m], m, d);
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
template <typename VTile>
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

// Stores this lane's part of a row of O, whose columns are tiles of O from `first` on; it begins at byte `address` of shared
// memory.
DEVICE void store_row(u32 address, const float (&o)[TILES_V][4], int first, int half) {
#pragma unroll
    for (int v = 0; v < TILES_OF_HEAD; ++v)
        if (HEAD_DIM_V % 16 == 0 || v * 8 < HEAD_DIM_V)
            store_shared_floats(address + (v * 8 + c_column()) * 4, o[first + v][half * 2], o[first + v][half * 2 + 1]);
}

// What a finished row must be multiplied by.
DEVICE float output_scale(const Params&, int) { return 1; }
