// forward_wgmma for forward-bf16-d128-causal-varlen; written by `autotune build` from templates/ and tuning_db/
//
// shown      the winner of forward-bf16-b64-h32x8-q3328-k3328-d128-causal-varlen on nvidia-h200; <gpu>.md has others
// config     num_warpgroups=3 block_heads=4 block_n=80 num_stages=3 q_stages=2 overlap=true ping_pong=false
//            rescale_slack=8 integer_max=false min_blocks_per_sm=1 split_keys=false smem_bytes=221440
// launch     longest_first=true head_group=8 persistent=true num_splits=1
// resources  forward_wgmma: 128 registers, 0 bytes spilled, 512 threads, 221440 bytes of shared memory
// compiler   NVRTC 13.0.88, -arch=sm_90a; options -std=c++17 -default-device -ftz=false -fmad=true --ptxas-options=-v
// again      autotune source forward-bf16-b64-h32x8-q3328-k3328-d128-causal-varlen --gpu nvidia-h200

// Forward attention for Hopper: TMA, warpgroup matrix multiply, specialised warps. sm_90a.
//
// One warp of the first warpgroup loads: it keeps NUM_STAGES buffers of K and of V filled, from the last tile to the
// first. The other NUM_WARPGROUPS groups each own 64 query rows and compute: S = Q K^T from shared memory, softmax in
// registers, O += P V with P from registers. While softmax works on one tile's scores, the tensor cores are kept busy by
// the products of the tiles before and after it (OVERLAP), and by another group (PING_PONG: groups take turns to multiply).

// Contents, lib: base; lib/ptx: math fp16 access mbarrier warpgroup tma ticket fragment wgmma stmatrix; lib: constants
// params; lib/sequences: keys varlen; lib/masks/packed: causal; forward_wgmma/tiles: tight; forward/work: packed;
// lib/tile: smem; lib/softmax: rescale; forward_wgmma: mask_scores; lib/softmax: warpgroup sink; lib/tile: ring;
// forward_wgmma: task products memory; forward_wgmma/boxes: varlen; forward_wgmma/loads: packed; forward_wgmma/results:
// finished; forward_wgmma: kernel

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

// ---- lib/ptx/ticket.cuh
// Counters in global memory that several blocks draw numbers from.

// Adds 1 to a counter that runs from 0 to `last` and around, and gives its value before. So whoever draws `last` leaves the
// counter as it was found.
DEVICE u32 take_ticket(u32* counter, u32 last) {
    u32 before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(__cvta_generic_to_global(counter)), "r"(last) : "memory");
    return before;
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

