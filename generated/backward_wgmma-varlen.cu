// backward_wgmma for backward-bf16-d128-causal-varlen; written by `autotune build` from templates/ and tuning_db/
//
// shown      the winner of backward-bf16-b16-h32x8-q2048-k2048-d128-causal-varlen on nvidia-h200; <gpu>.md has others
// config     key_groups=2 key_queries=64 roles=1 key_stages=3 query_groups=2 query_keys=96 query_stages=3 ahead=1
//            key_smem_bytes=165440 query_smem_bytes=213056
// launch     longest_first=true head_group=4
// resources  backward_rows: 40 registers, 0 bytes spilled, 256 threads, 32 bytes of shared memory
// resources  backward_sinks: 42 registers, 0 bytes spilled, 32 threads, 0 bytes of shared memory
// resources  backward_keys: 168 registers, 0 bytes spilled, 384 threads, 165440 bytes of shared memory
// resources  backward_queries: 168 registers, 0 bytes spilled, 384 threads, 213056 bytes of shared memory
// compiler   NVRTC 13.0.88, -arch=sm_90a; options -std=c++17 -default-device -ftz=false -fmad=true --ptxas-options=-v
// again      autotune source backward-bf16-b16-h32x8-q2048-k2048-d128-causal-varlen --gpu nvidia-h200

// Gradients of attention for Hopper: TMA, warpgroup matrix multiply, specialised warps (sm_90a), by kernels that each own
// what they write: nothing is added across blocks, so results are the same bits every time, and there are neither fp32 copies of
// gradients nor atomics.
//
//   backward_rows     D of each query, its log-sum-exp, and each block's part of the sinks' gradient
//   backward_keys     dK and dV, a block of keys at a time
//   backward_queries  dQ, a block of queries at a time
//   backward_sinks    the sum of the sinks' parts
//
// With P = exp(scale q k - lse), dP = dO V^T and D = rowsum(O dO) - dlse: dS = P (dP - D), dV = P^T dO, dQ = scale dS K and
// dK = scale dS^T Q. P and dS are rounded before they are multiplied, sums are fp32, and each gradient is rounded once.

// Contents, lib: base; lib/ptx: math fp16 access opaque mbarrier warpgroup tma fragment mma wgmma wgmma_shapes turing;
// lib/tile: element; lib: constants params; lib/sequences: keys varlen; lib/masks/packed: causal; backward/queries:
// causal; attention: kv_tiles; lib/tile: smem; lib/softmax: sink; lib/tile: ring; backward: share; backward/share:
// varlen; backward: query_tiles; backward_wgmma: products; backward: rows; backward/rows: unused; backward_wgmma: keys
// key_space weights; backward_wgmma/owned: roles queries; backward_wgmma: kernel

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

// ---- lib/ptx/mbarrier.cuh
// Barriers in shared memory that count arrivals and bytes (sm_90). A barrier's phase ends when all its arrivals have come
// and all bytes it was told to expect have landed; a waiter names the parity of the phase that it waits for.

DEVICE void mbarrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA; a block barrier must follow.
DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Arrives and adds to the bytes that this phase waits for.
DEVICE void mbarrier_arrive_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Blocks until the phase of this parity has ended. A fresh barrier is in phase 0, so waiting for parity 1 returns at once.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}\n" :: "r"(barrier), "r"(parity) : "memory");
}

// ---- lib/ptx/warpgroup.cuh
// Roles within a block: groups of 4 warps, barriers between some of a block's threads, and registers handed from group to
// group (sm_90a).

constexpr int WARPGROUP_SIZE = 4 * WARP_SIZE;

DEVICE int warpgroup_id() { return __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP_SIZE, 0); }

// Barrier `id` (1 to 15; 0 is sync_block) for `threads` threads: those that sync wait for all, those that arrive do not.
DEVICE void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// All warps of a group call it. The kernel needs a fixed register count at entry, from __launch_bounds__(threads, 1).
template <int REGISTERS> DEVICE void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> DEVICE void registers_claim() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// ---- lib/ptx/tma.cuh
// TMA: boxes of a tensor to swizzled tiles in shared memory (sm_90).

// A CUtensorMap as the driver encodes it: rank 4, dimensions (column, row, head, batch).
struct alignas(64) TensorMap { u64 words[16]; };

constexpr u64 CACHE_EVICT_FIRST = 0x12F0000000000000ull;
constexpr u64 CACHE_EVICT_LAST = 0x14F0000000000000ull;

DEVICE void tma_prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" :: "l"(reinterpret_cast<u64>(&map)) : "memory");
}
// Starts copying the map's box whose first element is (column, row, head, batch). Its bytes, those of out-of-bounds
// elements (zeros) included, count towards `barrier`.
DEVICE void tma_load(u32 smem_address, const TensorMap& map, u32 barrier, int column, int row, int head, int batch, u64 hint) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
        :: "r"(smem_address), "l"(reinterpret_cast<u64>(&map)), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(hint)
        : "memory");
}
// Starts copying a tile to the map's box whose first element is (column, row, head, batch); what lies outside the tensor is
// left out. The copy belongs to this thread's next commit.
DEVICE void tma_store(const TensorMap& map, u32 smem_address, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 :: "l"(reinterpret_cast<u64>(&map)), "r"(smem_address), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's committed stores have read their shared memory.
DEVICE void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Orders this thread's ordinary accesses to shared memory before later ones by TMA and the tensor cores.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

// ---- lib/ptx/wgmma.cuh.j2
// Asynchronous matrix multiply by a warpgroup on 16-bit elements: wgmma m64nNk16 (sm_90a). C has the layout of mma.cuh:
// warp w of the group owns rows 16 w to 16 w + 15, and c[j] is the 16 x 8 tile of columns 8 j to 8 j + 7.
//
// Between a multiply and the wait that covers it, its registers belong to the tensor cores.

// A matrix in shared memory as panels of 64 columns (128 bytes) with the 128-byte swizzle, like SmemTile.
// K-major (rows are M or N, columns K): a step of 16 in K is 32 bytes within a panel.
DEVICE u64 descriptor_k_major(u32 address) {
    return u64(address >> 4 & 0x3fff) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
// MN-major (rows are K, columns N): panels follow each other along N; a step of 16 in K is 16 rows.
DEVICE u64 descriptor_mn_major(u32 address, int panel_bytes) {
    return u64(address >> 4 & 0x3fff) | u64(panel_bytes >> 4 & 0x3fff) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
DEVICE u64 descriptor_advance(u64 descriptor, int bytes) { return descriptor + (bytes >> 4); }

// Before the first multiply, and whenever other instructions have written the registers of A or C.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving accesses to a register tile across this point.
template <int N> DEVICE void pin(float (&tile)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(tile[n][i]) :: "memory");
}
template <int N> DEVICE void pin(u32 (&tile)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(tile[n][i]) :: "memory");
}
// Waits until at most PENDING of the newest groups are in flight. `tiles` are the register tiles that this sets free.
template <int PENDING, typename... Tiles> DEVICE void wgmma_wait(Tiles&... tiles) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
    (pin(tiles), ...);
}

// C (64 x 64) = or += A B^T, both K-major in shared memory.
DEVICE void wgmma_qk(float (&c)[8][4], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7, "
        "%8, %9, %10, %11, "
        "%12, %13, %14, %15, "
        "%16, %17, %18, %19, "
        "%20, %21, %22, %23, "
        "%24, %25, %26, %27, "
        "%28, %29, %30, %31"
        "}, %32, %33, accumulate, 1, 1, 0, 0;\n"
        "}\n"
        :
          "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
          "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
          "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
        : "l"(a), "l"(b), "r"(int(accumulate)));
}

