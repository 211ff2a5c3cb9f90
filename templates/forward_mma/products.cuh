// What a block does with whole tiles: the copy of Q, and the two products.

// Starts copying the block's queries.
DEVICE void load_q(const QTile& tile, const Params& p, const Work& work) {
    using Loader = TileLoader<THREADS, BLOCK_M, HEAD_DIM, Element>;
    const Element* q = p.q + work.batch * p.q_batch_stride + work.head_begin * p.q_head_stride;
    if constexpr (BLOCK_HEADS == 1) {
        Loader{q, p.q_row_stride}.start(tile, work.query_begin, [&](int query) { return query < work.query_end; });
    } else {
        Loader::gather(tile, [&](int row) {
            const Element* first = q + row / BLOCK_QUERIES * p.q_head_stride;
            return work.exists(row) ? first + work.query(row) * p.q_row_stride : nullptr;
        });
    }
}

// S += Q K^T for one tile of keys.
DEVICE void multiply_qk(float (&s)[TILES_M][TILES_N][4], const QTile& q, const u32 (&q_fragments)[TILES_M][STEPS_D][4],
                        int warp_row, const KTile& k) {
#pragma unroll
    for (int d = 0; d < STEPS_D; ++d) {
        u32 a[TILES_M][4];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
            if constexpr (Q_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[m][i] = q_fragments[m][d][i];
            } else {
                load_a(a[m], q, warp_row + m * 16, d * 2);
            }
        }
#pragma unroll
        for (int n = 0; n < STEPS_N; ++n) {
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
DEVICE void multiply_pv(float (&o)[TILES_M][TILES_V][4], const float (&p)[TILES_M][TILES_N][4], const VTile& v) {
#pragma unroll
    for (int n = 0; n < STEPS_N; ++n) {
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