// C (64 x 80) = or += A B^T, both K-major in shared memory.
DEVICE void wgmma_qk(float (&c)[10][4], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %42, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, "
        "%4, %5, %6, %7, "
        "%8, %9, %10, %11, "
        "%12, %13, %14, %15, "
        "%16, %17, %18, %19, "
        "%20, %21, %22, %23, "
        "%24, %25, %26, %27, "
        "%28, %29, %30, %31, "
        "%32, %33, %34, %35, "
        "%36, %37, %38, %39"
        "}, %40, %41, accumulate, 1, 1, 0, 0;\n"
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
          "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3])
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

// ---- lib/ptx/stmatrix.cuh
// The way back of ldmatrix.cuh's load_a (sm_90): a 16 x 16 tile in the layout of A to rows [row, row + 16), columns
// [8 * chunk, 8 * chunk + 16) of a tile in shared memory.
template <typename Tile> DEVICE void store_a(const Tile& tile, int lane, int row, int chunk, const u32 (&a)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(tile.address(row, chunk, lane % 16, lane / 16)), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

// ---- forward_wgmma/kernel.cu.j2
using Element = bf16;

// ---- lib/constants.cuh.j2
constexpr int HEAD_DIM = 128;
constexpr int HEAD_DIM_V = 128;
constexpr int NUM_WARPGROUPS = 3;
constexpr int BLOCK_HEADS = 4;
constexpr int BLOCK_N = 80;
constexpr int NUM_STAGES = 3;
constexpr int Q_STAGES = 2;
constexpr bool OVERLAP = true;
constexpr bool PING_PONG = false;
constexpr int RESCALE_SLACK = 8;
constexpr bool INTEGER_MAX = false;
constexpr int MIN_BLOCKS_PER_SM = 1;
constexpr int SMEM_BYTES = 221440;
constexpr int LOADER_REGISTERS = 56;
constexpr int REGISTERS = 152;

// ---- forward_wgmma/kernel.cu.j2
constexpr int UNIT_ROWS = 64, BLOCK_M = NUM_WARPGROUPS * UNIT_ROWS;  // M of wgmma
constexpr int THREADS = (1 + NUM_WARPGROUPS) * WARPGROUP_SIZE;
constexpr int TILES_N = BLOCK_N / 8, TILES_V = HEAD_DIM_V / 8;
constexpr int STEPS_D = ceil_div(HEAD_DIM, 16), STEPS_N = BLOCK_N / 16;

// ---- lib/params.cuh.j2
// Everything that changes from call to call. Strides are in elements.
struct Params {
    TensorMap q_map;
    TensorMap k_map;
    TensorMap v_map;
    TensorMap out_map;
    const Element* q;  // (seqlen_q, heads_q, head_dim): the queries of all sequences, one sequence after the other
    const Element* k;  // (seqlen_k, heads_kv, head_dim)
    const Element* v;  // (seqlen_k, heads_kv, head_dim_v)
    Element* out;  // as q, with head_dim_v
    float* lse;  // (heads_q, seqlen_q), or null
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
    int batch;  // sequences
    int heads_q;
    int group;  // query heads per key/value head
    int seqlen_q;  // of all sequences together
    int seqlen_k;  // of all sequences together
    int window_left;
    int window_right;
    int sink_dtype;
    float scale_log2;  // softmax scale * log2(e), above 0
    int head_group;
    int longest_first;
    u32* tickets;  // a counter, 0 between launches, from which blocks draw their work; null: each has its own
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

// ---- forward_wgmma/tiles/tight.cuh.j2
// The key tiles that a block of query rows has to visit, from the last to the first. Tiles are counted from the
// first key that some row sees; the last one ends with the last such key and shares with the one before it what does not fill a
// tile. So no tile holds keys that no row sees, unless all there are do not fill one: that tile begins before them. Where there
// are none, there is such a tile all the same, so that no code is needed for that.
template <int BLOCK_N> struct KvTiles {
    int key_begin, key_end;        // keys that some row sees
    int end;                       // tiles [0, end)
    int shared_begin, shared_end;  // keys that every row sees

    KvTiles() = default;
    DEVICE KvTiles(const Mask& mask, int query_begin, int query_end) {
        key_begin = mask.key_begin(query_begin);
        key_end = max_of(mask.key_end(query_end), key_begin);
        end = max_of(ceil_div(key_end - key_begin, BLOCK_N), 1);
        shared_begin = mask.shared_begin(query_end);
        shared_end = mask.shared_end(query_begin);
    }
    static constexpr bool empty() { return false; }
    DEVICE int first() const { return end - 1; }
    DEVICE static int next(int tile) { return tile - 1; }
    DEVICE static bool contains(int tile) { return tile >= 0; }
    DEVICE bool needs_mask(int tile) const { return own_key(tile) < shared_begin || own_key(tile) + BLOCK_N > shared_end; }
    DEVICE int first_key(int tile) const { return min_of(own_key(tile), key_end - BLOCK_N); }
    // The first key that no tile before this one holds.
    DEVICE int own_key(int tile) const { return key_begin + tile * BLOCK_N; }
    // Every row sees the columns [left, right) of a tile, as far as it has such.
    DEVICE int left(int tile) const { return max_of(shared_begin, own_key(tile)) - first_key(tile); }
    DEVICE int right(int tile) const { return shared_end - first_key(tile); }
};

// ---- forward/work/packed.cuh
// Which queries of which sequence a block works on, and in what order, where the lengths stand on the device.
//
// A block owns BLOCK_QUERIES consecutive queries of each of BLOCK_HEADS query heads that share a key/value head. Its rows
// come in units of UNIT_ROWS, each of which holds the same queries of one head after the other. The first block of a sequence
// is the one that is not full: under a causal mask its rows see the fewest keys, so those that are missing cost little.
//
// The work of a launch is counted in items, one for a block of queries and a set of heads. Within a sequence, `head_group`
// neighbouring sets of heads run together, all of one block of queries before the one before it, so that their K and V stay in
// L2. With `longest_first`, sequences with many keys come before those with a quarter as many, and short items fill the tail.
constexpr int BLOCK_QUERIES = BLOCK_M / BLOCK_HEADS;
constexpr int UNIT_QUERIES = UNIT_ROWS / BLOCK_HEADS;
static_assert(BLOCK_M % UNIT_ROWS == 0 && UNIT_ROWS % BLOCK_HEADS == 0, "every head has the same queries");

DEVICE int head_sets(const Params& p) { return p.heads_q / p.group * ceil_div(p.group, BLOCK_HEADS); }
DEVICE int query_blocks(const Sequence& s) { return ceil_div(s.row_end - s.row_begin, BLOCK_QUERIES); }
DEVICE int items_of(const Params& p, const Sequence& s) { return query_blocks(s) * head_sets(p); }

struct Work : Keys {
    static constexpr int batch = 0;  // packed arrays are one batch entry
    int head_kv;
    int head_begin, head_count;  // query heads; none if there is nothing to do
    int query_begin, query_end;  // rows that exist

    Work() = default;
    DEVICE Work(const Params& p, const Sequence& sequence, int item) : Keys(sequence) {
        const int blocks = query_blocks(sequence), sets_per_kv = ceil_div(p.group, BLOCK_HEADS);
        const int section = item / (blocks * p.head_group);
        const int within = item - section * blocks * p.head_group;
        const int sets_here = min_of(p.head_group, head_sets(p) - section * p.head_group);
        const int later_blocks = within / sets_here;
        const int set = section * p.head_group + within - later_blocks * sets_here;
        head_kv = set / sets_per_kv;
        const int head_in_group = (set - head_kv * sets_per_kv) * BLOCK_HEADS;
        head_begin = head_kv * p.group + head_in_group;
        head_count = min_of(BLOCK_HEADS, p.group - head_in_group);
        query_end = sequence.row_end - later_blocks * BLOCK_QUERIES;
        query_begin = max_of(query_end - BLOCK_QUERIES, sequence.row_begin);
    }
    DEVICE bool exists() const { return head_count > 0; }
    DEVICE int query(int row) const {
        return query_begin + (BLOCK_HEADS == 1 ? row : row / UNIT_ROWS * UNIT_QUERIES + row % UNIT_QUERIES);
    }
    DEVICE int head(int row) const { return head_begin + (BLOCK_HEADS == 1 ? 0 : row % UNIT_ROWS / UNIT_QUERIES); }
    DEVICE bool exists(int row) const {
        return query(row) < query_end && (BLOCK_HEADS == 1 || head(row) < head_begin + head_count);
    }
};

DEVICE int sum_in_warp(int x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}
DEVICE int most_in_warp(int x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x = max_of(x, shuffle_xor(x, mask));
    return x;
}

// Goes through the items of a launch in order, as a warp: its lanes look at as many sequences at a time, and all of them call.
struct Walk {
    int items;              // of the launch
    int level, next_level;  // of the sequences that are visited, and the highest below it that this lane has met
    int first, before;      // sequence of lane 0, and items before it

    DEVICE explicit Walk(const Params& p) : items(0), level(-1), next_level(-1), first(0), before(0) {
#pragma unroll 1
        for (int n = lane_id(); n < p.batch; n += WARP_SIZE) {
            const Sequence sequence(p, n);
            items += items_of(p, sequence);
            level = max_of(level, level_of(p, sequence));
        }
        items = sum_in_warp(items);
        level = most_in_warp(level);
    }
    // A power of 4 that the key tiles of a sequence's last block reach; -1 without rows.
    DEVICE static int level_of(const Params& p, const Sequence& s) {
        if (s.row_end == s.row_begin) return -1;
        if (!p.longest_first) return 0;
        int level = 0;
        const KvTiles<BLOCK_N> last(Mask(p, s), max_of(s.row_end - BLOCK_QUERIES, s.row_begin), s.row_end);
        for (int tiles = last.end; tiles >= 4; tiles /= 4) ++level;
        return level;
    }
    // The work of an item, which must not come before those that were asked for earlier; none beyond the last one.
    DEVICE Work find(const Params& p, int item) {
        while (level >= 0) {
            const Sequence mine(p, first + lane_id());
            const int my_level = level_of(p, mine);
            const int my_items = my_level == level ? items_of(p, mine) : 0;
            int through = my_items;  // those of this sequence and of lanes before it
#pragma unroll
            for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
                const int below = shuffle(through, max_of(lane_id() - distance, 0));
                if (lane_id() >= distance) through += below;
            }
            const int lane = sum_in_warp(int(item >= before + through));  // the first one that the item is not beyond
            if (lane < WARP_SIZE) {
                Sequence found;
                found.number = first + lane, found.diagonal = shuffle(mine.diagonal, lane);
                found.key_begin = shuffle(mine.key_begin, lane), found.key_end = shuffle(mine.key_end, lane);
                found.row_begin = shuffle(mine.row_begin, lane), found.row_end = shuffle(mine.row_end, lane);
                return Work(p, found, item - before - shuffle(through - my_items, lane));
            }
            before += shuffle(through, WARP_SIZE - 1);
            if (my_level < level) next_level = max_of(next_level, my_level);
            first += WARP_SIZE;
            if (first >= p.batch) first = 0, level = most_in_warp(next_level), next_level = -1;
        }
        return Work{};
    }
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

// ---- lib/softmax/rescale.cuh
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

// ---- forward_wgmma/mask_scores.cuh
// Sets the scores of hidden keys in one tile to -inf. `row` is that of the warp's first row within the block. Columns that all
// rows see are left alone, 16 at a time: of 143 keys that 16 queries see under a window of 128, 30 need to be compared.
template <int TILES_N, typename Tiles>
DEVICE void mask_scores(float (&s)[1][TILES_N][4], const Mask& mask, const Work& work, int row, const Tiles& tiles, int tile) {
    if (!tiles.needs_mask(tile)) return;
    const int left = tiles.left(tile), right = tiles.right(tile), first_key = tiles.first_key(tile) + c_column();
    const int query = work.query(row + c_row());
    const int queries[2] = {query, UNIT_QUERIES % 16 == 0 ? query + 8 : work.query(row + c_row() + 8)};
    if (left > 0) {
#pragma unroll
        for (int step = 0; step < TILES_N; step += 2) {
            if (step * 8 >= left) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int begin = max_of(mask.row_begin(queries[half]), tiles.own_key(tile)) - first_key;
#pragma unroll
                for (int n = step; n < step + 2; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i < begin) s[0][n][half * 2 + i] = -INF;
            }
        }
    }
    if (right < BLOCK_N) {
#pragma unroll
        for (int step = TILES_N - 2; step >= 0; step -= 2) {
            if (step * 8 + 16 <= right) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int end = mask.row_end(queries[half]) - first_key;
#pragma unroll
                for (int n = step; n < step + 2; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (n * 8 + i >= end) s[0][n][half * 2 + i] = -INF;
            }
        }
    }
}

// ---- lib/softmax/warpgroup.cuh
// Online softmax over one C fragment of scores: of a lane's two rows, index 0 is row c_row(), 1 is c_row() + 8.
//
// What probabilities are relative to is kept in log2 units and begins at a finite number below all scores: nothing is ever -inf
// minus -inf, and no tile asks whether a row has seen a key yet. Row sums stay partial in each lane and are added up at the end.
constexpr float LOWEST = -GREATEST;

//
// A reference is a product that was rounded, and a fused multiply-add is not: it is off by half an ulp of the reference at the row's
// own maximum, 64 at 2^30, whose power overflows. Beyond ENORMOUS the scale of a row is therefore a power of two, whose products are
// exact: scores there are equal or at least 8 apart, and those that are not the maximum weigh nothing at either scale. What is done
// a tile stays what it is: branches in `exponentiate` cost 3 to 11 %.
constexpr float ENORMOUS = 1 << 27, OVERFLOWED = 0x1p100f;  // what stands for products q.k that are beyond fp32

struct RowStatistics {
    float reference[2] = {LOWEST, LOWEST}, sum[2] = {}, scale[2];
    DEVICE explicit RowStatistics(float scale_log2) : scale{scale_log2, scale_log2} {}
    // The reference of a row in log2 units.
    DEVICE float reference_log2(int half, float scale_log2) const {
        return scale[half] == scale_log2 ? reference[half] : reference[half] / scale[half] * scale_log2;
    }
};

// The power of two above `x`.
DEVICE float power_above(float x) { return bits_float((float_bits(x) & 0x7f800000) + (1 << 23)); }

// Moves the reference of a row to `score`, its greatest so far, and gives what sums and output have to be multiplied by.
DEVICE float move_to(RowStatistics& rows, int half, float score, float scale_log2) {
    const float at_scale = in_log2(score, scale_log2);
    const bool enormous = max_of(at_scale, -at_scale) > ENORMOUS;
    const float scale = enormous ? power_above(scale_log2) : scale_log2;
    if (!(score * rows.scale[half] > rows.reference[half])) return 1;
    const float reference = in_log2(score, scale);
    const float factor = scale == rows.scale[half] ? exp2_approx(rows.reference[half] - reference) : 0;
    rows.reference[half] = reference, rows.scale[half] = scale;
    return factor;
}

template <int TILES_N> DEVICE void limit_scores(float (&s)[TILES_N][4], int half) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n)
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) s[n][i] = min_of(OVERFLOWED, s[n][i]);
}

