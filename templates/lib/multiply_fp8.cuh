// The two products of attention, and what goes into and comes out of them, where K and V are 8-bit floats with scales.
//
// K and V become half precision, exactly, on their way from shared memory to the tensor cores, and so does P. Q does too,
// after multiplication by a power of two that brings the block's largest element near 2^14, which keeps all of its bits
// down to 2^-28 of that. One 4-byte word of a matrix holds 4 neighbouring columns of a row, where a 16-bit matrix holds 2: so
// the columns of Q and K are taken in another order, the same for both, and the columns of V and O in another.
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0, "whole chunks");

DEVICE float low_element(u32 pair) { return to_float(Element{static_cast<unsigned short>(pair)}); }
DEVICE float high_element(u32 pair) { return to_float(Element{static_cast<unsigned short>(pair >> 16)}); }

DEVICE float key_scale(const Params& p, int head_kv) {
    return p.k_scales ? p.k_scales[min_of(head_kv, p.heads_kv - 1) * p.k_scale_stride] : 1;
}

DEVICE float larger_magnitude(float x, float y) { return max_of(x, max_of(y, -y)); }

// Within 16 columns, those that lane l of 4 takes as columns 2 l, 2 l + 1, 2 l + 8, 2 l + 9 are 4 l to 4 l + 3.
DEVICE float load_q(u32 (&a)[TILES_M][STEPS_D][4], const Params& p, const Rows& rows) {
    float largest = 0;
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Element* q = rows.pointer(p, rows.nearest(m * 16 + half * 8 + c_row())) + 2 * c_column();
#pragma unroll
            for (int d = 0; d < STEPS_D; ++d) {
                const bool own = d / STEPS_OF_HEAD == head_of(m, half);
                a[m][d][half] = own ? load_global_4(q + d % STEPS_OF_HEAD * 16) : 0;
                a[m][d][2 + half] = own ? load_global_4(q + d % STEPS_OF_HEAD * 16 + 2) : 0;
            }
        }
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int d = 0; d < STEPS_D; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                largest = larger_magnitude(larger_magnitude(largest, low_element(a[m][d][i])), high_element(a[m][d][i]));
    // Every warp has all rows, so all come to the same power; a Q of zeros, or not finite, is left as it is.
    const float log2_largest = log2_approx(warp_max(largest));
    const float power = log2_largest > -100 && log2_largest < 128 ? float(14 - int(log2_largest)) : 0;
    const float factor = exp2_approx(power);
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int d = 0; d < STEPS_D; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                a[m][d][i] = pack2<fp16>(low_element(a[m][d][i]) * factor, high_element(a[m][d][i]) * factor);
    return p.scale_log2 * (BLOCK_HEADS_KV == 1 ? key_scale(p, rows.head_kv) : 1) * exp2_approx(-power);
}
// Stores the block's queries as they have been converted, each warp a share of the columns, where load_a finds them.
template <typename Tile> DEVICE void share_q(const Tile& tile, const u32 (&a)[TILES_M][STEPS_D][4]) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int d = 0; d < STEPS_D; ++d) {
            if (d % NUM_WARPS != warp_id()) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                store_shared_4(tile.address(m * 16 + i % 2 * 8 + c_row(), d * 2 + i / 2) + c_column() * 2, a[m][d][i]);
        }
}
//% if block_heads_kv > 1

// Multiplies the scores of each head by the scale of its keys.
DEVICE void scale_scores(float (&s)[TILES_M][TILES_N][4], const float (&scale)[BLOCK_HEADS_KV]) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] *= scale[head_of(m, i / 2)];
}
//% endif

// S += Q K^T for one tile of keys.
template <typename KTile, typename QFragment>
DEVICE void multiply_qk(float (&s)[TILES_M][TILES_N][4], const KTile& k, QFragment q_fragment) {
#pragma unroll
    for (int d = 0; d < STEPS_D; d += 2) {
#pragma unroll
        for (int n = 0; n < TILES_N / 2; ++n) {
            u32 b[4];  // keys 0 to 7 of 16: columns 0 to 15, 16 to 31; then keys 8 to 15
            load_b_transposed(b, k, n * 16, d);
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                if (d + next == STEPS_D) break;
                u32 low[2], high[2];
                unpack_e4m3(b[next], low[0], low[1]);
                unpack_e4m3(b[2 + next], high[0], high[1]);
#pragma unroll
                for (int m = 0; m < TILES_M; ++m) {
                    u32 a[4];
                    q_fragment(a, m, d + next);
                    mma_m16n8k16<fp16>(s[m][2 * n], a, low[0], low[1]);
                    mma_m16n8k16<fp16>(s[m][2 * n + 1], a, high[0], high[1]);
                }
            }
        }
    }
}

// O += P V for one tile of values. The even columns of 16 are tile 2 d of O, the odd ones tile 2 d + 1.
template <typename VTile>
DEVICE void multiply_pv(float (&o)[TILES_M][TILES_V][4], const float (&p)[TILES_M][TILES_N][4], const VTile& v) {
#pragma unroll
    for (int n = 0; n < TILES_N / 2; ++n) {
        u32 a[TILES_M][4];
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) c_to_a<fp16>(a[m], p[m][2 * n], p[m][2 * n + 1]);
#pragma unroll
        for (int d = 0; d < TILES_V / 2; d += 2) {
            u32 b[4];  // keys 0 to 7, 8 to 15 for columns 0 to 15; then for columns 16 to 31
            load_b(b, v, n * 16, d);
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                if (d + next == TILES_V / 2) break;
                u32 even[2], odd[2];
                unpack_e4m3(part_pairs(b[2 * next]), even[0], odd[0]);
                unpack_e4m3(part_pairs(b[2 * next + 1]), even[1], odd[1]);
#pragma unroll
                for (int m = 0; m < TILES_M; ++m) {
                    mma_m16n8k16<fp16>(o[m][2 * (d + next)], a[m], even[0], even[1]);
                    mma_m16n8k16<fp16>(o[m][2 * (d + next) + 1], a[m], odd[0], odd[1]);
                }
            }
        }
    }
}

// Stores this lane's part of a row of O, whose columns are tiles of O from `first` on, 4 neighbouring columns of each 16; it
// begins at byte `address` of shared memory.
DEVICE void store_row(u32 address, const float (&o)[TILES_V][4], int first, int half) {
#pragma unroll
    for (int d = 0; d < TILES_OF_HEAD; d += 2) {
        const u32 to = address + (d * 8 + 2 * c_column()) * 4;
        store_shared_floats(to, o[first + d][half * 2], o[first + d + 1][half * 2]);
        store_shared_floats(to + 8, o[first + d][half * 2 + 1], o[first + d + 1][half * 2 + 1]);
    }
}

DEVICE float output_scale(const Params& p, int head_kv) {
    return p.v_scales ? p.v_scale * p.v_scales[head_kv * p.v_scale_stride] : p.v_scale;
}
