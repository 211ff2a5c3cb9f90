// Forward attention on the CUDA cores: any dtype, head dim and arch. The plain form of the algorithm, and the fallback.
//
// A block owns BLOCK_M query rows of one head, each warp ROWS_PER_WARP of them. Keys and values come through shared memory
// in tiles of one key per lane: a lane computes the scores of its own key against the warp's rows; then, for the product
// with V, a lane owns every 32nd column of the output and the probabilities are handed round by shuffles. (Without a number of
// blocks in the launch bounds the compiler aims at more of them than registers allow, and spills.)

// Contents: forward_simt.cu.j2 and
//   lib/base.cuh
//   lib/ptx/math.cuh
//   lib/ptx/fp16.cuh
//   lib/element.cuh
//   lib/constants.cuh.j2
//   lib/params.cuh.j2
//   lib/masks/causal.cuh
//   lib/kv_tiles.cuh
//   lib/schedule.cuh
//   lib/sink.cuh

// ---- lib/base.cuh
// as it stands there

// ---- lib/ptx/math.cuh
// as it stands there

// ---- lib/ptx/fp16.cuh
// as it stands there

// ---- lib/element.cuh
// as it stands there

// ---- forward_simt.cu.j2
using Element = float;

// ---- lib/constants.cuh.j2
constexpr int HEAD_DIM = 40;
constexpr int HEAD_DIM_V = 40;
constexpr int NUM_WARPS = 4;
constexpr int ROWS_PER_WARP = 8;
constexpr int SMEM_BYTES = 15488;

// ---- forward_simt.cu.j2
constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int BLOCK_M = NUM_WARPS * ROWS_PER_WARP, BLOCK_HEADS = 1, UNIT_ROWS = BLOCK_M;
constexpr int BLOCK_N = WARP_SIZE;
constexpr int COLUMNS_PER_LANE = ceil_div(HEAD_DIM_V, WARP_SIZE);

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
    int longest_first;
    int head_group;
};

// ---- lib/masks/causal.cuh
// as it stands there

// ---- lib/kv_tiles.cuh
// as it stands there

// ---- lib/schedule.cuh
// as it stands there

// ---- lib/sink.cuh
// as it stands there

// ---- forward_simt.cu.j2
// Shared memory: Q as floats, then one tile of K and one of V. A row of K is padded so that its length in 4-byte words is
// odd: 32 lanes that read the same column of 32 rows then hit 32 banks.
constexpr int K_PITCH = sizeof(Element) == 4 ? HEAD_DIM | 1 : round_up(HEAD_DIM + 2, 4) - 2;
constexpr int Q_BYTES = BLOCK_M * HEAD_DIM * 4;
constexpr int K_BYTES = round_up(BLOCK_N * K_PITCH * int(sizeof(Element)), 4);
static_assert(K_PITCH >= HEAD_DIM && K_PITCH * sizeof(Element) / 4 % 2 == 1, "K rows");
static_assert(SMEM_BYTES == Q_BYTES + K_BYTES + BLOCK_N * HEAD_DIM_V * int(sizeof(Element)), "shared memory request");