// Moves the reference to cover the scores of one more tile: at every tile if RESCALE_SLACK < 0, otherwise only where it would
// grow by more than RESCALE_SLACK (a power of two) in some row of the warp: probabilities then reach at most 2^RESCALE_SLACK, and
// the division at the end makes the result exact again. Until then each lane looks at its own scores only: no shuffles.
template <int RESCALE_SLACK, bool INTEGER_MAX, int TILES_N>
DEVICE Rescale<1> move_reference(float (&s)[1][TILES_N][4], RowStatistics& rows, float scale_log2) {
    Rescale<1> rescale;
    const float maximum[2] = {lane_max<INTEGER_MAX>(s[0], 0), lane_max<INTEGER_MAX>(s[0], 1)};
    rescale.needed = RESCALE_SLACK < 0 || any_in_warp(maximum[0] * rows.scale[0] - rows.reference[0] > RESCALE_SLACK ||
                                                      maximum[1] * rows.scale[1] - rows.reference[1] > RESCALE_SLACK);
    if (rescale.needed) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float score = row_max(maximum[half]);
            if (score == INF) score = OVERFLOWED, limit_scores(s[0], half);
            rescale.factor[0][half] = move_to(rows, half, score, scale_log2);
            rows.sum[half] *= rescale.factor[0][half];
        }
    }
    return rescale;
}