// C (64 x 128) = or += A B with A in registers and B MN-major in shared memory.
DEVICE void wgmma_pv(float (&c)[16][4], const u32 (&a)[4], u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7, "
        "%8, %9, %10, %11, "
        "%12, %13, %14, %15, "
        "%16, %17, %18, %19, "
        "%20, %21, %22, %23, "
        "%24, %25, %26, %27, "
        "%28, %29, %30, %31, "
        "%32, %33, %34, %35, "
        "%36, %37, %38, %39, "
        "%40, %41, %42, %43, "
        "%44, %45, %46, %47, "
        "%48, %49, %50, %51, "
        "%52, %53, %54, %55, "
        "%56, %57, %58, %59, "
        "%60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1, 1;\n"
        "}\n"
        :
          "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
          "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
          "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
          "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]),
          "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
          "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]),
          "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]),
          "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]),
          "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
          "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]),
          "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));
}

// ---- lib/ptx/wgmma_shapes.cuh.j2
// The multiplies of wgmma.cuh for further widths.
// C (64 x 96) = or += A B^T, both K-major in shared memory.
DEVICE void wgmma_qk(float (&c)[12][4], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7, "
        "%8, %9, %10, %11, "
        "%12, %13, %14, %15, "
        "%16, %17, %18, %19, "
        "%20, %21, %22, %23, "
        "%24, %25, %26, %27, "
        "%28, %29, %30, %31, "
        "%32, %33, %34, %35, "
        "%36, %37, %38, %39, "
        "%40, %41, %42, %43, "
        "%44, %45, %46, %47"
        "}, %48, %49, accumulate, 1, 1, 0, 0;\n"
        "}\n"
        :
          "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]),
          "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]),
          "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]),
          "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]),
          "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]),
          "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]),
          "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]),
          "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]),
          "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]),
          "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3])
        : "l"(a), "l"(b), "r"(int(accumulate)));
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

// ---- lib/tile/element.cuh
// One element of a tensor to float and back, for every dtype and arch.
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(fp16 x) { return half_to_float(x); }
DEVICE float to_float(bf16 x) { return bf16_to_float(x); }

template <typename Element> DEVICE Element from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE fp16 from_float<fp16>(float x) { return float_to_half(x); }
template <> DEVICE bf16 from_float<bf16>(float x) { return float_to_bf16(x); }

// ---- lib/constants.cuh.j2
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int KEY_GROUPS = 2;
constexpr int KEY_QUERIES = 64;
constexpr int ROLES = 1;
constexpr int KEY_STAGES = 3;
constexpr int QUERY_GROUPS = 2;
constexpr int QUERY_KEYS = 96;
constexpr int QUERY_STAGES = 3;
constexpr int AHEAD = 1;
constexpr int KEY_SMEM_BYTES = 165440;
constexpr int QUERY_SMEM_BYTES = 213056;
constexpr int KEY_REGISTERS = 224;
constexpr int KEY_LOADER_REGISTERS = 56;
constexpr int QUERY_REGISTERS = 224;
constexpr int QUERY_LOADER_REGISTERS = 56;
constexpr int QUERY_BOX_ROWS = 64;
constexpr int KEY_BOX_ROWS = 32;

// ---- backward_wgmma/kernel.cu.j2
using Element = bf16;

// ---- lib/params.cuh.j2
// Everything that changes from call to call. Strides are in elements.
struct Params {
    TensorMap q_map;
    TensorMap k_map;
    TensorMap v_map;
    TensorMap dout_map;
    const Element* q;  // (batch, seqlen_q, heads_q, head_dim)
    const Element* k;  // (batch, seqlen_k, heads_kv, head_dim)
    const Element* v;  // (batch, seqlen_k, heads_kv, head_dim_v)
    const Element* out;  // (batch, seqlen_q, heads_q, head_dim_v)
    const Element* dout;  // as out; strides may be 0
    Element* dq;  // as q
    Element* dk;  // as k
    Element* dv;  // as v
    const float* lse;  // (batch, heads_q, seqlen_q)
    const float* dlse;  // as lse, or null
    const void* sinks;  // (heads_q), or null
    void* dsinks;  // as sinks, or null
    float* stats;  // (batch, heads_q, seqlen_q, 2): of each query, its lse in log2 units and D
    float* sink_sums;  // (heads_q, batch, blocks of 64 queries): parts of dsinks
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
    long long dout_batch_stride;
    long long dout_row_stride;
    long long dout_head_stride;
    long long dq_batch_stride;
    long long dq_row_stride;
    long long dq_head_stride;
    long long dk_batch_stride;
    long long dk_row_stride;
    long long dk_head_stride;
    long long dv_batch_stride;
    long long dv_row_stride;
    long long dv_head_stride;
    int batch;
    int heads_q;
    int group;  // query heads per key/value head
    int seqlen_q;
    int seqlen_k;
    int window_left;
    int window_right;
    int sink_dtype;
    float scale_log2;  // what scores, after the soft cap if there is one, are multiplied by for exp2
    float scale;  // softmax scale, above 0
    int head_group;
    int longest_first;
    const int* cu_seqlens_q;  // (batch + 1): where each sequence's queries begin, and the end
    const int* cu_seqlens_k;  // (batch + 1): the same of keys
};

// ---- lib/sequences/keys.cuh
// The keys of one sequence.
struct Keys {
    int number;    // among the batch entries, or the packed sequences
    int key_begin, key_end;
    int diagonal;  // row i stands at key i + diagonal
};

// ---- lib/sequences/varlen.cuh
// Sequences of any length that follow each other in packed arrays. Rows and keys are counted through all of them, so that row
// r is row r of the array: an address needs no more than in a batch of one.
struct Sequence : Keys {
    int row_begin, row_end;  // queries

    Sequence() = default;
    // Empty beyond the last one. Lengths are cut to what the arrays have, so that wrong ones read nothing outside.
    DEVICE Sequence(const Params& p, int n) : Keys{n, 0, 0, 0}, row_begin(0), row_end(0) {
        if (n >= p.batch) return;
        row_begin = min_of(max_of(p.cu_seqlens_q[n], 0), p.seqlen_q);
        row_end = min_of(max_of(p.cu_seqlens_q[n + 1], row_begin), p.seqlen_q);
        key_begin = min_of(max_of(p.cu_seqlens_k[n], 0), p.seqlen_k);
        key_end = min_of(max_of(p.cu_seqlens_k[n + 1], key_begin), p.seqlen_k);
        diagonal = key_end - row_end;
    }
};

// ---- lib/masks/packed/causal.cuh
// Bottom-right causal: row i sees the keys of its sequence up to i + diagonal.
struct Mask {
    int first, diagonal;
    DEVICE Mask(const Params&, const Keys& keys) : first(keys.key_begin), diagonal(keys.diagonal) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return first; }
    DEVICE int key_end(int row_end) const { return max_of(first, row_end + diagonal); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return first; }
    DEVICE int shared_end(int row_begin) const { return max_of(first, row_begin + diagonal + 1); }
    // Row `row` sees keys [row_begin, row_end) of its tiles' own: none of those comes before the sequence.
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return row + diagonal + 1; }
};

// ---- backward/queries/causal.cuh
// The queries of a sequence that see some key, or all keys, of [key_begin, key_end): those from the one that stands at the key on.
struct Observers {
    int begin, end;            // queries outside see none of them
    int whole_begin, whole_end;  // those inside see all of them
    DEVICE Observers(const Params&, const Sequence& s, int key_begin, int key_end)
        : begin(min_of(max_of(key_begin - s.diagonal, s.row_begin), s.row_end)), end(s.row_end),
          whole_begin(key_end - 1 - s.diagonal), whole_end(s.row_end) {}
};

