// Forward attention on tensor cores with mma.sync: for sm_80 and later, and with TURING, in half precision, for sm_75.
//
// A block owns BLOCK_M query rows, of BLOCK_HEADS heads; each warp owns BLOCK_M / NUM_WARPS of them, whole, so that softmax
// needs no traffic between warps. Keys and values stream through NUM_STAGES buffers in shared memory, from the last tile to the
// first. Scores, probabilities and the output stay in registers: P is the A operand of P V as it falls out of
// S = Q K^T. Only tiles that the mask cuts are masked; tiles that it hides are never loaded.

// Contents: forward_mma.cu.j2 and
//   lib/base.cuh
//   lib/ptx/math.cuh
//   lib/ptx/fp16.cuh
//   lib/ptx/fragment.cuh
//   lib/ptx/mma.cuh
//   lib/ptx/ldmatrix.cuh
//   lib/ptx/copy.cuh
//   lib/ptx/access.cuh
//   lib/ptx/opaque.cuh
//   lib/ptx/turing.cuh
//   lib/constants.cuh.j2
//   lib/params.cuh.j2
//   lib/masks/window.cuh
//   lib/kv_tiles.cuh
//   lib/schedule.cuh
//   lib/tile.cuh
//   lib/copies.cuh
//   lib/loader.cuh
//   lib/rescale.cuh
//   lib/softmax.cuh
//   lib/sink.cuh
//   lib/mma_tiles.cuh

// ---- lib/base.cuh
// as it stands there

// ---- lib/ptx/math.cuh
// as it stands there

// ---- lib/ptx/fp16.cuh
// as it stands there

// ---- lib/ptx/fragment.cuh
// as it stands there

// ---- lib/ptx/mma.cuh
// as it stands there

// ---- lib/ptx/ldmatrix.cuh
// as it stands there

// ---- lib/ptx/copy.cuh
// as it stands there

// ---- lib/ptx/access.cuh
// as it stands there

// ---- lib/ptx/opaque.cuh
// as it stands there

// ---- lib/ptx/turing.cuh
// as it stands there

// ---- lib/constants.cuh.j2
constexpr int HEAD_DIM = 64;
constexpr int HEAD_DIM_V = 64;
constexpr int BLOCK_M = 64;
constexpr int BLOCK_HEADS = 1;
constexpr int BLOCK_N = 64;
constexpr int NUM_WARPS = 4;
constexpr int NUM_STAGES = 2;
constexpr bool Q_IN_REGISTERS = false;
constexpr bool OVERLAP = false;
constexpr int RESCALE_SLACK = -1;
constexpr int MIN_BLOCKS_PER_SM = 1;
constexpr bool TURING = false;
constexpr int SMEM_BYTES = 40960;

// ---- forward_mma.cu.j2
using Element = ElementOf<TURING, bf16>::Type;

constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int WARP_M = BLOCK_M / NUM_WARPS, UNIT_ROWS = BLOCK_M;
constexpr int TILES_M = WARP_M / 16, TILES_N = BLOCK_N / 8, TILES_V = round_up(HEAD_DIM_V, 16) / 8;
constexpr int STEPS_D = ceil_div(HEAD_DIM, 16), STEPS_N = BLOCK_N / 16;

// ---- lib/params.cuh.j2
// Everything that changes from call to call. Strides are in elements.
struct Params {
    const Element* q;  // (batch, seqlen_q, heads_q, head_dim)
    const Element* k;  // (batch, seqlen_k, heads_kv, head_dim)
    const Element* v;  // (batch, seqlen_k, heads_kv, head_dim_v)
    Element* out;  // (batch, seqlen_q, heads_q, head_dim_v)
    float* lse;  // (batch, heads_q, seqlen_q), or null
    const void* sinks;  // (heads_q), or null
    long long q_batch_stride;
    long long q_row_stride;
    long long q_head_stride;
    long long k_batch_stride;
    long long k_row_stride;
    long long k_head_stride;
    long long v_batch_stride;
    long long v_row_stride;
    long long v_head_stride;
    long long out_batch_stride;
    long long out_row_stride;
    long long out_head_stride;
    int batch;
    int heads_q;
    int group;  // query heads per key/value head
    int seqlen_q;
    int seqlen_k;
    int window_left;
    int window_right;
    int sink_dtype;
    float scale_log2;  // softmax scale * log2(e), above 0
    int head_group;
    int longest_first;
};

