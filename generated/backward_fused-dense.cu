// backward_fused for backward-bf16-d128; written by `autotune build` from templates/ and tuning_db/
//
// shown      the winner of backward-bf16-b1-h16x16-q16384-k16384-d128 on nvidia-h200; <gpu>.md has others
// config     key_groups=2 dq_parts=2 key_stages=2 ahead=0 key_smem_bytes=164912
// launch     longest_first=true head_group=16
// resources  backward_rows: 40 registers, 0 bytes spilled, 256 threads, 32 bytes of shared memory
// resources  backward_sinks: 42 registers, 0 bytes spilled, 32 threads, 0 bytes of shared memory
// resources  backward_keys: 168 registers, 0 bytes spilled, 384 threads, 164912 bytes of shared memory
// resources  backward_convert: 30 registers, 0 bytes spilled, 128 threads, 0 bytes of shared memory
// compiler   NVRTC 13.0.88, -arch=sm_90a; options -std=c++17 -default-device -ftz=false -fmad=true --ptxas-options=-v
// again      autotune source backward-bf16-b1-h16x16-q16384-k16384-d128 --gpu nvidia-h200

// Gradients of attention for Hopper: TMA, warpgroup matrix multiply, specialised warps (sm_90a). Blocks of keys own dK and dV,
// and add what they know of dQ in fp32 to sums in global memory: five products, but no order of additions, so that the last bits of
// dQ may differ from call to call.
//
//   backward_rows     D of each query, its log-sum-exp, each block's part of the sinks' gradient, and zeros for the sums
//   backward_keys     dK and dV, a block of keys at a time, and the sums of dQ
//   backward_convert  dQ from its sums
//   backward_sinks    the sum of the sinks' parts
//
// With P = exp(scale q k - lse), dP = dO V^T and D = rowsum(O dO) - dlse: dS = P (dP - D), dV = P^T dO, dQ = scale dS K and
// dK = scale dS^T Q. P and dS are rounded before they are multiplied, sums are fp32, and each gradient is rounded once.

// Contents, lib: base; lib/ptx: math fp16 access opaque mbarrier warpgroup tma fragment mma wgmma wgmma_shapes
// wgmma_shared transpose reduce turing; lib/tile: element; lib: constants params; lib/sequences: keys dense;
// lib/masks/packed: full; backward/queries: full; attention: kv_tiles; lib/tile: smem; lib/softmax: sink; lib/tile:
// ring; backward: share; backward/share: dense; backward: query_tiles; backward_wgmma: products;
// backward_wgmma/fused/sums: dense; backward: rows; backward_wgmma/fused: clear_sums; backward_wgmma: keys key_space
// weights; backward_wgmma/fused: query_part convert; backward_wgmma: kernel

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

// ---- lib/ptx/wgmma_shared.cuh.j2
// The multiply of wgmma.cuh with both operands in shared memory and B MN-major.

// C (64 x 64) = or += A B with A K-major and B MN-major, both in shared memory.
DEVICE void wgmma_shared(float (&c)[8][4], u64 a, u64 b, bool accumulate) {
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
        "}, %32, %33, accumulate, 1, 1, 0, 1;\n"
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

// ---- lib/ptx/transpose.cuh
// Register tiles to shared memory transposed (sm_90).

// A 16 x 16 tile in the layout of A, transposed, to rows [row, row + 16), columns [8 * chunk, 8 * chunk + 16) of a tile.
template <typename Tile> DEVICE void store_a_transposed(const Tile& tile, int lane, int row, int chunk, const u32 (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(tile.address(row, chunk, lane / 16 * 8 + lane % 8, lane / 8 % 2)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}

// ---- lib/ptx/reduce.cuh
// Sums that several blocks add to, in global memory (sm_90). In what order they do is not said, so the last bits may differ.

// Adds four floats to those at `global`, a multiple of 16 bytes.
DEVICE void add_global_floats(float* global, const float (&v)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(global)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
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
constexpr int DQ_PARTS = 2;
constexpr int KEY_STAGES = 2;
constexpr int AHEAD = 0;
constexpr int KEY_SMEM_BYTES = 164912;
constexpr int KEY_QUERIES = 64;
constexpr int ROLES = 1;
constexpr int KEY_REGISTERS = 240;
constexpr int KEY_LOADER_REGISTERS = 24;
constexpr int QUERY_BOX_ROWS = 64;
constexpr int KEY_BOX_ROWS = 64;

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
    float* dq_sums;  // dQ before it is scaled and rounded, a place for each head and 64 queries
};

// ---- lib/sequences/keys.cuh
// The keys of one sequence.
struct Keys {
    int number;    // among the batch entries, or the packed sequences
    int key_begin, key_end;
    int diagonal;  // row i stands at key i + diagonal
};

// ---- lib/sequences/dense.cuh
// Sequences of one length, each a batch entry of its own, in the words of sequences/varlen.cuh.
struct Sequence : Keys {
    int row_begin, row_end;  // queries

    Sequence() = default;
    DEVICE Sequence(const Params& p, int n) : Keys{n, 0, p.seqlen_k, p.seqlen_k - p.seqlen_q}, row_begin(0), row_end(p.seqlen_q) {}
};

// ---- lib/masks/packed/full.cuh
// Every query sees every key of its sequence.
struct Mask {
    int first, end;
    DEVICE Mask(const Params&, const Keys& keys) : first(keys.key_begin), end(keys.key_end) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return first; }
    DEVICE int key_end(int row_end) const { return end; }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return first; }
    DEVICE int shared_end(int row_begin) const { return end; }
    // Row `row` sees keys [row_begin, row_end) of its tiles' own: none of those comes before the sequence.
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return end; }
};