// Replaces scores by probabilities relative to the reference, and adds them to the sums.
template <int TILES_N> DEVICE void exponentiate(float (&s)[1][TILES_N][4], RowStatistics& rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i) {
                s[0][n][i] = exp2_approx(s[0][n][i] * rows.scale[half] - rows.reference[half]);
                rows.sum[half] += s[0][n][i];
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

// ---- forward_wgmma/task.cuh.j2
// How blocks come by their work. Without p.tickets each has one block of the grid. With it there is a block for each place on
// the GPU: they begin with their own numbers and draw further ones from the counter, so that whoever is done early takes more.
// The counter comes back to 0 when all have drawn a number beyond the last.
DEVICE int draw_block(const Params& p, int blocks) {
    return p.tickets ? grid_size() + int(take_ticket(p.tickets, blocks - 1)) : blocks;
}

// What the loader works out for a block and the groups read: integer divisions are for one thread.
struct alignas(64) Task {
    Work work;
    KvTiles<BLOCK_N> tiles;
    bool exists;  // false: there is no more work
};

// ---- forward_wgmma/kernel.cu.j2
using QTile = SmemTile<UNIT_ROWS, HEAD_DIM>;  // of one group
using OTile = SmemTile<UNIT_ROWS, HEAD_DIM_V>;
using KTile = SmemTile<BLOCK_N, HEAD_DIM>;
using VTile = SmemTile<BLOCK_N, HEAD_DIM_V>;

// ---- forward_wgmma/products.cuh
// What a warpgroup and its loader do with whole tiles: copies and products.

// Starts the copies of one tile, a panel of 64 columns at a time.
template <typename Tile>
DEVICE void load_tile(Tile tile, const TensorMap& map, u32 barrier, int row, int head, int batch, u64 hint) {
#pragma unroll
    for (int panel = 0; panel < Tile::PANELS; ++panel)
        tma_load(tile.base + panel * Tile::PANEL_BYTES, map, barrier, panel * 64, row, head, batch, hint);
}

// A buffer of a ring, and its descriptor as an operand.
template <typename Tile> struct Buffer : Tile { u64 descriptor; };
// The buffers of a ring. The descriptor of the first one has been through a shuffle, so that the compiler keeps it: it would make
// it anew for each product, in 5 instructions.
template <typename Tile> struct Buffers {
    Tile first;
    u32 low;
    u64 high;
    DEVICE Buffers(Tile tile, u64 descriptor) : first(tile), low(shuffle(u32(descriptor), 0)), high(descriptor >> 32 << 32) {}
    DEVICE Buffer<Tile> operator()(int stage) const {
        return {{first.base + stage * Tile::BYTES}, high | u32(low + stage * (Tile::BYTES >> 4))};
    }
};
// Starts S = Q K^T of this group's 64 rows.
DEVICE void start_qk(float (&s)[TILES_N][4], const QTile& q, const Buffer<KTile>& k) {
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < STEPS_D; ++d)
        wgmma_qk(s, descriptor_advance(descriptor_k_major(q.base + d / 4 * QTile::PANEL_BYTES), d % 4 * 32),
                 descriptor_advance(k.descriptor, d / 4 * KTile::PANEL_BYTES + d % 4 * 32), d > 0);
    wgmma_commit();
}
// Starts O = P V, or O += P V.
DEVICE void start_pv(float (&o)[TILES_V][4], const u32 (&p)[STEPS_N][4], const Buffer<VTile>& v, bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < STEPS_N; ++n) wgmma_pv(o, p[n], descriptor_advance(v.descriptor, n * 16 * 128), n > 0 || accumulate);
    wgmma_commit();
}
DEVICE void pack(u32 (&p)[STEPS_N][4], const float (&s)[TILES_N][4]) {
#pragma unroll
    for (int n = 0; n < STEPS_N; ++n) c_to_a<Element>(p[n], s[2 * n], s[2 * n + 1]);
}