// ---- attention/kv_tiles.cuh
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

// ---- lib/tile/smem.cuh
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

// ---- lib/softmax/sink.cuh
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

// ---- lib/tile/ring.cuh
// Rings of buffers between one warp that loads and groups that use what it has loaded.

// The barriers of one ring of buffers: `full` counts TMA's bytes, `empty` the groups that are done with it.
struct Ring {
    u32 barriers;
    DEVICE u32 full(int stage) const { return barriers + stage * 16; }
    DEVICE u32 empty(int stage) const { return barriers + stage * 16 + 8; }
};
// A place in a ring, and the parity of the phase that its barriers are in.
template <int STAGES> struct Place {
    int stage = 0;
    u32 phase = 0;
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// ---- backward/share.cuh
// Which rows of which head a block works on: queries of a query head, or keys of a key/value head.
//
// `head_group` neighbouring heads run together, all of one block of rows before the next, so that what they read stays in L2.
// Blocks of keys run from the first on and, with `longest_first`, blocks of queries from the last on: under a causal mask those
// have most to do.
struct Share {
    Sequence sequence;
    int batch;  // entry of the arrays: packed ones have one
    int head;
    int begin;  // the first row
};

// Block `turn` of those of `blocks` blocks of rows for each of `heads` heads, as (block of rows, head).
DEVICE void split_turn(const Params& p, int turn, int blocks, int heads, int& row_block, int& head) {
    const int section = turn / (blocks * p.head_group);
    const int within = turn - section * blocks * p.head_group;
    const int heads_here = min_of(p.head_group, heads - section * p.head_group);
    row_block = within / heads_here;
    head = section * p.head_group + within - row_block * heads_here;
}

// ---- backward/share/varlen.cuh
// Finds the work of this block, for blocks of ROWS keys or queries of `heads` heads: each warp's lanes look at as many sequences
// at a time. False if there is none: the grid is made for the worst lengths.
template <int ROWS, bool KEYS> DEVICE bool find_share(const Params& p, int heads, Share& share) {
    int before = 0;  // blocks of the sequences before those that are looked at
#pragma unroll 1
    for (int first = 0; first < p.batch; first += WARP_SIZE) {
        const Sequence mine(p, first + lane_id());
        const int rows = KEYS ? mine.key_end - mine.key_begin : mine.row_end - mine.row_begin;
        const int blocks = ceil_div(rows, ROWS) * heads;
        int through = blocks;  // with those of lanes before this one
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int below = shuffle(through, max_of(lane_id() - distance, 0));
            if (lane_id() >= distance) through += below;
        }
        const int all = shuffle(through, WARP_SIZE - 1);
        if (block_id() >= before + all) {
            before += all;
            continue;
        }
        int lane = int(block_id() >= before + through);  // lanes that the block is beyond, added up
#pragma unroll
        for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) lane += shuffle_xor(lane, mask);
        Sequence found;
        found.number = first + lane, found.diagonal = shuffle(mine.diagonal, lane);
        found.key_begin = shuffle(mine.key_begin, lane), found.key_end = shuffle(mine.key_end, lane);
        found.row_begin = shuffle(mine.row_begin, lane), found.row_end = shuffle(mine.row_end, lane);
        const int blocks_here = ceil_div(KEYS ? found.key_end - found.key_begin : found.row_end - found.row_begin, ROWS);
        int row_block;
        split_turn(p, block_id() - before - shuffle(through - blocks, lane), blocks_here, heads, row_block, share.head);
        share.sequence = found;
        share.batch = 0;
        share.begin = (KEYS ? found.key_begin : found.row_begin)
                      + (!KEYS && p.longest_first ? blocks_here - 1 - row_block : row_block) * ROWS;
        return true;
    }
    return false;
}

// ---- backward/query_tiles.cuh
// The query tiles that a block of keys has to visit, from the first to the last. They are counted from the first query that sees
// one of the keys. Tiles that no query of sees a key are not among them; tiles whose queries all exist and see all keys need no mask.
template <int ROWS> struct QueryTiles {
    int query_begin, query_end;  // queries outside are loaded as zeros
    int end;                     // tiles [0, end)
    int whole_begin, whole_end;  // queries that see all keys

    DEVICE explicit QueryTiles(const Observers& o)
        : query_begin(o.begin), query_end(o.end), end(ceil_div(o.end - o.begin, ROWS)), whole_begin(o.whole_begin),
          whole_end(min_of(o.whole_end, o.end)) {}
    // Tiles that are counted from query `origin` on, so that those of other keys are the same ones.
    DEVICE QueryTiles(const Observers& o, int origin) : QueryTiles(o) {
        if (end > 0) query_begin -= (query_begin - origin) % ROWS, end = ceil_div(query_end - query_begin, ROWS);
    }
    // Masks all tiles: where a block's last keys do not exist, of which no query is asked whether it sees them.
    DEVICE void mask_all() { whole_end = query_begin; }
    DEVICE int first_query(int tile) const { return query_begin + tile * ROWS; }
    DEVICE bool has_query(int query) const { return query_begin <= query && query < query_end; }
    DEVICE bool needs_mask(int tile) const { return first_query(tile) < whole_begin || first_query(tile + 1) > whole_end; }
};

// ---- backward_wgmma/products.cuh
// What a warpgroup and its loader do with whole tiles: copies, products, and the way out of the gradients.

// Starts the copies of ROWS rows of a tile from row `row` of a tensor on, a box of 64 columns at a time.
template <int ROWS, int BOX_ROWS, typename Tile>
DEVICE void load_boxes(Tile tile, int tile_row, const TensorMap& map, u32 barrier, int row, int head, int batch, u64 hint) {
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
#pragma unroll 1
        for (int r = 0; r < ROWS; r += BOX_ROWS)
            tma_load(tile.base + panel * Tile::PANEL_BYTES + (tile_row + r) * 128, map, barrier, panel * 64, row + r, head, batch, hint);
}

// Starts C = A B^T of 64 rows of A from `row` on and all rows of B, over COLUMNS columns that both have. Descriptors of an A that
// stays are made each time: hoisted out of a loop they would be 4 registers for each 16 columns.
template <int COLUMNS, int TILES, typename ATile, typename BTile>
DEVICE void start_transposed(float (&c)[TILES][4], const ATile& a, int row, const BTile& b) {
    const u32 rows = a.base + opaque(row) * 128;
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < ceil_div(COLUMNS, 16); ++d)
        wgmma_qk(c, descriptor_advance(descriptor_k_major(rows + d / 4 * ATile::PANEL_BYTES), d % 4 * 32),
                 descriptor_advance(descriptor_k_major(b.base + d / 4 * BTile::PANEL_BYTES), d % 4 * 32), d > 0);
    wgmma_commit();
}
// Starts C += A B with A in registers: as many columns of B as C has, from its panel `panel` on.
template <int STEPS, int TILES, typename BTile>
DEVICE void start_rounded(float (&c)[TILES][4], const u32 (&a)[STEPS][4], const BTile& b, int panel, bool accumulate) {
    const u64 descriptor = descriptor_mn_major(b.base + panel * BTile::PANEL_BYTES, BTile::PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) wgmma_pv(c, a[k], descriptor_advance(descriptor, k * 16 * 128), k > 0 || accumulate);
    wgmma_commit();
}
template <int STEPS, int TILES> DEVICE void pack(u32 (&a)[STEPS][4], const float (&c)[TILES][4]) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) c_to_a<Element>(a[k], c[2 * k], c[2 * k + 1]);
}
template <int STEPS, int TILES> DEVICE void pack_products(u32 (&a)[STEPS][4], float (&c)[TILES][4], const float (&factors)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) c[n][i] *= factors[n][i];
    pack(a, c);
}