// ---- lib/masks/window.cuh
// as it stands there

// ---- lib/kv_tiles.cuh
// as it stands there

// ---- lib/schedule.cuh
// as it stands there

// ---- lib/tile.cuh
// as it stands there

// ---- lib/copies.cuh
// as it stands there

// ---- lib/loader.cuh
// as it stands there

// ---- lib/rescale.cuh
// as it stands there

// ---- lib/softmax.cuh
// Online softmax over C fragments of scores. Each lane holds two rows a fragment: index 0 is row c_row(), 1 is c_row() + 8.
//
// The running maximum is kept in units of raw scores; p = exp2(s * scale_log2 - maximum * scale_log2) is one fused
// multiply-add and one exp2. Row sums stay partial in each lane and are added up once, at the end.
template <int TILES_M> struct RowStatistics {
    float maximum[TILES_M][2], sum[TILES_M][2];
    DEVICE RowStatistics() {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) maximum[m][0] = maximum[m][1] = -INF, sum[m][0] = sum[m][1] = 0;
    }
};

// Moves the running maximum to cover the scores of one more tile.
//
// RESCALE_SLACK < 0 does so at every tile. Otherwise the maximum moves only when it has grown by more than RESCALE_SLACK (a
// power of two) in some row of the warp: probabilities then reach at most 2^RESCALE_SLACK, and the division at the end
// makes the result exact again. ROWS_MAY_BE_EMPTY guards rows that have seen no key so far.
template <int RESCALE_SLACK, bool ROWS_MAY_BE_EMPTY, int TILES_M, int TILES_N>
DEVICE Rescale<TILES_M> move_maximum(const float (&s)[TILES_M][TILES_N][4], RowStatistics<TILES_M>& rows, float scale_log2) {
    Rescale<TILES_M> rescale;
    float maximum[TILES_M][2];
    bool grown = RESCALE_SLACK < 0;
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            maximum[m][half] = max_of(rows.maximum[m][half], row_max(lane_max(s[m], half)));
            grown |= (maximum[m][half] - rows.maximum[m][half]) * scale_log2 > RESCALE_SLACK;
        }
    rescale.needed = RESCALE_SLACK < 0 || any_in_warp(grown);
    if (rescale.needed) {
#pragma unroll
        for (int m = 0; m < TILES_M; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                maximum[m][half] = min_of(GREATEST, maximum[m][half]);
                float reference = ROWS_MAY_BE_EMPTY && maximum[m][half] == -INF ? 0 : maximum[m][half];
                rescale.factor[m][half] = exp2_approx((rows.maximum[m][half] - reference) * scale_log2);
                rows.maximum[m][half] = maximum[m][half];
                rows.sum[m][half] *= rescale.factor[m][half];
            }
    }
    return rescale;
}

// Replaces scores by probabilities relative to the running maximum, and adds them to the sums.
template <bool ROWS_MAY_BE_EMPTY, int TILES_M, int TILES_N>
DEVICE void exponentiate(float (&s)[TILES_M][TILES_N][4], RowStatistics<TILES_M>& rows, float scale_log2) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float reference = ROWS_MAY_BE_EMPTY && rows.maximum[m][half] == -INF ? 0 : rows.maximum[m][half] * scale_log2;
            if (is_large(reference)) {
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; ++i) s[m][n][i] = min_of(GREATEST, s[m][n][i]) - rows.maximum[m][half];
                reference = 0;
            }
#pragma unroll
            for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                for (int i = half * 2; i < half * 2 + 2; ++i) {
                    s[m][n][i] = exp2_approx(s[m][n][i] * scale_log2 - reference);
                    rows.sum[m][half] += s[m][n][i];
                }
        }
}