// Zeroes `count` rows of a V tile, whose keys no row of the block sees: what lies there may be NaN, and 0 * NaN is NaN.
DEVICE void zero_rows(const VTile& v, int first, int count, int group) {
    if (count <= 0) return;
#pragma unroll 1
    for (int i = thread_id() % WARPGROUP_SIZE; i < count * TILES_V; i += WARPGROUP_SIZE)
        store_shared_16(v.address(first + i / TILES_V, i % TILES_V), Chunk{});
    fence_async_proxy();
    named_barrier_sync(1 + group, WARPGROUP_SIZE);
}

// ---- forward_wgmma/memory.cuh
// Shared memory: buffers of Q (later of the output), of K, of V, then barriers and tasks.
constexpr int ROWS_BYTES = larger(QTile::BYTES, OTile::BYTES);
constexpr int K_OFFSET = Q_STAGES * NUM_WARPGROUPS * ROWS_BYTES, V_OFFSET = K_OFFSET + NUM_STAGES * KTile::BYTES;
constexpr int BARRIERS_OFFSET = V_OFFSET + NUM_STAGES * VTile::BYTES;
constexpr int TASKS_OFFSET = BARRIERS_OFFSET + round_up(16 * (Q_STAGES + 2 * NUM_STAGES), 64);
static_assert(SMEM_BYTES == TASKS_OFFSET + 64 * Q_STAGES && sizeof(Task) == 64, "shared memory request");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256 && HEAD_DIM_V % 8 == 0 && HEAD_DIM_V <= 256, "shapes of wgmma");