// Zeroes rows [first, end) of a tile that TMA has filled with what no row of this block may meet: 0 * NaN is NaN. All
// threads of a group call it.
template <int ROWS, int COLUMNS> DEVICE void zero_rows(const SmemTile<ROWS, COLUMNS>& tile, int first, int end) {
    constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;
#pragma unroll 1
    for (int i = thread_id() % WARPGROUP_SIZE; i < (end - first) * CHUNKS; i += WARPGROUP_SIZE)
        store_shared_16(tile.address(first + i / CHUNKS, i % CHUNKS), Chunk{});
}

// Stores 64 rows of C fragments, times `factor` and rounded, by way of a tile that this group alone uses from row `row` on:
// columns of the result from 8 * `chunk` on. `rows` of them exist.
template <int ROWS, int COLUMNS, int TILES>
DEVICE void store_rows(const SmemTile<ROWS, COLUMNS>& tile, int row, int chunk, const float (&c)[TILES][4], float factor, Element* to,
                       i64 row_stride, int rows) {
    const int warp_row = opaque(row + thread_id() % WARPGROUP_SIZE / WARP_SIZE * 16);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_shared_4(tile.address(warp_row + half * 8 + c_row(), chunk + n) + c_column() * 2,
                           pack2<Element>(c[n][half * 2] * factor, c[n][half * 2 + 1] * factor));
    sync_warp();
#pragma unroll 4
    for (int i = lane_id(); i < 16 * TILES; i += WARP_SIZE) {
        const int r = warp_row + i / TILES, column = chunk + i % TILES;
        if (r - row < rows) store_global_16(to + (r - row) * row_stride + column * 8, load_shared_16(tile.address(r, column)));
    }
}

// ---- backward/rows.cuh.j2
// Before the gradients: what both kernels need of each query, and the gradient of the sinks.
//
// Of each query `stats` keeps a pair: its log-sum-exp in log2 units, +inf where the query sees no key, so that its probabilities
// are 0 whatever the scores; and D = sum(out * dout) - dlse, which every gradient of one of its probabilities loses.
constexpr int ROWS_THREADS = 256, ROWS_PER_BLOCK = 64;
constexpr int ROW_CHUNKS = HEAD_DIM_V / 8;
constexpr int ROW_LANES = ROW_CHUNKS <= 2 ? 2 : ROW_CHUNKS <= 4 ? 4 : ROW_CHUNKS <= 8 ? 8 : ROW_CHUNKS <= 16 ? 16 : 32;  // that share a row
constexpr int ROWS_AT_ONCE = ROWS_THREADS / ROW_LANES;

DEVICE float product_of_pairs(u32 a, u32 b) {
    const float low = to_float(Element{(unsigned short)(a & 0xffff)}) * to_float(Element{(unsigned short)(b & 0xffff)});
    return low + to_float(Element{(unsigned short)(a >> 16)}) * to_float(Element{(unsigned short)(b >> 16)});
}

// ---- backward/rows/unused.cuh
// Zeros for rows [begin, end) of no sequence, of the 64 from `first` on.
template <int COLUMNS> DEVICE void clear_unused(Element* rows, i64 row_stride, int first, int begin, int end, int count) {
    for (int i = thread_id(); i < ROWS_PER_BLOCK * (COLUMNS / 8); i += ROWS_THREADS) {
        const int row = first + i / (COLUMNS / 8), chunk = i % (COLUMNS / 8);
        if (row < count && (row < begin || row >= end)) store_global_16(rows + row * row_stride + chunk * 8, Chunk{});
    }
}

