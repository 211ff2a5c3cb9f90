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
// The machine: integer types, thread indices, barriers, shuffles, dynamic shared memory, scalar maths.
// This file and lib/ptx/ are the only ones that know the warp size or name a CUDA built-in.

#define DEVICE __device__ __forceinline__
#define EVERYWHERE __host__ __device__ constexpr

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP_SIZE = 32;
#define INF __int_as_float(0x7f800000)
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

DEVICE int thread_id() { return threadIdx.x; }
DEVICE int lane_id() { return threadIdx.x % WARP_SIZE; }
DEVICE int block_id() { return blockIdx.x; }
DEVICE int grid_size() { return gridDim.x; }
// The same value in every lane, in a form the compiler can keep in a uniform register.
DEVICE int warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / WARP_SIZE, 0); }

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE bool any_in_warp(bool condition) { return __any_sync(0xffffffffu, condition); }
template <typename T> DEVICE T shuffle(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
template <typename T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

DEVICE float warp_max(float x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
}
DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

template <typename T> DEVICE T min_of(T a, T b) { return a < b ? a : b; }
template <typename T> DEVICE T max_of(T a, T b) { return a > b ? a : b; }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
template <typename T> EVERYWHERE T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <typename T> EVERYWHERE T round_up(T a, T b) { return ceil_div(a, b) * b; }

// Dynamic shared memory is addressed by 32-bit byte offsets within the shared window.
extern __shared__ __align__(1024) unsigned char dynamic_smem[];
DEVICE u32 smem_base() { return static_cast<u32>(__cvta_generic_to_shared(dynamic_smem)); }

// An array of T in shared memory that starts at byte `address`.
template <typename T> struct SharedArray {
    u32 address;
    DEVICE T* pointer() const { return reinterpret_cast<T*>(dynamic_smem + (address - smem_base())); }
    DEVICE T get(int i) const { return pointer()[i]; }
    DEVICE void set(int i, T value) const { pointer()[i] = value; }
};

DEVICE float bf16_to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE bf16 float_to_bf16(float x) {  // round to nearest even; works where cvt to bf16 does not exist (before sm_80)
    u32 bits = __float_as_uint(x);
    if (x != x) return {0x7fff};
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// A constant as a function argument: `if constexpr (argument.value)`.
template <typename T, T VALUE> struct Constant { static constexpr T value = VALUE; };
EVERYWHERE int larger(int a, int b) { return a > b ? a : b; }

// Register tiles are plain arrays; every loop over them is unrolled, so that no element is indexed at run time.
template <int M, int N, int E> DEVICE void clear(float (&tile)[M][N][E]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < E; ++e) tile[m][n][e] = 0;
}
template <int M, int N, int E> DEVICE void copy(float (&to)[M][N][E], const float (&from)[M][N][E]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < E; ++e) to[m][n][e] = from[m][n][e];
}

// ---- lib/ptx/math.cuh
// Scalar maths and number conversion as single instructions.

DEVICE float exp2_approx(float x) {  // 2 ulp; subnormal results are flushed to 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A product that is rounded before anything is added to it: the compiler makes no fused multiply-add of it.
DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }

DEVICE float reciprocal_approx(float x) {  // 1 ulp
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Of a row of floats as integers: the same order for floats that are not negative, and any of those is above all that are.
DEVICE int float_bits(float x) { return __float_as_int(x); }
DEVICE float bits_float(int bits) { return __int_as_float(bits); }
DEVICE int max_of_three(int a, int b, int c) { return __vimax3_s32(a, b, c); }  // one instruction from sm_90 on

// Two floats to one register of two 16-bit elements, round to nearest even; `low` takes the low half.
template <typename Element> DEVICE u32 pack2(float low, float high);
template <> DEVICE u32 pack2<bf16>(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <> DEVICE u32 pack2<fp16>(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// ---- lib/ptx/fp16.cuh
// Scalar half-precision conversion, on every arch.

DEVICE float half_to_float(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE fp16 float_to_half(float x) {
    fp16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// ---- lib/element.cuh
// One element of a tensor to float and back, for every dtype and arch.
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(fp16 x) { return half_to_float(x); }
DEVICE float to_float(bf16 x) { return bf16_to_float(x); }

template <typename Element> DEVICE Element from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE fp16 from_float<fp16>(float x) { return float_to_half(x); }
template <> DEVICE bf16 from_float<bf16>(float x) { return float_to_bf16(x); }

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
// Bottom-right causal: row i sees key j iff j <= i + seqlen_k - seqlen_q.
struct Mask {
    int seqlen_k, offset;
    DEVICE Mask(const Params& p) : Mask(p, p.seqlen_q, p.seqlen_k) {}
    DEVICE Mask(const Params&, int queries, int keys) : seqlen_k(keys), offset(keys - queries) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return 0; }
    DEVICE int key_end(int row_end) const { return max_of(0, row_end + offset); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return 0; }
    DEVICE int shared_end(int row_begin) const { return max_of(0, row_begin + offset + 1); }
    // Row `row` sees keys [row_begin, row_end).
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return row + offset + 1; }
};

// ---- lib/kv_tiles.cuh
// The key tiles that a block of query rows has to visit, from the last to the first. Tiles are counted from the first key
// that some row sees, so that a window of W keys never costs a tile more than it must. Tiles that no row sees are not
// among them; tiles that every row sees whole need no mask.
template <int BLOCK_N> struct KvTiles {
    int key_begin, key_end;     // keys that some row sees; keys outside are loaded as zeros
    int end;                    // tiles [0, end)
    int left_edge, right_edge;  // tiles before left_edge hold keys that a row is past, tiles from right_edge on keys to come

    KvTiles() = default;
    DEVICE KvTiles(const Mask& mask, int query_begin, int query_end) {
        key_begin = mask.key_begin(query_begin);
        key_end = max_of(mask.key_end(query_end), key_begin);
        end = ceil_div(key_end - key_begin, BLOCK_N);
        left_edge = ceil_div(max_of(mask.shared_begin(query_end) - key_begin, 0), BLOCK_N);
        right_edge = max_of(mask.shared_end(query_begin) - key_begin, 0) / BLOCK_N;
    }
    DEVICE bool empty() const { return end == 0; }
    DEVICE int first() const { return end - 1; }
    DEVICE static int next(int tile) { return tile - 1; }
    DEVICE static bool contains(int tile) { return tile >= 0; }
    DEVICE bool needs_mask(int tile) const { return tile < left_edge || tile >= right_edge; }
    DEVICE int first_key(int tile) const { return key_begin + tile * BLOCK_N; }
    DEVICE bool has_key(int key) const { return key_begin <= key && key < key_end; }
};

// ---- lib/schedule.cuh
// Which queries a block works on, and in what order blocks do.
//
// A block owns BLOCK_QUERIES consecutive queries of each of BLOCK_HEADS query heads that share a key/value head. Its rows
// come in units of UNIT_ROWS, each of which holds the same queries of one head after the other. More heads and fewer
// queries see fewer keys in all under a window.
//
// `head_group` neighbouring sets of heads run together, all of one block of queries before the next, so that their K and V
// stay in L2; with `longest_first` the last queries, which see most keys under a causal mask, start first and the short
// blocks fill the tail.
constexpr int BLOCK_QUERIES = BLOCK_M / BLOCK_HEADS;
constexpr int UNIT_QUERIES = UNIT_ROWS / BLOCK_HEADS;
static_assert(BLOCK_M % UNIT_ROWS == 0 && UNIT_ROWS % BLOCK_HEADS == 0, "every head has the same queries");

struct Work {
    int batch, head_kv;
    int head_begin, head_count;  // query heads
    int query_begin, query_end;  // queries that exist

    Work() = default;
    DEVICE Work(const Params& p, int block) {
        const int query_blocks = ceil_div(p.seqlen_q, BLOCK_QUERIES);
        const int sets_per_kv = ceil_div(p.group, BLOCK_HEADS), sets = p.heads_q / p.group * sets_per_kv;
        const int section = block / (query_blocks * p.head_group);
        const int within = block - section * query_blocks * p.head_group;
        const int sets_here = min_of(p.head_group, sets * p.batch - section * p.head_group);
        const int query_block = within / sets_here;
        const int set_of_batch = section * p.head_group + within - query_block * sets_here;
        batch = set_of_batch / sets;
        const int set = set_of_batch - batch * sets;
        head_kv = set / sets_per_kv;
        const int head_in_group = (set - head_kv * sets_per_kv) * BLOCK_HEADS;
        head_begin = head_kv * p.group + head_in_group;
        head_count = min_of(BLOCK_HEADS, p.group - head_in_group);
        query_begin = (p.longest_first ? query_blocks - 1 - query_block : query_block) * BLOCK_QUERIES;
        query_end = min_of(query_begin + BLOCK_QUERIES, p.seqlen_q);
    }
    // Blocks of the whole problem.
    DEVICE static int count(const Params& p) {
        return ceil_div(p.seqlen_q, BLOCK_QUERIES) * (p.heads_q / p.group * ceil_div(p.group, BLOCK_HEADS)) * p.batch;
    }
    DEVICE int query(int row) const {
        return query_begin + (BLOCK_HEADS == 1 ? row : row / UNIT_ROWS * UNIT_QUERIES + row % UNIT_QUERIES);
    }
    DEVICE int head(int row) const { return head_begin + (BLOCK_HEADS == 1 ? 0 : row % UNIT_ROWS / UNIT_QUERIES); }
    DEVICE bool exists(int row) const {
        return query(row) < query_end && (BLOCK_HEADS == 1 || head(row) < head_begin + head_count);
    }
};

// ---- lib/sink.cuh
// Attention sinks: one extra logit per query head that joins the maximum and the denominator of a finished row only.

// sink_dtype: 0 float32, 1 float16, 2 bfloat16, 3 float64. A null pointer is "no sink".
DEVICE float sink_logit_log2(const void* sinks, int sink_dtype, int head) {
    if (!sinks) return -INF;
    float sink = sink_dtype == 0   ? static_cast<const float*>(sinks)[head]
                 : sink_dtype == 1 ? half_to_float(static_cast<const fp16*>(sinks)[head])
                 : sink_dtype == 2 ? bf16_to_float(static_cast<const bf16*>(sinks)[head])
                                   : float(static_cast<const double*>(sinks)[head]);
    return sink * LOG2E;
}

struct RowEnd {
    float factor;  // o * factor is the output: 0 for a row that saw no key
    float lse;     // natural logarithm, sink included; -inf for a row that saw nothing at all
};

// Closes a row from its maximum (log2 units, -inf if it saw no key), its sum relative to that, and its sink.
DEVICE RowEnd finish_row(float maximum_log2, float sum, float sink_log2) {
    float top = max_of(maximum_log2, sink_log2);
    if (top == -INF) return {0, -INF};
    float scale = exp2_approx(maximum_log2 - top);
    float denominator = sum * scale + exp2_approx(sink_log2 - top);
    return {scale * reciprocal_approx(denominator), (top + log2_approx(denominator)) * LN2};
}

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