DEVICE QTile q_tile(int stage, int group) { return {smem_base() + (stage * NUM_WARPGROUPS + group) * ROWS_BYTES}; }
DEVICE KTile k_tile(int stage) { return {smem_base() + K_OFFSET + stage * KTile::BYTES}; }
DEVICE VTile v_tile(int stage) { return {smem_base() + V_OFFSET + stage * VTile::BYTES}; }
DEVICE SharedArray<Task> task_at(int stage) { return {smem_base() + TASKS_OFFSET + stage * 64}; }
struct Rings {
    Ring q{smem_base() + BARRIERS_OFFSET}, k{q.full(Q_STAGES)}, v{k.full(NUM_STAGES)};
    DEVICE Rings() {}
};

// ---- forward_wgmma/boxes/varlen.cuh
// Boxes of K and V in packed arrays: one for a tile, at its first key, whatever sequences its rows belong to.
struct KeyBoxes {
    int head;
    DEVICE KeyBoxes(const Params&, const Work& work, const KvTiles<BLOCK_N>&) : head(work.head_kv) {}
    // Starts the copies of a tile. All lanes of the warp call it.
    template <typename Tile> DEVICE void load(const Tile& tile, const TensorMap& map, u32 barrier, int first_key) const {
        if (lane_id() == 0) load_tile(tile, map, barrier, first_key, head, 0, CACHE_EVICT_LAST);
    }
};

// ---- forward_wgmma/loads/packed.cuh
// The loader's part where sequences are packed: one warp that keeps the rings full, item after item. Its lanes look for the work
// together; what only one thread may do, the first one does.
DEVICE void load_blocks(const Params& p, const Rings& rings) {
    Place<Q_STAGES> q_place;
    Place<NUM_STAGES> k_place, v_place;
    Walk walk(p);
    const bool first = lane_id() == 0;
    Work work = walk.find(p, block_id());
    const bool idle = !work.exists();  // the grid is made for the worst lengths
    while (work.exists()) {
        const KvTiles<BLOCK_N> tiles(Mask(p, work), work.query_begin, work.query_end);
        const KeyBoxes boxes(p, work, tiles);
        auto load = [&](const auto& tile, const TensorMap& map, const Ring& ring, auto& place, int first_key) {
            mbarrier_wait(ring.empty(place.stage), place.phase ^ 1);
            if (first) mbarrier_arrive_expect(ring.full(place.stage), tile.BYTES);
            sync_warp();  // no lane falls behind by a round of the ring, where a phase has the same parity again
            boxes.load(tile, map, ring.full(place.stage), first_key);
            place.advance();
        };
        auto load_k = [&](int tile) { load(k_tile(k_place.stage), p.k_map, rings.k, k_place, tiles.first_key(tile)); };
        mbarrier_wait(rings.q.empty(q_place.stage), q_place.phase ^ 1);
        if (first) {
            task_at(q_place.stage).set(0, Task{work, tiles, true});
            mbarrier_arrive_expect(rings.q.full(q_place.stage), NUM_WARPGROUPS * QTile::BYTES);
            for (int group = 0; group < NUM_WARPGROUPS; ++group)
                load_tile(q_tile(q_place.stage, group), p.q_map, rings.q.full(q_place.stage), work.query(group * UNIT_ROWS),
                          work.head_begin, 0, CACHE_EVICT_FIRST);
        }
        q_place.advance();
        load_k(tiles.first());
        for (int tile = tiles.first(); tiles.contains(tile); tile = tiles.next(tile)) {
            if (tiles.contains(tiles.next(tile))) load_k(tiles.next(tile));  // K runs one tile ahead, as its use does
            load(v_tile(v_place.stage), p.v_map, rings.v, v_place, tiles.first_key(tile));
        }
        const int drawn = first ? draw_block(p, walk.items) : 0;
        work = walk.find(p, shuffle(drawn, 0));
    }
    if (!p.tickets && !idle) return;
    mbarrier_wait(rings.q.empty(q_place.stage), q_place.phase ^ 1);
    if (!first) return;
    task_at(q_place.stage).set(0, Task{});
    mbarrier_arrive(rings.q.full(q_place.stage));
}

// ---- forward_wgmma/results/finished.cuh.j2
// The way out of a block of queries that has seen all of its keys.