// ---- backward/rows.cuh.j2
extern "C" __global__ void __launch_bounds__(ROWS_THREADS) backward_rows(const __grid_constant__ Params p) {
    const int blocks = ceil_div(p.seqlen_q, ROWS_PER_BLOCK), key_blocks = ceil_div(p.seqlen_k, ROWS_PER_BLOCK);
    const int turn = block_id() - key_blocks * (p.heads_q / p.group);
    if (turn < 0) {  // of keys
        const int begin = min_of(max_of(p.cu_seqlens_k[0], 0), p.seqlen_k);
        const int end = min_of(max_of(p.cu_seqlens_k[p.batch], begin), p.seqlen_k);
        const int head = block_id() / key_blocks, first = (block_id() - head * key_blocks) * ROWS_PER_BLOCK;
        clear_unused<HEAD_DIM>(p.dk + head * p.dk_head_stride, p.dk_row_stride, first, begin, end, p.seqlen_k);
        clear_unused<HEAD_DIM_V>(p.dv + head * p.dv_head_stride, p.dv_row_stride, first, begin, end, p.seqlen_k);
        return;
    }
    constexpr int batch = 0;
    const int row_begin = min_of(max_of(p.cu_seqlens_q[0], 0), p.seqlen_q);
    const int row_end = min_of(max_of(p.cu_seqlens_q[p.batch], row_begin), p.seqlen_q);
    const int head = turn / blocks - batch * p.heads_q, first = turn % blocks * ROWS_PER_BLOCK;
    clear_unused<HEAD_DIM>(p.dq + head * p.dq_head_stride, p.dq_row_stride, first, row_begin, row_end, p.seqlen_q);
    const Element* out = p.out + batch * p.out_batch_stride + head * p.out_head_stride;
    const Element* dout = p.dout + batch * p.dout_batch_stride + head * p.dout_head_stride;
    const i64 row_of_head = (i64(batch) * p.heads_q + head) * p.seqlen_q;
    const float sink_log2 = sink_logit_log2(p.sinks, p.sink_dtype, head);
    const int lane = thread_id() % ROW_LANES;
    float sink_gradient = 0;
#pragma unroll 1
    for (int r = thread_id() / ROW_LANES; r < ROWS_PER_BLOCK; r += ROWS_AT_ONCE) {
        const int row = first + r;
        const bool exists = row_begin <= row && row < row_end;
        const bool loads = exists && lane < ROW_CHUNKS;
        const Chunk a = load_global_16(out + row * p.out_row_stride + lane * 8, loads);
        const Chunk b = load_global_16(dout + row * p.dout_row_stride + lane * 8, loads);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += product_of_pairs(a.word[i], b.word[i]);
#pragma unroll
        for (int mask = ROW_LANES / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
        if (!exists || lane != 0) continue;
        const float lse = p.lse[row_of_head + row];
        if (p.dlse) sum -= p.dlse[row_of_head + row];
        if (lse == -INF) sum = 0;  // neither a key nor a sink: nothing depends on anything
        sink_gradient -= lse == -INF ? 0 : exp2_approx(sink_log2 - lse * LOG2E) * sum;
        p.stats[(row_of_head + row) * 2] = lse == -INF ? INF : lse * LOG2E;
        p.stats[(row_of_head + row) * 2 + 1] = sum;
    }
    if (!p.dsinks) return;
    sink_gradient = warp_sum(sink_gradient);
    const SharedArray<float> sums{smem_base()};
    const int warp = warp_id();  // of all lanes together
    if (lane_id() == 0) sums.set(warp, sink_gradient);
    sync_block();
    if (thread_id() != 0) return;
    float sum = 0;
    for (int i = 0; i < ROWS_THREADS / WARP_SIZE; ++i) sum += sums.get(i);
    p.sink_sums[(i64(head) * 1 + batch) * blocks + turn % blocks] = sum;
}

DEVICE void store_sink(void* sinks, int dtype, int head, float value) {
    if (dtype == 0) static_cast<float*>(sinks)[head] = value;
    else if (dtype == 1) static_cast<fp16*>(sinks)[head] = float_to_half(value);
    else if (dtype == 2) static_cast<bf16*>(sinks)[head] = float_to_bf16(value);
    else static_cast<double*>(sinks)[head] = value;
}

// Adds up what the blocks left of each head's sink, in an order that is always the same. One warp a head.
extern "C" __global__ void __launch_bounds__(WARP_SIZE) backward_sinks(const __grid_constant__ Params p) {
    const int head = block_id(), count = ceil_div(p.seqlen_q, ROWS_PER_BLOCK) * 1;
    float sum = 0;
    for (int i = lane_id(); i < count; i += WARP_SIZE) sum += p.sink_sums[i64(head) * count + i];
    sum = warp_sum(sum);
    if (lane_id() == 0) store_sink(p.dsinks, p.sink_dtype, head, sum);
}

// ---- backward_wgmma/keys.cuh.j2
// dK and dV. A block owns KEY_ROWS keys of a key/value head, and visits the queries that see them of all heads of the group, so
// that nobody else adds to its gradients. Scores are computed transposed, keys by queries: P and dS fall out of the tensor cores
// as the A operands of dV = P^T dO and dK = dS^T Q. A warpgroup owns 64 keys. With AHEAD the scores of the next
// tile start before it waits for this tile's gradients, so that the tensor cores have work until it is ready for P.
constexpr int KEY_ROWS = KEY_GROUPS / ROLES * 64, KEY_THREADS = (1 + KEY_GROUPS) * WARPGROUP_SIZE;
constexpr int QUERY_TILES = KEY_QUERIES / 8, QUERY_STEPS = KEY_QUERIES / 16;
constexpr int DK_TILES = HEAD_DIM / 8, DV_TILES = HEAD_DIM_V / 8;
static_assert(!AHEAD || KEY_STAGES > 1, "the next tile needs a buffer of its own");

// ---- backward_wgmma/key_space.cuh.j2
// Shared memory of a block that owns keys, and the loader that fills it.
struct KeySpace {
    using K = SmemTile<KEY_ROWS, HEAD_DIM>;
    using V = SmemTile<KEY_ROWS, HEAD_DIM_V>;
    using Q = SmemTile<KEY_QUERIES, HEAD_DIM>;
    using dO = SmemTile<KEY_QUERIES, HEAD_DIM_V>;
    static constexpr int STAGE_BYTES = Q::BYTES + dO::BYTES, STATS_BYTES = KEY_QUERIES * 8;
    static constexpr int STATS_OFFSET = K::BYTES + V::BYTES + KEY_STAGES * STAGE_BYTES;
    static constexpr int HANDED_BYTES = ROLES == 2 ? KEY_QUERIES * 128 : 0;  // fragments of P, from a role to the other
    static constexpr int BARRIERS_OFFSET = STATS_OFFSET + 2 * HANDED_BYTES + KEY_STAGES * STATS_BYTES;
    DEVICE static u32 handed(int buffer) { return smem_base() + STATS_OFFSET + buffer * HANDED_BYTES; }
    DEVICE static u32 stats(int stage) { return smem_base() + STATS_OFFSET + 2 * HANDED_BYTES + stage * STATS_BYTES; }
    static constexpr int BYTES = BARRIERS_OFFSET + 16 * (KEY_STAGES + 1);
    DEVICE static K k() { return {smem_base()}; }
    DEVICE static V v() { return {smem_base() + K::BYTES}; }
    DEVICE static Q q(int stage) { return {smem_base() + K::BYTES + V::BYTES + stage * STAGE_BYTES}; }
    DEVICE static dO dout(int stage) { return {q(stage).base + Q::BYTES}; }
    DEVICE static Ring queries() { return {smem_base() + BARRIERS_OFFSET}; }
    DEVICE static u32 keys() { return smem_base() + BARRIERS_OFFSET + 16 * KEY_STAGES; }
};
static_assert(KeySpace::BYTES == KEY_SMEM_BYTES, "shared memory request");
static_assert(ROLES == 1 || (ROLES == 2 && KEY_GROUPS == 2), "a pair of groups");

// The loader's part, of one warp: K and V once, then the queries of each head of the group, tile by tile.
DEVICE void load_for_keys(const Params& p, const Share& share, const QueryTiles<KEY_QUERIES>& tiles) {
    if (lane_id() == 0) {
        mbarrier_arrive_expect(KeySpace::keys(), KeySpace::K::BYTES + KeySpace::V::BYTES);
        load_boxes<KEY_ROWS, KEY_BOX_ROWS>(KeySpace::k(), 0, p.k_map, KeySpace::keys(), share.begin, share.head, share.batch, CACHE_EVICT_FIRST);
        load_boxes<KEY_ROWS, KEY_BOX_ROWS>(KeySpace::v(), 0, p.v_map, KeySpace::keys(), share.begin, share.head, share.batch, CACHE_EVICT_FIRST);
    }
    Place<KEY_STAGES> at;
#pragma unroll 1
    for (int head = share.head * p.group; head < (share.head + 1) * p.group; ++head)
#pragma unroll 1
        for (int tile = 0; tile < tiles.end; ++tile) {
            const u32 full = KeySpace::queries().full(at.stage);
            const int first = tiles.first_query(tile);
            mbarrier_wait(KeySpace::queries().empty(at.stage), at.phase ^ 1);
            if (lane_id() == 0) {
                mbarrier_arrive_expect(full, KeySpace::STAGE_BYTES);
                load_boxes<KEY_QUERIES, QUERY_BOX_ROWS>(KeySpace::q(at.stage), 0, p.q_map, full, first, head, share.batch, CACHE_EVICT_LAST);
                load_boxes<KEY_QUERIES, QUERY_BOX_ROWS>(KeySpace::dout(at.stage), 0, p.dout_map, full, first, head, share.batch, CACHE_EVICT_LAST);
            }
            const float* stats = p.stats + ((i64(share.batch) * p.heads_q + head) * p.seqlen_q + first) * 2;
            const SharedArray<float> to{KeySpace::stats(at.stage)};
            for (int i = lane_id(); i < KEY_QUERIES; i += WARP_SIZE) {
                const bool exists = tiles.has_query(first + i);
                to.set(2 * i, exists ? stats[2 * i] : INF);
                to.set(2 * i + 1, exists ? stats[2 * i + 1] : 0);
            }
            sync_warp();
            if (lane_id() == 0) mbarrier_arrive(full);
            at.advance();
        }
}

// ---- backward_wgmma/weights.cuh.j2
// From scores s to P, transposed; s keeps what the derivative of the soft cap needs no more. `key` and `query` are those of this
// lane's first element; `stats` is of its first query.
template <bool MASKED>
DEVICE void probabilities(float (&s)[QUERY_TILES][4], const Params& p, const Mask& mask, u32 stats, int key,
                          int query) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        const Chunk pair = load_shared_16(stats + n * 64);  // of two queries: lse, D, lse, D
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = query + n * 8 + i;
            const float lse = bits_float(pair.word[2 * i]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float& score = s[n][half * 2 + i];
                const int at = key + half * 8;
                float exponent = score * p.scale_log2 - lse;
                const bool visible = !MASKED || (at < mask.row_end(row) && (!Mask::HAS_ROW_BEGIN || at >= mask.row_begin(row)));
                score = visible ? exp2_approx(exponent) : 0;
            }
        }
    }
}
// From the fragments of P and dP to dS, in share of dP. P as it is rounded for dV needs half the registers: those
// of scores are free for the next tile's.
template <bool MASKED>
DEVICE void differentiate(const u32 (&fragments)[QUERY_STEPS][4], float (&dp)[QUERY_TILES][4], u32 stats) {
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
        const Chunk pair = load_shared_16(stats + n * 64);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 both = fragments[n / 2][n % 2 * 2 + i / 2];
            const float probability = to_float(Element{(unsigned short)(i % 2 ? both >> 16 : both & 0xffff)});
            const float ds = probability * (dp[n][i] - bits_float(pair.word[i % 2 * 2 + 1]));
            dp[n][i] = MASKED && probability == 0 ? 0 : ds;  // what is hidden may be NaN
        }
    }
}

