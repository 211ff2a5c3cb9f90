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

// ---- lib/ptx/fragment.cuh
// Register tiles of the tensor cores: which lane holds what.
//
// Layouts (PTX ISA, "Matrix Fragments for mma.m16n8k16"). With row = lane / 4 and pair = 2 * (lane % 4):
//   A (16 x 16): a[0] = (row, pair..), a[1] = (row + 8, pair..), a[2] = (row, pair + 8..), a[3] = (row + 8, pair + 8..)
//   B (16 x 8):  b[0] = (k = pair.., n = row), b[1] = (k = pair + 8.., n = row)
//   C (16 x 8):  c[0], c[1] = (row, pair..), c[2], c[3] = (row + 8, pair..)
// Two neighbouring C tiles therefore hold what one A tile needs: S feeds P V without leaving registers.

// Where this lane's elements of a C tile stand: rows c_row() and c_row() + 8, columns c_column() and c_column() + 1.
DEVICE int c_row() { return lane_id() / 4; }
DEVICE int c_column() { return lane_id() % 4 * 2; }

// Reduce over the 4 lanes that share a row of C.
DEVICE float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// Two neighbouring 16 x 8 tiles of C, rounded, as the 16 x 16 tile of A with the same rows and columns.
template <typename Element>
DEVICE void c_to_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack2<Element>(left[0], left[1]);
    a[1] = pack2<Element>(left[2], left[3]);
    a[2] = pack2<Element>(right[0], right[1]);
    a[3] = pack2<Element>(right[2], right[3]);
}

// ---- lib/ptx/mma.cuh
// Warp-level matrix multiply on 16-bit elements: mma.sync m16n8k16, sm_80 and later, with the register tiles of fragment.cuh.

template <typename Element>
DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
DEVICE void mma_m16n8k16<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void mma_m16n8k16<fp16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- lib/ptx/ldmatrix.cuh
// Fragments of mma.cuh from 16-bit tiles in shared memory. A Tile has u32 address(row, chunk, lane_row,
// lane_chunk), the byte address of the 16-byte chunk (8 elements) at their sums; each 8 x 8 matrix takes the address of
// one row of 8 elements from each of 8 lanes.

DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// A fragment: rows [row, row + 16), columns [8 * chunk, 8 * chunk + 16) of a row-major tile.
template <typename Tile> DEVICE void load_a(u32 (&a)[4], const Tile& tile, int row, int chunk) {
    int lane = lane_id();
    ldmatrix_x4(a, tile.address(row, chunk, lane % 16, lane / 16));
}

// Two B fragments for C = A * tile^T: n in [row, row + 16), k in [8 * chunk, 8 * chunk + 16).
// b[0], b[1] belong to n < row + 8, b[2], b[3] to the rest.
template <typename Tile> DEVICE void load_b_transposed(u32 (&b)[4], const Tile& tile, int row, int chunk) {
    int lane = lane_id();
    ldmatrix_x4(b, tile.address(row, chunk, lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

// Two B fragments for C = A * tile: k in [row, row + 16), n in [8 * chunk, 8 * chunk + 16).
template <typename Tile> DEVICE void load_b(u32 (&b)[4], const Tile& tile, int row, int chunk) {
    int lane = lane_id();
    ldmatrix_x4_trans(b, tile.address(row, chunk, lane % 16, lane / 16));
}

// ---- lib/ptx/copy.cuh
// Asynchronous copies from global to shared memory, 16 bytes at a time (sm_80).

// Starts an asynchronous copy that bypasses L1. Where `valid` is false nothing is read and zeros are written.
DEVICE void copy_async_16(u32 smem_address, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0) : "memory");
}
// Closes the group of copies that this thread has started since the last commit.
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `PENDING` of this thread's newest groups are still in flight.
template <int PENDING> DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }

// ---- lib/ptx/access.cuh
// Single accesses to shared and global memory of chosen widths.

struct Chunk { u32 word[4]; };  // 16 bytes

DEVICE void store_shared_4(u32 smem_address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(smem_address), "r"(value) : "memory");
}
DEVICE void store_shared_16(u32 smem_address, const Chunk& c) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(smem_address), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}
DEVICE Chunk load_shared_16(u32 smem_address) {
    Chunk c;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "r"(smem_address) : "memory");
    return c;
}
DEVICE void store_global_16(void* global, const Chunk& c) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(global)), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}

// ---- lib/ptx/opaque.cuh
// The same value, of which the compiler knows nothing: what is computed from it is computed here, not hoisted out of the
// loop to occupy registers all along.
DEVICE int opaque(int x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}

// ---- lib/ptx/turing.cuh
// Half precision with what sm_75 has: a type of its own, for which the wrappers of the matrix multiply and of rounding stand for
// other instructions, and a copy through registers, as there is no asynchronous one.