// Stores a group's output from its tile: by TMA, which goes on reading the tile for a while, unless the block has
// fewer heads than its box.
DEVICE void store_output(const Params& p, const OTile& tile, const float (&o)[1][TILES_V][4], const Work& work, int group) {
    const int warp_row = thread_id() % WARPGROUP_SIZE / WARP_SIZE * 16;
#pragma unroll
    for (int d = 0; d + 1 < TILES_V; d += 2) {
        u32 a[4];
        c_to_a<Element>(a, o[0][d], o[0][d + 1]);
        store_a(OTile{tile.base + warp_row * 128}, lane_id(), 0, d, a);
    }
    if constexpr (TILES_V % 2 == 1) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            store_shared_4(tile.address(warp_row + half * 8 + c_row(), TILES_V - 1) + c_column() * 2,
                           pack2<Element>(o[0][TILES_V - 1][half * 2], o[0][TILES_V - 1][half * 2 + 1]));
    }
    fence_async_proxy();
    named_barrier_sync(1 + group, WARPGROUP_SIZE);
    if (work.exists((group + 1) * UNIT_ROWS - 1)) {
        if (thread_id() % WARPGROUP_SIZE != 0) return;
#pragma unroll
        for (int panel = 0; panel < OTile::PANELS; ++panel)
            tma_store(p.out_map, tile.base + panel * OTile::PANEL_BYTES, panel * 64, work.query(group * UNIT_ROWS),
                      work.head_begin, work.batch);
        tma_store_commit();
    } else {
        for (int i = thread_id() % WARPGROUP_SIZE; i < UNIT_ROWS * TILES_V; i += WARPGROUP_SIZE) {
            const int row = group * UNIT_ROWS + i / TILES_V, chunk = i % TILES_V;
            Element* out = p.out + work.batch * p.out_batch_stride + work.head(row) * p.out_head_stride + work.query(row) * p.out_row_stride;
            if (work.exists(row)) store_global_16(out + chunk * 8, load_shared_16(tile.address(i / TILES_V, chunk)));
        }
        fence_async_proxy();  // these reads come before the copy of the next Q
        named_barrier_sync(1 + group, WARPGROUP_SIZE);
    }
}
// The leader of a group waits here until TMA has read what the group stored last.
DEVICE void wait_until_read() { tma_store_wait_read(); }

// A sink is a key whose value is 0: where there is one, rows begin with it. `row` is this lane's first one.
DEVICE RowStatistics begin_rows(const Params& p, const Work& work, int row) {
    RowStatistics rows(p.scale_log2);
    if (!p.sinks) return rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half == 1 && UNIT_QUERIES % 16 == 0) {  // both rows are of one head
            rows.reference[1] = rows.reference[0], rows.sum[1] = rows.sum[0];
        } else {
            const float sink = sink_logit_log2(p.sinks, p.sink_dtype, min_of(work.head(row + half * 8), p.heads_q - 1));
            rows.reference[half] = max_of(LOWEST, sink);
            rows.sum[half] = c_column() == 0 ? exp2_approx(sink - rows.reference[half]) : 0;
        }
    }
    return rows;
}
// Divides by the sums and stores O and LSE. `tile` takes the place of the group's Q.
DEVICE void end_rows(const Params& p, float (&o)[1][TILES_V][4], const RowStatistics& rows, const Task& task, const OTile& tile,
              int group, int row) {
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] = row_sum(rows.sum[half]);
        const float factor = reciprocal_approx(sum[half] == 0 ? 1 : sum[half]);  // a row that saw no key is 0 already
#pragma unroll
        for (int d = 0; d < TILES_V; ++d) o[0][d][half * 2] *= factor, o[0][d][half * 2 + 1] *= factor;
    }
    if (p.lse && c_column() == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
            if (task.work.exists(row))
                p.lse[(i64(task.work.batch) * p.heads_q + task.work.head(row)) * p.seqlen_q + task.work.query(row)] =
                    (rows.reference_log2(half, p.scale_log2) + log2_approx(sum[half])) * LN2;
    }
    // No barrier: the group's products are done, and a warp's rows of the tile take the place of its own rows of Q.
    store_output(p, tile, o, task.work, group);
}