// Sets the scores of hidden keys in one tile to -inf. `row` is that of the first element within the block. Bounds are made
// relative to this lane's first column, so that each element is compared with a constant.
template <int TILES_M, int TILES_N, typename Tiles>
DEVICE void mask_scores(float (&s)[TILES_M][TILES_N][4], const Mask& mask, const Work& work, int row, const Tiles& tiles, int tile) {
    const int first_key = tiles.first_key(tile) + c_column();
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = work.query(row + m * 16 + half * 8 + c_row());
            if (!Mask::HAS_ROW_BEGIN || tile >= tiles.right_edge) {
                const int end = mask.row_end(query) - first_key;
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i >= end) s[m][n][half * 2 + i] = -INF;
            }
            if (Mask::HAS_ROW_BEGIN && tile < tiles.left_edge) {
                const int begin = mask.row_begin(query) - first_key;
#pragma unroll
                for (int n = 0; n < TILES_N; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i < begin) s[m][n][half * 2 + i] = -INF;
            }
        }
}

// ---- lib/sink.cuh
// as it stands there

// ---- forward_mma.cu.j2
using QTile = SmemTile<BLOCK_M, HEAD_DIM>;
using OTile = SmemTile<BLOCK_M, HEAD_DIM_V>;
using KTile = SmemTile<BLOCK_N, HEAD_DIM>;
using VTile = SmemTile<BLOCK_N, HEAD_DIM_V>;

// Shared memory: Q (later the output), then NUM_STAGES buffers of K and V. Q that moves on into registers lends its
// place to the buffers.
constexpr int ROWS_BYTES = larger(QTile::BYTES, OTile::BYTES);
constexpr int STAGE_BYTES = KTile::BYTES + VTile::BYTES;
constexpr int STAGES_OFFSET = Q_IN_REGISTERS ? 0 : ROWS_BYTES;
static_assert(SMEM_BYTES == larger(ROWS_BYTES, STAGES_OFFSET + NUM_STAGES * STAGE_BYTES), "shared memory request");
static_assert(WARP_M % 16 == 0 && BLOCK_M % NUM_WARPS == 0, "each warp owns whole 16-row fragments");
static_assert(BLOCK_N % 16 == 0 && HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "fragments and 16-byte chunks");
static_assert(!OVERLAP || NUM_STAGES > 1, "overlap needs the next K beside this V");

// ---- lib/mma_tiles.cuh
// as it stands there