// ---- backward/queries/full.cuh
// The queries of a sequence that see some key, or all keys, of [key_begin, key_end): every query sees every key.
struct Observers {
    int begin, end;            // queries outside see none of them
    int whole_begin, whole_end;  // those inside see all of them
    DEVICE Observers(const Params&, const Sequence& s, int, int)
        : begin(s.row_begin), end(s.row_end), whole_begin(s.row_begin), whole_end(s.row_end) {}
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

// ---- backward/share/dense.cuh
// Finds the work of this block, for blocks of ROWS keys or queries of `heads` heads.
template <int ROWS, bool KEYS> DEVICE bool find_share(const Params& p, int heads, Share& share) {
    const int blocks = ceil_div(KEYS ? p.seqlen_k : p.seqlen_q, ROWS);
    int row_block, head;
    split_turn(p, block_id(), blocks, heads * p.batch, row_block, head);
    share.batch = head / heads;
    share.head = head - share.batch * heads;
    share.sequence = Sequence(p, share.batch);
    share.begin = (!KEYS && p.longest_first ? blocks - 1 - row_block : row_block) * ROWS;
    return true;
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

// ---- backward_wgmma/fused/sums/dense.cuh
// Where the sums of dQ stand: a place for each head and 64 queries of a sequence, 64 x HEAD_DIM floats in the order of C fragments.
DEVICE i64 dq_places(const Params& p) { return i64(p.batch) * p.heads_q * ceil_div(p.seqlen_q, 64); }
DEVICE i64 dq_place(const Params& p, const Share& share, int head, int query) {
    return (i64(share.batch) * p.heads_q + head) * ceil_div(p.seqlen_q, 64) + query / 64;
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

// ---- backward_wgmma/fused/clear_sums.cuh
// The sums of dQ begin with 0; each block clears a share of them.
DEVICE void clear_sums(const Params& p) {
    const i64 count = dq_places(p) * (64 * HEAD_DIM / 4), each = ceil_div(count, i64(grid_size()));
    const i64 end = min_of(count, (block_id() + 1) * each);
    for (i64 i = block_id() * each + thread_id(); i < end; i += ROWS_THREADS) store_global_16(p.dq_sums + i * 4, Chunk{});
}

// ---- backward/rows.cuh.j2
extern "C" __global__ void __launch_bounds__(ROWS_THREADS) backward_rows(const __grid_constant__ Params p) {
    clear_sums(p);
    const int blocks = ceil_div(p.seqlen_q, ROWS_PER_BLOCK), batch = block_id() / blocks / p.heads_q;
    const int row_begin = 0, row_end = p.seqlen_q, turn = block_id();
    const int head = turn / blocks - batch * p.heads_q, first = turn % blocks * ROWS_PER_BLOCK;

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
    p.sink_sums[(i64(head) * p.batch + batch) * blocks + turn % blocks] = sum;
}

DEVICE void store_sink(void* sinks, int dtype, int head, float value) {
    if (dtype == 0) static_cast<float*>(sinks)[head] = value;
    else if (dtype == 1) static_cast<fp16*>(sinks)[head] = float_to_half(value);
    else if (dtype == 2) static_cast<bf16*>(sinks)[head] = float_to_bf16(value);
    else static_cast<double*>(sinks)[head] = value;
}

// Adds up what the blocks left of each head's sink, in an order that is always the same. One warp a head.
extern "C" __global__ void __launch_bounds__(WARP_SIZE) backward_sinks(const __grid_constant__ Params p) {
    const int head = block_id(), count = ceil_div(p.seqlen_q, ROWS_PER_BLOCK) * p.batch;
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
using KeyTile = SmemTile<KEY_ROWS, HEAD_DIM>;
static_assert(DQ_PARTS == 1 || (KEY_GROUPS == DQ_PARTS && KeyTile::PANELS % DQ_PARTS == 0), "parts of dQ");
constexpr int DQ_TILES = DQ_PARTS == 1 ? HEAD_DIM / 8 : KeyTile::PANELS / DQ_PARTS * 8;  // of a group: whole panels

// ---- backward_wgmma/key_space.cuh.j2
// Shared memory of a block that owns keys, and the loader that fills it.
struct KeySpace {
    using K = SmemTile<KEY_ROWS, HEAD_DIM>;
    using V = SmemTile<KEY_ROWS, HEAD_DIM_V>;
    using Q = SmemTile<KEY_QUERIES, HEAD_DIM>;
    using dO = SmemTile<KEY_QUERIES, HEAD_DIM_V>;
    static constexpr int STAGE_BYTES = Q::BYTES + dO::BYTES, STATS_BYTES = KEY_QUERIES * 8;
    static constexpr int STATS_OFFSET = K::BYTES + V::BYTES + KEY_STAGES * STAGE_BYTES;
    using dS = SmemTile<KEY_QUERIES, KEY_ROWS>;
    static constexpr int DS_OFFSET = STATS_OFFSET;
    static constexpr int BARRIERS_OFFSET = DS_OFFSET + 2 * dS::BYTES + KEY_STAGES * STATS_BYTES;
    DEVICE static dS ds(int buffer) { return {smem_base() + DS_OFFSET + buffer * dS::BYTES}; }
    DEVICE static u32 stats(int stage) { return smem_base() + DS_OFFSET + 2 * dS::BYTES + stage * STATS_BYTES; }
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

// ---- backward_wgmma/fused/query_part.cuh
// The part of dQ that comes of a tile: dS K over all keys of the block. The groups leave dS in shared memory, one of them, by
// turns, multiplies, and adds the result to what blocks of other keys add. With DQ_PARTS each multiplies its part of the columns
// instead. Groups are in step by two barriers for each of the two buffers of dS: that all have written
// it, and that it has been read.
struct QueryPart {
    static constexpr int FILLED = 8, READ = 10, THREADS = KEY_GROUPS * WARPGROUP_SIZE;
    static constexpr int TURNS = DQ_PARTS == 1 ? KEY_GROUPS : 1;  // with parts of columns all multiply
    int group;
    int tiles = 0;  // so far

    DEVICE int part() const { return DQ_PARTS == 1 ? 0 : group; }
    DEVICE int buffer() const { return tiles % 2; }
    // Whether it is this group's turn to multiply dS of all groups by K.
    DEVICE bool multiplies() const { return turn_of(tiles); }
    DEVICE bool turn_of(int tile) const { return TURNS == 1 || tile % TURNS == group; }
    // Leaves this group's dS.
    DEVICE void leave(const u32 (&ds_fragments)[QUERY_STEPS][4], int row) const {
        if (TURNS > 1 && tiles >= 2 && !turn_of(tiles - 2)) named_barrier_sync(READ + buffer(), THREADS);
        const int chunk = opaque(row / 8 + thread_id() % WARPGROUP_SIZE / WARP_SIZE * 2);
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; ++step) store_a_transposed(KeySpace::ds(buffer()), lane_id(), step * 16, chunk, ds_fragments[step]);
        fence_async_proxy();
        if (!multiplies()) named_barrier_arrive(FILLED + buffer(), THREADS);
    }
    // Starts the product, once all have left theirs.
    DEVICE void start(float (&dq)[DQ_TILES][4]) const {
        named_barrier_sync(FILLED + buffer(), THREADS);
        const KeySpace::dS tile = KeySpace::ds(buffer());
        const u64 b = descriptor_mn_major(KeySpace::k().base + part() * (DQ_TILES / 8) * KeySpace::K::PANEL_BYTES, KeySpace::K::PANEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < KEY_ROWS / 16; ++step)
            wgmma_shared(dq, descriptor_advance(descriptor_k_major(tile.base + step / 4 * KeySpace::dS::PANEL_BYTES), step % 4 * 32),
                         descriptor_advance(b, step * 16 * 128), step > 0);
        wgmma_commit();
    }
    // Adds the product, which has been waited for, to the sums of the tile's queries. They stand in the order of C fragments.
    DEVICE void add(const float (&dq)[DQ_TILES][4], float* sums, int place) const {
        if (TURNS > 1) named_barrier_arrive(READ + buffer(), THREADS);
        const int warp = opaque(thread_id() % WARPGROUP_SIZE / WARP_SIZE), first = part() * DQ_TILES;
        sums += i64(place) * (KEY_QUERIES * HEAD_DIM) + ((warp * (HEAD_DIM / 8) + first) * WARP_SIZE + lane_id()) * 4;
#pragma unroll
        for (int n = 0; n < DQ_TILES; ++n) {
            if (first + n >= HEAD_DIM / 8) break;
            add_global_floats(sums + n * WARP_SIZE * 4, dq[n]);
        }
    }
};

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

extern "C" __global__ void __launch_bounds__(KEY_THREADS, 1) backward_keys(const __grid_constant__ Params p) {
    Share share;
    if (!find_share<KEY_ROWS, true>(p, p.heads_q / p.group, share)) return;
    const Sequence& sequence = share.sequence;
    const int key_end = min_of(share.begin + KEY_ROWS, sequence.key_end);
    QueryTiles<KEY_QUERIES> tiles(Observers(p, sequence, share.begin, key_end), sequence.row_begin);
    if (key_end < share.begin + KEY_ROWS) tiles.mask_all();  // or P of keys that do not exist, which dQ sums over, may be infinite
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
        // Keys that nobody sees, or of another sequence: of this group's, as all meet them in dQ.
        const int seen = mask.key_begin(sequence.row_begin) - share.begin - row, unseen = mask.key_end(sequence.row_end) - share.begin - row;
        zero_rows(KeySpace::k(), row, row + min_of(seen, 64));
        zero_rows(KeySpace::k(), row + max_of(unseen, 0), row + 64);
        fence_async_proxy();
        named_barrier_sync(1 + group, WARPGROUP_SIZE);
        QueryPart query_part{group};
        float dq[DQ_TILES][4];
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
            const int place = int(dq_place(p, share, walk.head(), tiles.first_query(walk.tile)));
            walk.advance();
            const bool ended = walk.ended();
            if (ended) {
                start_rounded(dk, ds_fragments, KeySpace::q(stage), 0, true);
                query_part.leave(ds_fragments, row);
                if (query_part.multiplies()) query_part.start(dq), wgmma_wait<0>(dk, dq), query_part.add(dq, p.dq_sums, place);
                wgmma_wait<0>(dk);
                break;
            }
            if constexpr (AHEAD > 0) start_s();
            query_part.leave(ds_fragments, row);
            if constexpr (QueryPart::TURNS == 1) query_part.start(dq);
            if constexpr (AHEAD > 1) start_dp();
            start_rounded(dk, ds_fragments, KeySpace::q(stage), 0, true);
            if constexpr (AHEAD > 0) wgmma_wait<AHEAD + (QueryPart::TURNS == 1)>(s), exponentiate();
            if constexpr (AHEAD > 1) wgmma_wait<1>(dp);
            if constexpr (QueryPart::TURNS == 1) {
                wgmma_wait<1>(dq);
                query_part.add(dq, p.dq_sums, place);
            } else if (query_part.multiplies()) {  // after the exponents: ptxas takes no product across two branches
                query_part.start(dq);
                wgmma_wait<0>(dk, dq);
                query_part.add(dq, p.dq_sums, place);
            }
            ++query_part.tiles;
            wgmma_wait<0>(dk);
            walk.release(stage);
            if constexpr (AHEAD == 0) {
                start_s(), start_dp();
                wgmma_wait<1>(s);
                exponentiate();
                wgmma_wait<0>(dp);
            }
        }
        if constexpr (KEY_GROUPS > 1) named_barrier_sync(1 + KEY_GROUPS, KEY_GROUPS * WARPGROUP_SIZE);  // others read the same K
    }
    store_dk(dk);
    store_dv(dv);
}

// ---- backward_wgmma/fused/convert.cuh
// dQ from its sums: scaled and rounded. A block does 64 queries of a head.
constexpr int CONVERT_THREADS = 128;

extern "C" __global__ void __launch_bounds__(CONVERT_THREADS) backward_convert(const __grid_constant__ Params p) {
    Share share;
    if (!find_share<64, false>(p, p.heads_q, share)) return;
    constexpr int CHUNKS = HEAD_DIM / 8;
    const int rows = min_of(64, share.sequence.row_end - share.begin);
    const float* sums = p.dq_sums + dq_place(p, share, share.head, share.begin) * (64 * HEAD_DIM);
    Element* dq = p.dq + share.batch * p.dq_batch_stride + share.head * p.dq_head_stride + share.begin * p.dq_row_stride;
    for (int i = thread_id(); i < rows * CHUNKS; i += CONVERT_THREADS) {
        const int row = i / CHUNKS, chunk = i - row * CHUNKS;
        // Row r is in warp r / 16, in lanes 4 (r % 8) to 4 (r % 8) + 3, which have two columns each.
        const float* pair = sums + ((row / 16 * CHUNKS + chunk) * WARP_SIZE + row % 8 * 4) * 4 + row % 16 / 8 * 2;
        Chunk result;
#pragma unroll
        for (int n = 0; n < 4; ++n) result.word[n] = pack2<Element>(pair[n * 4] * p.scale, pair[n * 4 + 1] * p.scale);
        store_global_16(dq + row * p.dq_row_stride + chunk * 8, result);
    }
}