struct half_turing { unsigned short bits; };

// The type of a tensor's elements in a kernel that can do without sm_80. There is none for bf16 under TURING.
template <bool TURING, typename Element> struct ElementOf { using Type = Element; };
template <typename Element> struct ElementOf<true, Element>;
template <> struct ElementOf<true, fp16> { using Type = half_turing; };

template <> DEVICE u32 pack2<half_turing>(float low, float high) {
    return u32(float_to_half(low).bits) | u32(float_to_half(high).bits) << 16;
}

DEVICE void mma_m16n8k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
template <> DEVICE void mma_m16n8k16<half_turing>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_m16n8k8(c, a[0], a[1], b0);  // the left half of A and the upper one of B
    mma_m16n8k8(c, a[2], a[3], b1);
}

// Where `valid` is false nothing is read and the result is zeros.
DEVICE Chunk load_global_16(const void* global, bool valid) {
    Chunk c;
    asm volatile(
        "{\n"
        ".reg .pred valid;\n"
        "setp.ne.b32 valid, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}\n" : "=&r"(c.word[0]), "=&r"(c.word[1]), "=&r"(c.word[2]), "=&r"(c.word[3])
        : "l"(__cvta_generic_to_global(global)), "r"(int(valid)) : "memory");
    return c;
}

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
// A window, inclusive on both sides: row i sees key j iff i + offset - left <= j <= i + offset + right, with
// offset = seqlen_k - seqlen_q. Lengths are at most 2^30 and bounds at most 2^30 - 2^16, which stands for
// "unbounded", so that sums stay in 32 bits; causal is right = 0.
struct Mask {
    int seqlen_k, offset, left, right;
    DEVICE Mask(const Params& p) : Mask(p, p.seqlen_q, p.seqlen_k) {}
    DEVICE Mask(const Params& p, int queries, int keys)
        : seqlen_k(keys), offset(keys - queries), left(p.window_left), right(p.window_right) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return clamp(row_begin + offset - left); }
    DEVICE int key_end(int row_end) const { return clamp(row_end + offset + right); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return clamp(row_end - 1 + offset - left); }
    DEVICE int shared_end(int row_begin) const { return clamp(row_begin + 1 + offset + right); }
    // Row `row` sees keys [row_begin, row_end).
    static constexpr bool HAS_ROW_BEGIN = true;
    DEVICE int row_begin(int row) const { return row + offset - left; }
    DEVICE int row_end(int row) const { return min_of(row + offset + right + 1, seqlen_k); }
    DEVICE int clamp(int key) const { return min_of(max_of(key, 0), seqlen_k); }
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

// ---- lib/tile.cuh
// 16-bit tiles in shared memory, and the way out through them.
//
// A tile of ROWS x COLUMNS lies as panels of 64 columns, so that a row of a panel is 128 bytes: all 32 banks once. The
// 16-byte chunk c of row r stands at place c ^ (r % 8) of its row: the 8 rows that one ldmatrix reads, or the 8 chunks
// that neighbouring threads write, then lie in different banks. This is also TMA's 128-byte swizzle.
template <int ROWS, int COLUMNS> struct SmemTile {
    static constexpr int PANELS = ceil_div(COLUMNS, 64);
    static constexpr int PANEL_BYTES = ROWS * 128;
    static constexpr int BYTES = PANELS * PANEL_BYTES;
    u32 base;  // a multiple of 1024

    DEVICE u32 address(int row, int chunk) const {
        return base + chunk / 8 * PANEL_BYTES + row * 128 + ((chunk ^ row) % 8) * 16;
    }
    // address(row + lane_row, chunk + lane_chunk) for row % 8 == 0, even `chunk` and lane_chunk in {0, 1}: `row` and
    // `chunk` are constants in unrolled loops, so all but one exclusive or becomes an immediate offset.
    DEVICE u32 address(int row, int chunk, int lane_row, int lane_chunk) const {
        u32 lane_address = base + lane_row * 128 + ((lane_chunk ^ lane_row) % 8) * 16;
        return (lane_address ^ (chunk % 8 * 16)) + row * 128 + chunk / 8 * PANEL_BYTES;
    }
};

// Stores a warp's C fragments, rounded to Element, by way of the warp's own rows of a tile, so that the stores are whole
// 16-byte chunks. Row r of the tile goes to row_pointer(r), unless that is null.
template <typename Element, int ROWS, int COLUMNS, int TILES_M, int TILES_N, typename RowPointer>
DEVICE void store_fragments(const SmemTile<ROWS, COLUMNS>& tile, int tile_row, const float (&c)[TILES_M][TILES_N][4],
                            RowPointer row_pointer) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_shared_4(tile.address(tile_row + m * 16 + half * 8 + c_row(), n) + c_column() * 2,
                               pack2<Element>(c[m][n][half * 2], c[m][n][half * 2 + 1]));
    sync_warp();
    constexpr int CHUNKS = COLUMNS / 8;