// ---- forward_mma.cu.j2
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM) forward_mma(const __grid_constant__ Params p) {
    const Work work(p, block_id());
    const int warp_row = warp_id() * WARP_M;
    const Mask mask(p);
    const KvTiles<BLOCK_N> tiles(mask, work.query_begin, work.query_end);

    const Element* k = p.k + work.batch * p.k_batch_stride + work.head_kv * p.k_head_stride;
    const Element* v = p.v + work.batch * p.v_batch_stride + work.head_kv * p.v_head_stride;
    const QTile q_tile{smem_base()};
    const u32 stages = smem_base() + STAGES_OFFSET;
    auto k_tile = [&](int stage) { return KTile{stages + stage * STAGE_BYTES}; };
    auto v_tile = [&](int stage) { return VTile{stages + stage * STAGE_BYTES + KTile::BYTES}; };

    const TileLoader<THREADS, BLOCK_N, HEAD_DIM, Element> k_loader{k, p.k_row_stride};
    const TileLoader<THREADS, BLOCK_N, HEAD_DIM_V, Element> v_loader{v, p.v_row_stride};
    auto has_key = [&](int key) { return tiles.has_key(key); };
    auto load_k = [&](int tile, int stage) {
        if (tiles.contains(tile)) k_loader.start(k_tile(stage), tiles.first_key(tile), has_key);
    };
    auto load_v = [&](int tile, int stage) {
        if (tiles.contains(tile)) v_loader.start(v_tile(stage), tiles.first_key(tile), has_key);
    };

    float o[TILES_M][TILES_V][4] = {};
    float s[TILES_M][TILES_N][4];
    RowStatistics<TILES_M> rows;
    u32 q_fragments[TILES_M][STEPS_D][4];
    if (!tiles.empty()) {
        int tile = tiles.first();   // the tile whose probabilities the current step computes
        int stage = 0;              // its buffer
        int ahead = tile;           // the next tile to load K of
        load_q(q_tile, p, work);
        if constexpr (Q_IN_REGISTERS) {
            close_copies();
            wait_for_copies<0>();
            sync_block();
#pragma unroll
            for (int m = 0; m < TILES_M; ++m)
#pragma unroll
                for (int d = 0; d < STEPS_D; ++d) load_a(q_fragments[m][d], q_tile, warp_row + m * 16, d * 2);
            sync_block();
        }

        // With OVERLAP, K runs one tile ahead of V: the scores of the next tile are multiplied while softmax works on
        // this one. A group of copies holds K of tile i and V of tile i (or i - 1), so each step waits for one group.
        auto load_pair = [&](int into) {
            load_k(ahead, into);
            if constexpr (OVERLAP) { if (ahead != tiles.first()) load_v(ahead + 1, into); }
            else load_v(ahead, into);
            close_copies();
            ahead = tiles.next(ahead);
        };
        if constexpr (NUM_STAGES == 1) {
            load_k(tile, 0);
            close_copies();
        } else {
#pragma unroll
            for (int i = 0; i < NUM_STAGES - 1 + OVERLAP; ++i) load_pair(i);
        }
        if constexpr (OVERLAP) {
            wait_for_copies<NUM_STAGES - 1>();
            sync_block();
            clear(s);
            multiply_qk(s, q_tile, q_fragments, warp_row, k_tile(0));
        }

        auto step = [&](auto masked) {
            float s_next[TILES_M][TILES_N][4];
            if constexpr (NUM_STAGES == 1) {
                wait_for_copies<0>();  // K has come, and after the barrier nobody reads the last V
                sync_block();
                load_v(tile, 0);
                close_copies();
                clear(s);
                multiply_qk(s, q_tile, q_fragments, warp_row, k_tile(0));
                wait_for_copies<0>();  // V has come, and after the barrier nobody reads K
                sync_block();
                load_k(tiles.next(tile), 0);
                close_copies();
            } else {
                wait_for_copies<NUM_STAGES - 2>();  // this step's pair has come, and nobody reads the last one
                sync_block();
                const int previous = stage == 0 ? NUM_STAGES - 1 : stage - 1;
                const int following = stage == NUM_STAGES - 1 ? 0 : stage + 1;
                load_pair(OVERLAP ? stage : previous);
                if constexpr (OVERLAP) {
                    clear(s_next);
                    if (tiles.contains(tiles.next(tile))) multiply_qk(s_next, q_tile, q_fragments, warp_row, k_tile(following));
                    stage = following;
                } else {
                    clear(s);
                    multiply_qk(s, q_tile, q_fragments, warp_row, k_tile(stage));
                }
            }
            if constexpr (masked.value) mask_scores(s, mask, work, warp_row, tiles, tile);
            rescale_output(o, move_maximum<RESCALE_SLACK, masked.value>(s, rows, p.scale_log2));
            exponentiate<masked.value>(s, rows, p.scale_log2);
            multiply_pv(o, s, v_tile(stage));
            if constexpr (OVERLAP) copy(s, s_next);
            else if constexpr (NUM_STAGES > 1) stage = stage == NUM_STAGES - 1 ? 0 : stage + 1;
            tile = tiles.next(tile);
        };
        while (tiles.contains(tile) && tile >= tiles.right_edge) step(Constant<bool, true>{});
        while (tile >= tiles.left_edge) step(Constant<bool, false>{});
        while (tiles.contains(tile)) step(Constant<bool, true>{});
        if constexpr (Q_IN_REGISTERS) sync_block();  // the output is staged where other warps may still read V
    }

    // Which queries these were is worked out once more: remembering it would cost the loop six registers.
    const Work done(p, opaque(block_id()));
    const int first_row = opaque(warp_row);
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + m * 16 + half * 8 + c_row();
            const float sink = sink_logit_log2(p.sinks, p.sink_dtype, min_of(done.head(row), p.heads_q - 1));
            const RowEnd end = finish_row(in_log2(rows.maximum[m][half], p.scale_log2), row_sum(rows.sum[m][half]), sink);
#pragma unroll
            for (int d = 0; d < TILES_V; ++d) o[m][d][half * 2] *= end.factor, o[m][d][half * 2 + 1] *= end.factor;
            if (p.lse && done.exists(row) && c_column() == 0)
                p.lse[(i64(done.batch) * p.heads_q + done.head(row)) * p.seqlen_q + done.query(row)] = end.lse;
        }
    store_fragments<Element>(OTile{smem_base()}, first_row, o, [&](int row) {
        Element* out = p.out + done.batch * p.out_batch_stride + done.head(row) * p.out_head_stride;
        return done.exists(row) ? out + done.query(row) * p.out_row_stride : nullptr;
    });
}