// ---- backward_wgmma/keys.cuh.j2
// A warpgroup's walk over the tiles of all heads of its group.
struct QueryWalk {
    const Params& p;
    const Share& share;
    const QueryTiles<KEY_QUERIES>& tiles;
    int of_group = 0, tile = 0;  // head of the group
    Place<KEY_STAGES> at{};

    DEVICE int head() const { return share.head * p.group + of_group; }
    DEVICE bool ended() const { return of_group == p.group; }
    DEVICE void advance() {
        at.advance();
        if (++tile == tiles.end) tile = 0, ++of_group;
    }
    // Waits for a tile and zeroes its rows of queries that do not exist.
    DEVICE void wait() const {
        mbarrier_wait(KeySpace::queries().full(at.stage), at.phase);
        const int exist = tiles.query_end - tiles.first_query(tile);
        if (exist >= KEY_QUERIES) return;
        zero_rows(KeySpace::q(at.stage), exist, KEY_QUERIES);
        zero_rows(KeySpace::dout(at.stage), exist, KEY_QUERIES);
        fence_async_proxy();
        named_barrier_sync(warpgroup_id(), WARPGROUP_SIZE);
    }
    // By each warp: its lanes have read statistics by themselves.
    DEVICE void release(int stage) const {
        sync_warp();
        if (lane_id() == 0) mbarrier_arrive(KeySpace::queries().empty(stage));
    }
};

// P of the tile that a walk is at.
DEVICE void probabilities_at(float (&s)[QUERY_TILES][4], const Params& p, const Sequence& sequence, const Mask& mask,
                             const QueryWalk& walk, int key) {
    const u32 stats = KeySpace::stats(walk.at.stage) + c_column() * 8;
    const int query = walk.tiles.first_query(walk.tile) + c_column();
    if (walk.tiles.needs_mask(walk.tile))
        probabilities<true>(s, p, mask, stats, key, query);
    else
        probabilities<false>(s, p, mask, stats, key, query);
}

// ---- backward_wgmma/owned/roles.cuh.j2
// Two warpgroups that own the same 64 keys, where the gradients of both head dims are too many registers for one: the first has
// S, P and dV, the second dP, dS and dK. Nothing is computed twice. Both hold the same elements in the same lanes, so P goes from
// one to the other as fragments, in the order of threads, through two buffers in shared memory; it is the P that dV is made of.
// That a buffer has been read needs no barrier: the scores of the tile after next wait until the other group has released a tile,
// which it does after it has read the P of the next one.
struct Handover {
    static constexpr int FILLED = 8, THREADS = 2 * WARPGROUP_SIZE;  // a barrier for each buffer
    static_assert(ROLES == 1 || KEY_STAGES == 2, "with more, P would be written over before it is read");
    int buffer = 0;

    DEVICE u32 place(int step) const { return KeySpace::handed(buffer) + (step * WARPGROUP_SIZE + thread_id() % WARPGROUP_SIZE) * 16; }
    DEVICE void give(const u32 (&fragments)[QUERY_STEPS][4]) {
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; ++step)
            store_shared_16(place(step), {fragments[step][0], fragments[step][1], fragments[step][2], fragments[step][3]});
        named_barrier_arrive(FILLED + buffer, THREADS);
        buffer ^= 1;
    }
    DEVICE void take(u32 (&fragments)[QUERY_STEPS][4]) {
        named_barrier_sync(FILLED + buffer, THREADS);
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; ++step) {
            const Chunk chunk = load_shared_16(place(step));
#pragma unroll
            for (int i = 0; i < 4; ++i) fragments[step][i] = chunk.word[i];
        }
        buffer ^= 1;
    }
};

// dV = P^T dO over all tiles. P goes to the other group. Scores of the next tile start before
// this tile's product, so that the tensor cores have work while it takes exponents.
DEVICE void sum_values(float (&dv)[DV_TILES][4], const Params& p, const Sequence& sequence, const Mask& mask, QueryWalk walk, int key) {
    float s[QUERY_TILES][4];
    u32 p_fragments[QUERY_STEPS][4];
    Handover handover;
    auto start_s = [&] { walk.wait(), start_transposed<HEAD_DIM>(s, KeySpace::k(), 0, KeySpace::q(walk.at.stage)); };
    auto exponentiate = [&] { probabilities_at(s, p, sequence, mask, walk, key); };
    auto hand_over = [&] {
        pack(p_fragments, s);
        handover.give(p_fragments);
    };
    mbarrier_wait(KeySpace::keys(), 0);
    start_s();
    wgmma_wait<0>(s);
    exponentiate();
    hand_over();
    bool first = true;
    int stage = walk.at.stage;
    for (walk.advance(); !walk.ended(); walk.advance()) {
        start_s();
        start_rounded(dv, p_fragments, KeySpace::dout(stage), 0, !first);
        first = false;
        wgmma_wait<1>(s);
        exponentiate();
        wgmma_wait<0>(dv);
        walk.release(stage);
        stage = walk.at.stage;
        hand_over();
    }
    start_rounded(dv, p_fragments, KeySpace::dout(stage), 0, !first);
    wgmma_wait<0>(dv);
}

// dK = dS^T Q over all tiles, not scaled.
DEVICE void sum_keys(float (&dk)[DK_TILES][4], QueryWalk walk) {
    float dp[QUERY_TILES][4];
    u32 p_fragments[QUERY_STEPS][4], ds_fragments[QUERY_STEPS][4];
    Handover handover;
    auto start_dp = [&] { walk.wait(), start_transposed<HEAD_DIM_V>(dp, KeySpace::v(), 0, KeySpace::dout(walk.at.stage)); };
    auto take_over = [&] {
        handover.take(p_fragments);
        const u32 stats = KeySpace::stats(walk.at.stage) + c_column() * 8;
        if (walk.tiles.needs_mask(walk.tile)) differentiate<true>(p_fragments, dp, stats);
        else differentiate<false>(p_fragments, dp, stats);
    };
    mbarrier_wait(KeySpace::keys(), 0);
    start_dp();
    wgmma_wait<0>(dp);
    take_over();
    pack(ds_fragments, dp);
    bool first = true;
    int stage = walk.at.stage;
    for (walk.advance(); !walk.ended(); walk.advance()) {
        start_dp();
        start_rounded(dk, ds_fragments, KeySpace::q(stage), 0, !first);
        first = false;
        wgmma_wait<1>(dp);
        take_over();
        wgmma_wait<0>(dk);
        walk.release(stage);
        stage = walk.at.stage;
        pack(ds_fragments, dp);
    }
    start_rounded(dk, ds_fragments, KeySpace::q(stage), 0, !first);
    wgmma_wait<0>(dk);
}