// Copies rows [first_row, first_row + ROWS) of a row-major matrix to shared memory; rows without has_row become zeros.
template <int ROWS, int COLUMNS, typename To, typename HasRow>
DEVICE void load_rows(SharedArray<To> to, int pitch, const Element* matrix, i64 row_stride, int first_row, HasRow has_row) {
    for (int i = thread_id(); i < ROWS * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const float x = has_row(first_row + row) ? to_float(matrix[(first_row + row) * row_stride + column]) : 0.0f;
        to.set(row * pitch + column, from_float<To>(x));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_simt(const __grid_constant__ Params p) {
    const Work work(p, block_id());
    const int warp_row = warp_id() * ROWS_PER_WARP;
    const int lane = lane_id();
    const Mask mask(p);
    const KvTiles<BLOCK_N> tiles(mask, work.query_begin, work.query_end);

    const Element* q = p.q + work.batch * p.q_batch_stride + work.head_begin * p.q_head_stride;
    const Element* k = p.k + work.batch * p.k_batch_stride + work.head_kv * p.k_head_stride;
    const Element* v = p.v + work.batch * p.v_batch_stride + work.head_kv * p.v_head_stride;
    const SharedArray<float> q_rows{smem_base()};
    const SharedArray<Element> k_rows{smem_base() + Q_BYTES};
    const SharedArray<Element> v_rows{smem_base() + Q_BYTES + K_BYTES};

    float o[ROWS_PER_WARP][COLUMNS_PER_LANE] = {};
    float maximum[ROWS_PER_WARP], sum[ROWS_PER_WARP];  // the maximum is of raw scores; the sum is this lane's part
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) maximum[r] = -INF, sum[r] = 0;

    load_rows<BLOCK_M, HEAD_DIM>(q_rows, HEAD_DIM, q, p.q_row_stride, work.query_begin,
                                  [&](int query) { return query < work.query_end; });

    for (int tile = tiles.first(); tiles.contains(tile); tile = tiles.next(tile)) {
        auto has_key = [&](int key) { return tiles.has_key(key); };
        load_rows<BLOCK_N, HEAD_DIM>(k_rows, K_PITCH, k, p.k_row_stride, tiles.first_key(tile), has_key);
        load_rows<BLOCK_N, HEAD_DIM_V>(v_rows, HEAD_DIM_V, v, p.v_row_stride, tiles.first_key(tile), has_key);
        sync_block();

        float s[ROWS_PER_WARP] = {};
        for (int first = 0; first < HEAD_DIM; first += 4) {  // sums of 4 first: a quarter of the roundings at full size
            float part[ROWS_PER_WARP] = {};
#pragma unroll
            for (int d = first; d < min_of(first + 4, HEAD_DIM); ++d) {
                const float x = to_float(k_rows.get(lane * K_PITCH + d));
#pragma unroll
                for (int r = 0; r < ROWS_PER_WARP; ++r) part[r] += q_rows.get((warp_row + r) * HEAD_DIM + d) * x;
            }
#pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; ++r) s[r] += part[r];
        }
#pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; ++r) {
            const int query = work.query(warp_row + r), key = tiles.first_key(tile) + lane;
            if (tiles.needs_mask(tile) && (key < mask.row_begin(query) || key >= mask.row_end(query))) s[r] = -INF;
            s[r] = min_of(3e38f, s[r]);  // a product that overflowed is a very large score, not inf minus inf
            const float new_maximum = max_of(maximum[r], warp_max(s[r]));
            const float reference = new_maximum == -INF ? 0 : new_maximum;  // no key so far
            const float factor = exp2_approx((maximum[r] - reference) * p.scale_log2);
            s[r] = exp2_approx((s[r] - reference) * p.scale_log2);  // the difference first: fp32 has digits to lose
            maximum[r] = new_maximum;
            sum[r] = sum[r] * factor + s[r];
#pragma unroll
            for (int c = 0; c < COLUMNS_PER_LANE; ++c) o[r][c] *= factor;
        }
        float part[ROWS_PER_WARP][COLUMNS_PER_LANE] = {};  // of this tile: a 32nd of the roundings at full size
#pragma unroll 4
        for (int j = 0; j < BLOCK_N; ++j) {
            float probability[ROWS_PER_WARP];
#pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; ++r) probability[r] = shuffle(s[r], j);
#pragma unroll
            for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
                const int column = lane + c * WARP_SIZE;
                const float x = column < HEAD_DIM_V ? to_float(v_rows.get(j * HEAD_DIM_V + column)) : 0.0f;
#pragma unroll
                for (int r = 0; r < ROWS_PER_WARP; ++r) part[r][c] += probability[r] * x;
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; ++r)
#pragma unroll
            for (int c = 0; c < COLUMNS_PER_LANE; ++c) o[r][c] += part[r][c];
        sync_block();
    }

    const float sink = sink_logit_log2(p.sinks, p.sink_dtype, work.head_begin);
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; ++r) {
        const int query = work.query(warp_row + r);
        const RowEnd end = finish_row(maximum[r] * p.scale_log2, warp_sum(sum[r]), sink);
        if (query >= work.query_end) continue;
        if (p.lse && lane == 0) p.lse[(i64(work.batch) * p.heads_q + work.head_begin) * p.seqlen_q + query] = end.lse;
        Element* out = p.out + work.batch * p.out_batch_stride + work.head_begin * p.out_head_stride + query * p.out_row_stride;
#pragma unroll
        for (int c = 0; c < COLUMNS_PER_LANE; ++c) {
            const int column = lane + c * WARP_SIZE;
            if (column < HEAD_DIM_V) out[column] = from_float<Element>(o[r][c] * end.factor);
        }
    }
}