// ---- forward_wgmma/kernel.cu.j2
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM) forward_wgmma(const __grid_constant__ Params p) {

    const Rings rings;

    if (thread_id() == 0) {
        for (int stage = 0; stage < Q_STAGES + 2 * NUM_STAGES; ++stage)  // the three rings follow each other
            mbarrier_init(rings.q.full(stage), 1), mbarrier_init(rings.q.empty(stage), NUM_WARPGROUPS);
        mbarrier_init_fence();
    }
    sync_block();

    if (warpgroup_id() == 0) {
        registers_release<LOADER_REGISTERS>();
        if (thread_id() < WARP_SIZE) load_blocks(p, rings);
        return;
    }

    registers_claim<REGISTERS>();
    const int group = warpgroup_id() - 1;
    const int warp_row = thread_id() / WARP_SIZE * 16 - UNIT_ROWS;
    const bool leader = thread_id() % WARPGROUP_SIZE == 0;
    // Barriers 1.. let the warps of a group meet; those after them let groups take turns.
    const int my_turn = 1 + NUM_WARPGROUPS + group, next_turn = 1 + NUM_WARPGROUPS + (group + 1) % NUM_WARPGROUPS;
    auto take_turn = [&] { if constexpr (PING_PONG) named_barrier_sync(my_turn, 2 * WARPGROUP_SIZE); };
    auto pass_turn = [&] { if constexpr (PING_PONG) named_barrier_arrive(next_turn, 2 * WARPGROUP_SIZE); };
    if (group == NUM_WARPGROUPS - 1) pass_turn();

    Place<Q_STAGES> q_place;
    Place<NUM_STAGES> k_place, v_place;
    // The buffer of Q from which the last block's output leaves. Where the next block has another one, its first product
    // starts before the group waits for TMA.
    constexpr bool RELEASE_LATE = Q_STAGES > 1;
    int leaving = -1;
    auto release_q = [&] {
        if (leader && leaving >= 0) wait_until_read(), mbarrier_arrive(rings.q.empty(leaving));
    };

    const Buffers<KTile> k_tile(::k_tile(0), descriptor_k_major(::k_tile(0).base));
    const Buffers<VTile> v_tile(::v_tile(0), descriptor_mn_major(::v_tile(0).base, VTile::PANEL_BYTES));
    do {
        mbarrier_wait(rings.q.full(q_place.stage), q_place.phase);
        const Task task = task_at(q_place.stage).get(0);
        if (!task.exists) break;
        const Work& work = task.work;
        const Mask mask(p, work);
        const KvTiles<BLOCK_N>& tiles = task.tiles;

        float o[1][TILES_V][4];
        RowStatistics rows(p.scale_log2);
        if (!tiles.empty()) {
            float s[1][TILES_N][4];
            u32 probabilities[STEPS_N][4];
            int tile = tiles.first();
            auto start_pv = [&](auto& o, const auto& p, const auto& v) { ::start_pv(o, p, v, tile != tiles.first()); };
            auto release = [&](u32 barrier) { if (leader) mbarrier_arrive(barrier); };
            auto wait_k = [&] { mbarrier_wait(rings.k.full(k_place.stage), k_place.phase); };
            auto release_k = [&] { release(rings.k.empty(k_place.stage)); k_place.advance(); };
            auto wait_v = [&](int of_tile) {
                mbarrier_wait(rings.v.full(v_place.stage), v_place.phase);
                const VTile& v = v_tile(v_place.stage);
                const int before = tiles.key_begin - tiles.first_key(of_tile);
                if (!tiles.contains(tiles.next(of_tile))) zero_rows(v, 0, before, group);  // where there are more tiles, all are full
            };
            auto release_v = [&] { release(rings.v.empty(v_place.stage)); v_place.advance(); };
            auto softmax = [&](int of_tile) {
                mask_scores(s, mask, work, warp_row, tiles, of_tile);
                const Rescale<1> rescale = move_reference<RESCALE_SLACK, INTEGER_MAX>(s, rows, p.scale_log2);
                exponentiate(s, rows);
                return rescale;
            };

            const QTile q = q_tile(q_place.stage, group);
            wait_k();
            start_qk(s[0], q, k_tile(k_place.stage));  // out of turn: another group is at the end of its last block
            if constexpr (RELEASE_LATE) release_q();
            rows = begin_rows(p, work, warp_row + c_row());  // behind the product
            wgmma_wait<0>(s[0]);
            release_k();
            softmax(tile);
            pack(probabilities, s[0]);

            // Each step multiplies this tile's P V and, with OVERLAP before it, the next tile's Q K^T. There is one copy of it,
            // for tiles with and without a mask: three took up to 10 % longer, as they do not fit the instruction cache.
            while (tiles.contains(tiles.next(tile))) {
                const int following = tiles.next(tile);
                if constexpr (OVERLAP) {
                    wait_k();
                    take_turn();
                    start_qk(s[0], q, k_tile(k_place.stage));
                    wait_v(tile);
                    start_pv(o[0], probabilities, v_tile(v_place.stage));
                    pass_turn();
                    wgmma_wait<1>(s[0]);
                    release_k();
                    const Rescale<1> rescale = softmax(following);
                    wgmma_wait<0>(o[0]);
                    release_v();
                    rescale_output(o, rescale);
                } else {
                    wait_v(tile);
                    take_turn();
                    start_pv(o[0], probabilities, v_tile(v_place.stage));
                    wait_k();
                    start_qk(s[0], q, k_tile(k_place.stage));
                    pass_turn();
                    wgmma_wait<0>(s[0], o[0]);
                    release_v();
                    release_k();
                    rescale_output(o, softmax(following));
                }
                pack(probabilities, s[0]);
                tile = following;
            }
            wait_v(tile);
            take_turn();
            start_pv(o[0], probabilities, v_tile(v_place.stage));
            pass_turn();
            wgmma_wait<0>(o[0]);
            release_v();
        } else {  // zeros go the same way
            if constexpr (RELEASE_LATE) release_q();
        }
        end_rows(p, o, rows, task, OTile{q_tile(q_place.stage, group).base}, group, warp_row + c_row());
        leaving = q_place.stage;
        if constexpr (!RELEASE_LATE) release_q();
        q_place.advance();
    } while (p.tickets);
    if (leader) wait_until_read();  // shared memory must outlive the copy
}