// ---- backward_wgmma/keys.cuh.j2
extern "C" __global__ void __launch_bounds__(KEY_THREADS, 1) backward_keys(const __grid_constant__ Params p) {
    Share share;
    if (!find_share<KEY_ROWS, true>(p, p.heads_q / p.group, share)) return;
    const Sequence& sequence = share.sequence;
    const int key_end = min_of(share.begin + KEY_ROWS, sequence.key_end);
    const QueryTiles<KEY_QUERIES> tiles(Observers(p, sequence, share.begin, key_end));
    if (thread_id() == 0) {
        const Ring ring = KeySpace::queries();
        for (int stage = 0; stage < KEY_STAGES; ++stage)  // full: by TMA and by the statistics; empty: by warps
            mbarrier_init(ring.full(stage), 2), mbarrier_init(ring.empty(stage), KEY_GROUPS * 4);
        mbarrier_init(KeySpace::keys(), 1);
        mbarrier_init_fence();
    }
    sync_block();
    if (warpgroup_id() == 0) {
        registers_release<KEY_LOADER_REGISTERS>();
        if (thread_id() < WARP_SIZE && tiles.end > 0) load_for_keys(p, share, tiles);
        return;
    }
    registers_claim<KEY_REGISTERS>();
    const int group = warpgroup_id() - 1, row = group / ROLES * 64;
    const Mask mask(p, sequence);
    const int key = share.begin + row + thread_id() % WARPGROUP_SIZE / WARP_SIZE * 16 + c_row();
    auto store_dk = [&](const auto& dk) {
        const int begin = opaque(share.begin + row);
        Element* to = p.dk + share.batch * p.dk_batch_stride + share.head * p.dk_head_stride + begin * p.dk_row_stride;
        store_rows(KeySpace::k(), row, 0, dk, p.scale, to, p.dk_row_stride, min_of(64, sequence.key_end - begin));
    };
    auto store_dv = [&](const auto& dv) {
        const int begin = opaque(share.begin + row);
        Element* to = p.dv + share.batch * p.dv_batch_stride + share.head * p.dv_head_stride + begin * p.dv_row_stride;
        store_rows(KeySpace::v(), row, 0, dv, 1.0f, to, p.dv_row_stride, min_of(64, sequence.key_end - begin));
    };
    QueryWalk walk{p, share, tiles};
    if constexpr (ROLES == 2) {
        if (group == 0) {
            float dv[DV_TILES][4] = {};
            if (tiles.end > 0) sum_values(dv, p, sequence, mask, walk, key), named_barrier_sync(1 + KEY_GROUPS, KEY_GROUPS * WARPGROUP_SIZE);  // the other reads V
            store_dv(dv);
        } else {
            float dk[DK_TILES][4] = {};
            if (tiles.end > 0) sum_keys(dk, walk), named_barrier_sync(1 + KEY_GROUPS, KEY_GROUPS * WARPGROUP_SIZE);  // the other reads K
            store_dk(dk);
        }
        return;
    }

    float dk[DK_TILES][4] = {}, dv[DV_TILES][4] = {};
    if (tiles.end > 0) {
        float s[QUERY_TILES][4], dp[QUERY_TILES][4];
        u32 p_fragments[QUERY_STEPS][4], ds_fragments[QUERY_STEPS][4];
        auto start_s = [&] { walk.wait(), start_transposed<HEAD_DIM>(s, KeySpace::k(), row, KeySpace::q(walk.at.stage)); };
        auto start_dp = [&] { start_transposed<HEAD_DIM_V>(dp, KeySpace::v(), row, KeySpace::dout(walk.at.stage)); };
        auto exponentiate = [&] {
            probabilities_at(s, p, sequence, mask, walk, key);
            pack(p_fragments, s);
        };
        mbarrier_wait(KeySpace::keys(), 0);

        start_s();
        if constexpr (AHEAD != 1) start_dp();
        wgmma_wait<(AHEAD != 1)>(s);
        exponentiate();
        if constexpr (AHEAD != 1) wgmma_wait<0>(dp);
        // Each step ends a tile and begins the next one. No product is under way between steps, or ptxas would let none overlap.
#pragma unroll 1
        while (true) {
            const int stage = walk.at.stage;
            if constexpr (AHEAD == 1) start_dp();
            start_rounded(dv, p_fragments, KeySpace::dout(stage), 0, true);
            if constexpr (AHEAD == 1) wgmma_wait<1>(dp);
            const u32 stats = KeySpace::stats(stage) + c_column() * 8;
            if (tiles.needs_mask(walk.tile)) differentiate<true>(p_fragments, dp, stats);
            else differentiate<false>(p_fragments, dp, stats);
            wgmma_wait<0>(dv);  // the fragments of dS take the place of those of P
            pack(ds_fragments, dp);

            walk.advance();
            const bool ended = walk.ended();
            if (ended) {
                start_rounded(dk, ds_fragments, KeySpace::q(stage), 0, true);

                wgmma_wait<0>(dk);
                break;
            }
            if constexpr (AHEAD > 0) start_s();

            if constexpr (AHEAD > 1) start_dp();
            start_rounded(dk, ds_fragments, KeySpace::q(stage), 0, true);
            if constexpr (AHEAD > 0) wgmma_wait<AHEAD>(s), exponentiate();
            if constexpr (AHEAD > 1) wgmma_wait<1>(dp);

            wgmma_wait<0>(dk);
            walk.release(stage);
            if constexpr (AHEAD == 0) {
                start_s(), start_dp();
                wgmma_wait<1>(s);
                exponentiate();
                wgmma_wait<0>(dp);
            }
        }

    }
    store_dk(dk);
    store_dv(dv);
}

// ---- backward_wgmma/owned/queries.cuh.j2
// dQ. A block owns QUERY_GROUPS * 64 queries of a head and visits the tiles of keys that they see; a warpgroup owns 64 of them. dS
// falls out of the tensor cores as the A operand of dQ = dS K.
constexpr int QUERY_ROWS = QUERY_GROUPS * 64, QUERY_THREADS = (1 + QUERY_GROUPS) * WARPGROUP_SIZE;
constexpr int KEY_TILES = QUERY_KEYS / 8, KEY_STEPS = QUERY_KEYS / 16, DQ_TILES = HEAD_DIM / 8;

struct QuerySpace {
    using Q = SmemTile<QUERY_ROWS, HEAD_DIM>;
    using dO = SmemTile<QUERY_ROWS, HEAD_DIM_V>;
    using K = SmemTile<QUERY_KEYS, HEAD_DIM>;
    using V = SmemTile<QUERY_KEYS, HEAD_DIM_V>;
    static constexpr int STAGE_BYTES = K::BYTES + V::BYTES;
    static constexpr int BARRIERS_OFFSET = Q::BYTES + dO::BYTES + QUERY_STAGES * STAGE_BYTES;
    static constexpr int BYTES = BARRIERS_OFFSET + 16 * (QUERY_STAGES + 1);
    DEVICE static Q q() { return {smem_base()}; }
    DEVICE static dO dout() { return {smem_base() + Q::BYTES}; }
    DEVICE static K k(int stage) { return {smem_base() + Q::BYTES + dO::BYTES + stage * STAGE_BYTES}; }
    DEVICE static V v(int stage) { return {k(stage).base + K::BYTES}; }
    DEVICE static Ring keys() { return {smem_base() + BARRIERS_OFFSET}; }
    DEVICE static u32 queries() { return smem_base() + BARRIERS_OFFSET + 16 * QUERY_STAGES; }
};
static_assert(QuerySpace::BYTES == QUERY_SMEM_BYTES, "shared memory request");
static_assert(!AHEAD || QUERY_STAGES > 1, "the next tile needs a buffer of its own");

// A row's log-sum-exp and D, for this lane's two rows of C fragments.
struct RowPair {
    float lse[2], d[2];
    DEVICE RowPair(const float* stats, int query, int query_end) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = query + half * 8;
            lse[half] = row < query_end ? stats[i64(row) * 2] : INF;
            d[half] = row < query_end ? stats[i64(row) * 2 + 1] : 0;
        }
    }
};