#pragma unroll
    for (int i = lane_id(); i < TILES_M * 16 * CHUNKS; i += WARP_SIZE) {
        const int row = tile_row + i / CHUNKS, chunk = i % CHUNKS;
        if (Element* to = row_pointer(row)) store_global_16(to + chunk * 8, load_shared_16(tile.address(row, chunk)));
    }
}

// ---- lib/copies.cuh
// How tiles come from global to shared memory: by cp.async, or under TURING through registers. Copies are closed in groups, and
// a wait is for all but the newest ones, as copy.cuh has it; those through registers are done when they are finished.

// The copies of one thread for one tile: `start` for each pass of an unrolled loop, then `finish`.
template <bool THROUGH_REGISTERS> struct Copies {
    DEVICE void start(int, bool copies, u32 address, const void* source, bool valid) {
        if (copies) copy_async_16(address, source, valid);
    }
    DEVICE void finish() {}
};
template <> struct Copies<true> {
    static constexpr int AT_ONCE = 4;  // loads in flight together: 16 registers
    Chunk held[AT_ONCE];
    u32 to[AT_ONCE];
    bool pending[AT_ONCE] = {};

    DEVICE void start(int pass, bool copies, u32 address, const void* source, bool valid) {
        const int place = pass % AT_ONCE;
        pending[place] = copies, to[place] = address;
        if (copies) held[place] = load_global_16(source, valid);
        if (place == AT_ONCE - 1) finish();
    }
    DEVICE void finish() {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (pending[i]) store_shared_16(to[i], held[i]), pending[i] = false;
    }
};

DEVICE void close_copies() { if constexpr (!TURING) copy_async_commit(); }
template <int PENDING> DEVICE void wait_for_copies() { if constexpr (!TURING) copy_async_wait<PENDING>(); }

// ---- lib/loader.cuh
// From global memory to tiles in shared memory, by the means of copies.cuh.

// Copies tiles of ROWS x COLUMNS out of a row-major matrix, with all THREADS threads of the block. Each thread keeps its
// place in the tile, so that a tile costs it one addition for the address and one for each further row.
template <int THREADS, int ROWS, int COLUMNS, typename Element> struct TileLoader {
    static constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;  // the last one is zeros where COLUMNS is an odd multiple of 8
    static constexpr int ROWS_PER_PASS = THREADS / CHUNKS;
    static constexpr int PASSES = ceil_div(ROWS, ROWS_PER_PASS);
    const Element* matrix;
    i64 row_stride;

    // Starts copying rows [first_row, first_row + ROWS). Rows for which has_row is false become zeros.
    template <typename HasRow>
    DEVICE void start(const SmemTile<ROWS, COLUMNS>& tile, int first_row, HasRow has_row) const {
        const int thread = opaque(thread_id());
        const int row = thread / CHUNKS, chunk = thread % CHUNKS;
        const Element* source = matrix + first_row * row_stride + (row * row_stride + chunk * 8);
        const u32 first_address = tile.address(row, chunk);
        Copies<TURING> copies;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int r = row + pass * ROWS_PER_PASS;
            const bool writes = (THREADS % CHUNKS == 0 || row < ROWS_PER_PASS) && (ROWS % ROWS_PER_PASS == 0 || r < ROWS);
            const bool valid = has_row(first_row + r) && (COLUMNS % 16 == 0 || chunk * 8 < COLUMNS);
            // The swizzle repeats every 8 rows; the compiler does not see that, and would keep an address for each pass.
            const u32 address = ROWS_PER_PASS % 8 == 0 ? first_address + pass * ROWS_PER_PASS * 128 : tile.address(r, chunk);
            copies.start(pass, writes, address, source + pass * ROWS_PER_PASS * row_stride, valid);
        }
        copies.finish();
    }
    // Starts copying rows from wherever they are: row r from row_pointer(r), zeros where that is null.
    template <typename RowPointer>
    DEVICE static void gather(const SmemTile<ROWS, COLUMNS>& tile, RowPointer row_pointer) {
        for (int i = thread_id(); i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            const Element* source = row_pointer(row);
            const bool valid = source && (COLUMNS % 16 == 0 || chunk * 8 < COLUMNS);
            Copies<TURING> copies;
            copies.start(0, true, tile.address(row, chunk), valid ? source + chunk * 8 : source, valid);
            copies.finish();
        }
    }
};

// ---- lib/rescale.cuh
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