// The loader's part, of one thread: Q and dO once, then K and V tile by tile, from the last to the first.
DEVICE void load_for_queries(const Params& p, const Share& share, const KvTiles<QUERY_KEYS>& tiles) {
    const u32 queries = QuerySpace::queries();
    const int head_kv = share.head / p.group;
    mbarrier_arrive_expect(queries, QuerySpace::Q::BYTES + QuerySpace::dO::BYTES);
    load_boxes<QUERY_ROWS, QUERY_BOX_ROWS>(QuerySpace::q(), 0, p.q_map, queries, share.begin, share.head, share.batch, CACHE_EVICT_FIRST);
    load_boxes<QUERY_ROWS, QUERY_BOX_ROWS>(QuerySpace::dout(), 0, p.dout_map, queries, share.begin, share.head, share.batch, CACHE_EVICT_FIRST);
    Place<QUERY_STAGES> at;
#pragma unroll 1
    for (int tile = tiles.first(); tiles.contains(tile); tile = tiles.next(tile)) {
        const u32 full = QuerySpace::keys().full(at.stage);
        mbarrier_wait(QuerySpace::keys().empty(at.stage), at.phase ^ 1);
        mbarrier_arrive_expect(full, QuerySpace::STAGE_BYTES);
        load_boxes<QUERY_KEYS, KEY_BOX_ROWS>(QuerySpace::k(at.stage), 0, p.k_map, full, tiles.first_key(tile), head_kv, share.batch, CACHE_EVICT_LAST);
        load_boxes<QUERY_KEYS, KEY_BOX_ROWS>(QuerySpace::v(at.stage), 0, p.v_map, full, tiles.first_key(tile), head_kv, share.batch, CACHE_EVICT_LAST);
        at.advance();
    }
}

// From scores s and dP to dS, in share of dP, in two parts: P before dP has come. `query` and `key` are those of this lane's first
// element.
template <bool MASKED>
DEVICE void row_probabilities(float (&s)[KEY_TILES][4], const Params& p, const Mask& mask, const RowPair& rows, int query,
                              int key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = query + half * 8;
        const int begin = mask.row_begin(row) - key, end = mask.row_end(row) - key;
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = s[n][half * 2 + i];
                float exponent = score * p.scale_log2 - rows.lse[half];
                const bool visible = !MASKED || (n * 8 + i < end && (!Mask::HAS_ROW_BEGIN || n * 8 + i >= begin));
                score = visible ? exp2_approx(exponent) : 0;
            }
    }
}
template <bool MASKED>
DEVICE void row_differentiate(const float (&probability)[KEY_TILES][4], float (&dp)[KEY_TILES][4], const RowPair& rows) {
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float ds = probability[n][i] * (dp[n][i] - rows.d[i / 2]);
            dp[n][i] = MASKED && probability[n][i] == 0 ? 0 : ds;  // what is hidden may be NaN
        }
}

extern "C" __global__ void __launch_bounds__(QUERY_THREADS, 1) backward_queries(const __grid_constant__ Params p) {
    Share share;
    if (!find_share<QUERY_ROWS, false>(p, p.heads_q, share)) return;
    const Sequence& sequence = share.sequence;
    const int query_end = min_of(share.begin + QUERY_ROWS, sequence.row_end);
    const Mask mask(p, sequence);
    const KvTiles<QUERY_KEYS> tiles(mask, share.begin, query_end);
    const Ring ring = QuerySpace::keys();
    if (thread_id() == 0) {
        for (int stage = 0; stage < QUERY_STAGES; ++stage) mbarrier_init(ring.full(stage), 1), mbarrier_init(ring.empty(stage), QUERY_GROUPS);
        mbarrier_init(QuerySpace::queries(), 1);
        mbarrier_init_fence();
    }
    sync_block();
    if (warpgroup_id() == 0) {
        registers_release<QUERY_LOADER_REGISTERS>();
        if (thread_id() == 0 && !tiles.empty()) load_for_queries(p, share, tiles);
        return;
    }
    registers_claim<QUERY_REGISTERS>();
    const int group = warpgroup_id() - 1, row = group * 64, query = share.begin + row + thread_id() % WARPGROUP_SIZE / WARP_SIZE * 16 + c_row();
    const bool leader = thread_id() % WARPGROUP_SIZE == 0;

    float dq[DQ_TILES][4] = {};
    if (!tiles.empty()) {
        float s[KEY_TILES][4], dp[KEY_TILES][4];
        u32 ds_fragments[KEY_STEPS][4];
        Place<QUERY_STAGES> at;
        const RowPair rows(p.stats + (i64(share.batch) * p.heads_q + share.head) * p.seqlen_q * 2, query, query_end);
        int tile = tiles.first();
        auto wait = [&] {  // for a tile, whose rows of keys that do not exist are zeroed
            mbarrier_wait(ring.full(at.stage), at.phase);
            const int exist = tiles.key_end - tiles.first_key(tile);
            if (exist >= QUERY_KEYS) return;
            zero_rows(QuerySpace::k(at.stage), exist, QUERY_KEYS);
            fence_async_proxy();
            named_barrier_sync(1 + group, WARPGROUP_SIZE);
        };
        auto start_scores = [&] {
            wait();
            start_transposed<HEAD_DIM>(s, QuerySpace::q(), row, QuerySpace::k(at.stage));
            start_transposed<HEAD_DIM_V>(dp, QuerySpace::dout(), row, QuerySpace::v(at.stage));
        };
        auto probabilities = [&] {
            const int key = tiles.first_key(tile) + c_column();
            if (tiles.needs_mask(tile)) row_probabilities<true>(s, p, mask, rows, query, key);
            else row_probabilities<false>(s, p, mask, rows, query, key);
        };
        auto differentiate = [&] {
            if (tiles.needs_mask(tile)) row_differentiate<true>(s, dp, rows);
            else row_differentiate<false>(s, dp, rows);
        };
        auto start_dq = [&](int stage, bool accumulate) { start_rounded(dq, ds_fragments, QuerySpace::k(stage), 0, accumulate); };
        auto release = [&](int stage) {
            if (leader) mbarrier_arrive(ring.empty(stage));
        };
        mbarrier_wait(QuerySpace::queries(), 0);
        start_scores();
        wgmma_wait<1>(s);
        probabilities();
        wgmma_wait<0>(dp);
        differentiate();
        pack(ds_fragments, dp);
        int stage = at.stage;
        bool first = true;
#pragma unroll 1
        for (at.advance(), tile = tiles.next(tile); tiles.contains(tile); at.advance(), tile = tiles.next(tile)) {
            if constexpr (AHEAD) {
                start_scores();
                start_dq(stage, !first);
                wgmma_wait<2>(s);
                probabilities();
                wgmma_wait<1>(dp);
                differentiate();
                wgmma_wait<0>(dq);
                release(stage);
            } else {
                start_dq(stage, !first);
                wgmma_wait<0>(dq);
                release(stage);
                start_scores();
                wgmma_wait<1>(s);
                probabilities();
                wgmma_wait<0>(dp);
                differentiate();
            }
            first = false;
            stage = at.stage;
            pack(ds_fragments, dp);
        }
        start_dq(stage, !first);
        wgmma_wait<0>(dq);
    }
    const int begin = opaque(share.begin + row);
    Element* to = p.dq + share.batch * p.dq_batch_stride + share.head * p.dq_head_stride + begin * p.dq_row_stride;
    store_rows(QuerySpace::q(), row, 0, dq, p.scale, to, p.dq_row_stride, min_of(64, query_end - begin));
}
