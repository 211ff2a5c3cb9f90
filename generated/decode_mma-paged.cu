// decode_mma for decode-bf16-d256-window-softcap-paged; written by `autotune build` from templates/ and tuning_db/
//
// shown      the winner of decode-bf16-b8-h16x8-q1-k8192-d256-left4095-softcap50-page16 on nvidia-h200; <gpu>.md has
//            others
// config     block_m=16 block_heads_kv=1 block_n=16 num_warps=4 num_stages=2 q_in_registers=false l2_prefetch=128
//            min_blocks_per_sm=1 dependent_launch=true cluster_merges=false speculative_start=true smem_bytes=139264
// launch     pieces=132 last_block_merges=true prefetch_tiles=1 trigger_tiles=0
// resources  decode_mma: 245 registers, 0 bytes spilled, 128 threads, 139264 bytes of shared memory
// resources  decode_combine: 92 registers, 0 bytes spilled
// compiler   NVRTC 13.0.88, -arch=sm_90; options -std=c++17 -default-device -ftz=false -fmad=true --ptxas-options=-v
// again      autotune source decode-bf16-b8-h16x8-q1-k8192-d256-left4095-softcap50-page16 --gpu nvidia-h200

// Attention of a few queries over a long cache, on tensor cores with mma.sync, for sm_80 and later. Bound by memory.
//
// The queries of all heads of a group are the rows of one tile, so K and V are read once for all of them. A block may take
// two key/value heads side by side as one of twice the head dim, each with half of the rows: what it reads of a key is then a
// whole line of L2 where one head's is half of one (8 bits, head dim 64). The keys of a block's piece are dealt out to its
// warps tile by tile. Each warp streams its own tiles through its own ring of NUM_STAGES buffers, K and V apart, by cp.async:
// what a warp loads only it reads, so the loop has no barrier, and the ring is in flight all the time but for the tile at work.
// Warps are merged through shared memory at the end, splits through the workspace: by the last block to arrive if there are
// tickets, else by decode_combine.

// Contents, lib: base; lib/ptx: math fp16 fragment mma ldmatrix copy access split ticket dependent; lib: constants
// params; lib/scores: softcap; lib/masks: window; decode_mma: pieces; decode_mma/piece: neighbours; lib/tile: smem;
// decode_mma: warp_loader; decode_mma/kv: paged; decode_mma/products: same; decode_mma/prefetch: paged; decode_mma:
// prefetch; decode_mma/start: guess; decode_mma: work; lib/softmax: rescale online; attention: mask_scores;
// lib/softmax: sink; attention: partial; decode_mma: merge memory shared_queries warp_results combine kernel

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

// ---- lib/ptx/split.cuh
// What blocks that share a result need: partial results in fp32, and a ticket that tells the last of them.

struct Floats4 { float x[4]; };

DEVICE void store_shared_floats(u32 smem_address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(smem_address), "f"(first), "f"(second) : "memory");
}
DEVICE Floats4 load_shared_floats(u32 smem_address) {
    Floats4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x[0]), "=f"(v.x[1]), "=f"(v.x[2]), "=f"(v.x[3]) : "r"(smem_address) : "memory");
    return v;
}
DEVICE void store_global_floats(float* global, const Floats4& v) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "l"(__cvta_generic_to_global(global)), "f"(v.x[0]), "f"(v.x[1]), "f"(v.x[2]), "f"(v.x[3]) : "memory");
}
DEVICE void store_global_floats(float* global, float first, float second) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" :: "l"(__cvta_generic_to_global(global)), "f"(first), "f"(second) : "memory");
}
// Past L1, which does not see what other SMs write.
DEVICE Floats4 load_global_floats(const float* global) {
    Floats4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x[0]), "=f"(v.x[1]), "=f"(v.x[2]), "=f"(v.x[3]) : "l"(__cvta_generic_to_global(global)) : "memory");
    return v;
}
DEVICE void load_global_floats(const float* global, float& first, float& second) {
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
                 : "=f"(first), "=f"(second) : "l"(__cvta_generic_to_global(global)) : "memory");
}

DEVICE u32 load_global_4(const void* global) {
    u32 value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(global)) : "memory");
    return value;
}

// Orders this thread's accesses to global memory before its later ones, for every thread of the GPU.
DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Starts an asynchronous copy of 16 bytes that will not be needed again, and has L2 fetch the PREFETCH bytes around them. They
// are the first that L2 gives up, so that what is prefetched for the next kernel stays. Where `valid` is false nothing is read
// and zeros are written. ptxas makes an instruction of it that an H200 does not know where `smem_address` is the sum of a uniform
// and another register; after an exclusive or, as in swizzled tiles, it is none. Such a binary is refused (compile.flaw).
template <int PREFETCH> DEVICE void stream_async_16(u32 smem_address, const void* global, bool valid) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if constexpr (PREFETCH == 256)
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;"
                     :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0), "l"(policy) : "memory");
    else
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                     :: "r"(smem_address), "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0), "l"(policy) : "memory");
}

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

// ---- lib/ptx/dependent.cuh
// Programmatic dependent launch (sm_90): a kernel may be put in place while those before it in the stream still run.

// Waits until the kernels before this one have ended and all that they wrote is visible here: nothing that they touch is
// touched before. Every block waits before it ends, so that this kernel's end means the end of those before it too.
DEVICE void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The same, when these have been computed: ptxas would wait first, and put off until then whatever does not depend on it.
DEVICE void wait_for_dependencies(const void* first, const void* second, int third) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, %1;\nsetp.ne.xor.s32 p, %2, 0, p;\n"
                 "@p griddepcontrol.wait;\n@!p griddepcontrol.wait;\n}" :: "l"(first), "l"(second), "r"(third) : "memory");
}

// Has L2 fetch so many bytes, which is right before wait_for_dependencies too: nothing comes to registers or to L1, and what
// kernels before this one still write lands in L2 as well. The address and `bytes` are multiples of 16.
DEVICE void prefetch_l2(const void* global, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(__cvta_generic_to_global(global)), "r"(bytes) : "memory");
}
// What kernels before this one may still write: a guess of what will stand there. Past L1, which would give the old value to
// later loads too.
DEVICE int load_guess(const int* global) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(global)) : "memory");
    return value;
}

// Says that the next kernel in the stream may be put in place; it is once all blocks have said so or ended.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// ---- decode_mma/kernel.cu.j2
using Element = bf16;
using KvElement = bf16;

// ---- lib/constants.cuh.j2
constexpr int HEAD_DIM = 256;
constexpr int HEAD_DIM_V = 256;
constexpr int BLOCK_M = 16;
constexpr int BLOCK_HEADS_KV = 1;
constexpr int BLOCK_N = 16;
constexpr int NUM_WARPS = 4;
constexpr int NUM_STAGES = 2;
constexpr bool Q_IN_REGISTERS = false;
constexpr int L2_PREFETCH = 128;
constexpr int MIN_BLOCKS_PER_SM = 1;
constexpr int SMEM_BYTES = 139264;

// ---- decode_mma/kernel.cu.j2
constexpr int THREADS = NUM_WARPS * WARP_SIZE;
constexpr int TILES_M = BLOCK_M / 16, TILES_N = BLOCK_N / 8;
constexpr int STEPS_OF_HEAD = ceil_div(HEAD_DIM, 16), TILES_OF_HEAD = round_up(HEAD_DIM_V, 16) / 8;
constexpr int STEPS_D = BLOCK_HEADS_KV * STEPS_OF_HEAD, TILES_V = BLOCK_HEADS_KV * TILES_OF_HEAD;
constexpr int KV_BYTES = sizeof(KvElement);  // columns of K and V tiles are of 16 bits
constexpr int K_COLUMNS = BLOCK_HEADS_KV * HEAD_DIM * KV_BYTES / 2, V_COLUMNS = BLOCK_HEADS_KV * HEAD_DIM_V * KV_BYTES / 2;
constexpr int RESCALE_SLACK = 8;
constexpr int COMBINE_THREADS = 128, COMBINE_BYTES = 96 * 1024;

// ---- lib/params.cuh.j2
// Everything that changes from call to call. Strides are in elements.
struct Params {
    const Element* q;  // (batch, seqlen_q, heads_q, head_dim), or packed, (queries, heads_q, head_dim)
    const KvElement* k;  // (batch, seqlen_k, heads_kv, head_dim), or (pages, page_size, heads_kv, head_dim)
    const KvElement* v;  // (batch, seqlen_k, heads_kv, head_dim_v), or (pages, page_size, heads_kv, head_dim_v)
    Element* out;  // (batch, seqlen_q, heads_q, head_dim_v), or packed as q is
    float* lse;  // (batch, heads_q, seqlen_q), or (heads_q, queries), or null
    const void* sinks;  // (heads_q), or null
    const int* lengths;  // (batch): keys of each sequence, or null: all have seqlen_k
    const int* query_starts;  // (batch + 1): where queries of a sequence begin among packed ones, or null: none are
    const int* page_table;  // (batch, pages of a sequence): numbers of pages; null unless paged
    const float* k_scales;  // of an 8-bit cache, one or (heads_kv), or null
    const float* v_scales;
    float* partial_o;  // (slots, rows, head_dim_v): what pieces leave behind, if any sequence is split
    float* partial_statistics;  // (slots, rows, 2): maximum and sum
    u32* tickets;  // one for each sequence, key/value head and tile of rows, 0 between launches; null: merged later
    long long q_batch_stride;
    long long q_row_stride;
    long long q_head_stride;
    long long k_batch_stride;  // of pages, in a paged cache
    long long k_row_stride;
    long long k_head_stride;
    long long v_batch_stride;
    long long v_row_stride;
    long long v_head_stride;
    long long out_batch_stride;
    long long out_row_stride;
    long long out_head_stride;
    long long lse_batch_stride;
    long long lse_head_stride;
    long long page_table_stride;  // from one sequence to the next
    int batch;
    int heads_q;
    int heads_kv;
    int group;  // query heads per key/value head
    int seqlen_q;  // queries of a sequence, the most where query_starts tells
    int seqlen_k;  // the most keys that a sequence can have
    int window_left;
    int window_right;
    int sink_dtype;
    float scale_log2;  // softmax scale * log2(e), above 0
    int page_size;
    unsigned page_magic;  // 2^(31 + page_shift) / page_size, rounded up
    int page_shift;
    unsigned group_magic;  // the same of group
    int group_shift;
    int num_splits;  // of each sequence, as far as its length allows; 0: by its length. Above 0 if nothing tells it
    int pieces;  // about how many blocks share the work
    int k_scale_stride;  // 0 or 1
    int v_scale_stride;
    float v_scale;  // of an 8-bit cache, beside v_scales
    float softcap_log2;  // soft cap * log2(e)
    int prefetch_tiles;  // tiles of each warp that are prefetched, 0: none
    int trigger_tiles;  // tiles that each warp has left when the next kernel may come, 0: none
    int pages;  // of the cache: numbers of pages below it are taken for right
};

// ---- lib/scores/softcap.cuh
// Soft cap: a score s becomes cap * tanh(s * scale / cap), before the mask. What is left here is the tanh; the softmax's own
// factor is then cap * log2(e).
// 1 - 2 / (e^2x + 1) has an absolute error of 2^-23, where tanh.approx has 2^-11; near 0, where that is too much for a large
// cap, the series takes its place.
DEVICE float tanh_approx(float x) {
    if (x * x < 1e-3f) return x * (1.0f - x * x * (1.0f / 3));
    return 1.0f - 2.0f * reciprocal_approx(exp2_approx(2.0f * LOG2E * x) + 1.0f);
}
template <int TILES_M, int TILES_N, int ELEMENTS>
DEVICE void cap_scores(float (&s)[TILES_M][TILES_N][ELEMENTS], float softcap_scale) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) s[m][n][i] = tanh_approx(s[m][n][i] * softcap_scale);
}

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

// ---- decode_mma/pieces.cuh
// Which part of which sequence a block works on, cut on the device from the lengths that stand there.
//
// The rows of one key/value head are packed: row r is query r / group of head r % group in the group, so that all of them
// share K and V; a block takes HEAD_ROWS of them, of each of its BLOCK_HEADS_KV heads. The tiles of BLOCK_N keys that a
// sequence's queries see are cut into splits of nearly equal size, about p.pieces over all sequences and heads, in proportion
// to their lengths. Neighbouring blocks work on neighbouring heads of the same keys, because a cache keeps heads side by side.
// Pieces of sequences that are split have slots in the workspace, in order: about p.pieces, however many sequences there are.
//
// Where p.query_starts says how many queries each sequence has, they stand packed, one sequence after the other. A sequence
// without queries has no pieces, and neither has one of more than p.seqlen_q: that is another kernel's.
constexpr int MAX_SPLITS = 4096 / BLOCK_M, HEAD_ROWS = BLOCK_M / BLOCK_HEADS_KV;

// n / d for n >= 0 and d > 0 with a quotient below 2^22: a third of the instructions of a division.
DEVICE int quotient(int n, int d) {
    const int near = int(float(n) * reciprocal_approx(float(d))), rest = n - near * d;
    return near + int(rest >= d) - int(rest < 0);
}
// n / d for 0 <= n < 2^31, given 2^(31 + shift) / d rounded up.
DEVICE int divide(int n, u32 magic, int shift) { return int(u64(u32(n)) * magic >> (31 + shift)); }

struct Queries { int begin, count; };  // of a sequence: the first one's row among those that are packed, and how many

// The sequence of a piece, and how it is cut.
struct Cut {
    int batch, length;
    Queries queries;
    int splits;
    int first_piece, first_slot;  // of the sequence
};

template <typename T> DEVICE T total_in_warp(T x) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

DEVICE int row_tiles(const Params& p, int queries) { return ceil_div(p.group * queries, HEAD_ROWS); }
// Pieces of a sequence of so many queries that is not split.
DEVICE int unsplit_pieces(const Params& p, int queries) { return ceil_div(p.heads_kv, BLOCK_HEADS_KV) * row_tiles(p, queries); }

// How lengths and query_starts are read.
struct Plainly { DEVICE static int read(const int* place) { return *place; } };

template <typename How> DEVICE int length_of(const Params& p, int batch) {
    return p.lengths ? max_of(min_of(How::read(p.lengths + batch), p.seqlen_k), 0) : p.seqlen_k;
}
template <typename How> DEVICE Queries queries_of(const Params& p, int batch) {
    if (!p.query_starts) return {0, p.seqlen_q};
    const int begin = How::read(p.query_starts + batch), count = int(u32(How::read(p.query_starts + batch + 1)) - u32(begin));
    return {begin, count > p.seqlen_q ? 0 : max_of(count, 0)};
}
// The tiles of a sequence's keys that some query sees, first to last. They begin at multiples of BLOCK_N, so that none lies
// across the border of two pages unless pages are smaller than tiles.
struct Tiles {
    int key_begin, key_end;     // keys that some query sees; keys outside are loaded as zeros
    int origin, count;          // the first tile's first key
    int left_edge, right_edge;  // tiles before left_edge hold keys that a query is past, tiles from right_edge on keys to come

    DEVICE Tiles(const Mask& mask, int queries) : key_begin(mask.key_begin(0)) {
        key_end = max_of(mask.key_end(queries), key_begin);
        origin = key_begin / BLOCK_N * BLOCK_N;
        count = key_end > key_begin ? ceil_div(key_end - origin, BLOCK_N) : 0;
        left_edge = ceil_div(max_of(mask.shared_begin(queries) - origin, 0), BLOCK_N);
        right_edge = max_of(mask.shared_end(0) - origin, 0) / BLOCK_N;
    }
    DEVICE bool needs_mask(int tile) const { return tile < left_edge || tile >= right_edge; }
    DEVICE int first_key(int tile) const { return origin + tile * BLOCK_N; }
    DEVICE bool has_key(int key) const { return key_begin <= key && key < key_end; }
};
DEVICE int tile_count(const Params& p, int queries, int length) { return Tiles(Mask(p, queries, length), queries).count; }
// Tiles of a piece: `work`, those of all sequences, heads and tiles of rows, dealt out to p.pieces, but at least one for each
// warp. Rounding here moves cuts, never the result.
DEVICE float tile_share(const Params& p, i64 work) {
    return max_of(float(NUM_WARPS), float(work) * (reciprocal_approx(float(p.pieces)) * (1 - 1e-6f)));
}
DEVICE int split_count(const Params& p, int tiles, float share) {
    const int wanted = p.num_splits > 0 ? min_of(p.num_splits, tiles) : int(float(tiles) * reciprocal_approx(share));
    return max_of(1, min_of(wanted, MAX_SPLITS));
}

// The first sequence for which passed(batch, pieces of all sequences up to and with it) holds; batch is p.batch if there is
// none. All lanes of a warp call it. length_at(batch) is a sequence's length.
template <typename How, typename Length, typename Passed> DEVICE Cut find_cut(const Params& p, Length length_at, Passed passed) {
    i64 work = 0;
#pragma unroll 1
    for (int batch = lane_id(); batch < p.batch; batch += WARP_SIZE) {
        const int queries = queries_of<How>(p, batch).count;
        work += i64(tile_count(p, queries, length_at(batch))) * unsplit_pieces(p, queries);
    }
    const float share = tile_share(p, total_in_warp(work));
    int before = 0, slots_before = 0;
#pragma unroll 1
    for (int batch = lane_id(); batch - lane_id() < p.batch; batch += WARP_SIZE) {
        const int length = batch < p.batch ? length_at(batch) : 0;
        const Queries queries = batch < p.batch ? queries_of<How>(p, batch) : Queries{0, 0};
        const int splits = split_count(p, tile_count(p, queries.count, length), share);
        const int pieces = splits * unsplit_pieces(p, queries.count), slots = splits > 1 ? pieces : 0;
        int through = before + pieces;
#pragma unroll
        for (int distance = 1; distance < WARP_SIZE; distance *= 2) {
            const int below = shuffle(through, max_of(lane_id() - distance, 0));
            if (lane_id() >= distance) through += below - before;
        }
        const int lane = total_in_warp(int(!passed(batch, through)));  // it holds from one lane on
        if (lane < WARP_SIZE)
            return {shuffle(batch, lane), shuffle(length, lane), {shuffle(queries.begin, lane), shuffle(queries.count, lane)},
                    shuffle(splits, lane), shuffle(through - pieces, lane),
                    slots_before + total_in_warp(lane_id() < lane ? slots : 0)};
        before = shuffle(through, WARP_SIZE - 1);
        slots_before += total_in_warp(slots);
    }
    return {p.batch, 0, {0, 0}, 1, before, slots_before};
}
template <typename How, typename Passed> DEVICE Cut find_cut(const Params& p, Passed passed) {
    return find_cut<How>(p, [&](int batch) { return length_of<How>(p, batch); }, passed);
}

// The cut of a piece, or of a sequence. Where all have p.seqlen_k keys and p.seqlen_q queries the host has counted the splits.
DEVICE bool uniform(const Params& p) { return !p.lengths && !p.query_starts; }
DEVICE Cut uniform_cut(const Params& p, int batch) {
    const int first = batch * p.num_splits * unsplit_pieces(p, p.seqlen_q);
    return {min_of(batch, p.batch), p.seqlen_k, {0, p.seqlen_q}, p.num_splits, first, first};
}
template <typename How = Plainly> DEVICE Cut cut_of_piece(const Params& p, int piece) {
    return uniform(p) ? uniform_cut(p, quotient(piece, p.num_splits * unsplit_pieces(p, p.seqlen_q)))
                      : find_cut<How>(p, [&](int, int through) { return piece < through; });
}
DEVICE Cut cut_of_batch(const Params& p, int wanted) {
    return uniform(p) ? uniform_cut(p, wanted) : find_cut<Plainly>(p, [&](int batch, int) { return batch >= wanted; });
}

// The packed rows of a block: those of one sequence, BLOCK_HEADS_KV key/value heads and tile of rows. Row r is of head
// head_kv + r / HEAD_ROWS.
struct Rows {
    int batch, head_kv;
    int begin;         // the first packed row of each head
    int count, each;   // rows [0, count), of which each head has the first `each` of HEAD_ROWS
    int first_query;   // of the sequence, where queries of all sequences are packed
    int unsplit;       // number of (heads, row tile) within the sequence

    DEVICE Rows(const Params& p, const Cut& cut, int number)
        : batch(cut.batch), first_query(cut.queries.begin), unsplit(number) {
        const int tiles = row_tiles(p, cut.queries.count), heads = quotient(number, tiles);
        head_kv = heads * BLOCK_HEADS_KV;
        begin = (number - heads * tiles) * HEAD_ROWS;
        each = min_of(HEAD_ROWS, p.group * cut.queries.count - begin);
        count = (min_of(BLOCK_HEADS_KV, p.heads_kv - head_kv) - 1) * HEAD_ROWS + each;
    }
    DEVICE bool exists(int row) const { return row < count && (BLOCK_HEADS_KV == 1 || row % HEAD_ROWS < each); }
    DEVICE int nearest(int row) const {  // that exists: the row itself or one before it
        if (BLOCK_HEADS_KV == 1) return min_of(row, each - 1);
        const int within = min_of(row % HEAD_ROWS, each - 1);
        return min_of(row - row % HEAD_ROWS, count - each) + within;
    }
    DEVICE int kv_head(int row) const { return head_kv + row / HEAD_ROWS; }
    DEVICE int query(const Params& p, int row) const { return divide(begin + row % HEAD_ROWS, p.group_magic, p.group_shift); }
    DEVICE int head(const Params& p, int row) const {
        return kv_head(row) * p.group + begin + row % HEAD_ROWS - query(p, row) * p.group;
    }
    // Query `row`.
    DEVICE const Element* pointer(const Params& p, int row) const {
        return p.q + batch * p.q_batch_stride + head(p, row) * p.q_head_stride + (first_query + query(p, row)) * p.q_row_stride;
    }
};
// Which of the block's heads the rows of a C or A fragment are, whose upper or lower half of 8 rows is meant.
DEVICE constexpr int head_of(int m, int half) { return (m * 16 + half * 8) / HEAD_ROWS; }

// ---- decode_mma/piece/neighbours.cuh
// A block's part of the work: split `split` of `cut.splits`, for the rows `rows`. Neighbouring blocks
// work on neighbouring heads of the same keys.
struct Piece {
    Cut cut;
    int split;
    Rows rows;
    int tile_begin, tile_end;  // counted from the sequence's first tile

    DEVICE Piece(const Params& p, const Cut& sequence, int within)
        : cut(sequence), split(quotient(within, unsplit_pieces(p, sequence.queries.count))),
          rows(p, sequence, within - split * unsplit_pieces(p, sequence.queries.count)) {
        const int tiles = tile_count(p, cut.queries.count, cut.length), each = quotient(tiles, cut.splits);
        const int longer = tiles - each * cut.splits;  // this many splits have a tile more
        tile_begin = split * each + min_of(split, longer);
        tile_end = tile_begin + each + int(split < longer);
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

// ---- decode_mma/warp_loader.cuh
// From global memory to a warp's own tiles in shared memory by cp.async.

// Copies tiles of ROWS x COLUMNS 16-bit columns with the 32 lanes of a warp, in passes: neighbouring lanes copy neighbouring chunks of 16
// bytes, and a lane's chunk is the same in all passes.
template <int ROWS, int COLUMNS, int PREFETCH> struct WarpLoader {
    static constexpr int CHUNKS = round_up(COLUMNS, 16) / 8;  // the last one is zeros where COLUMNS is an odd multiple of 8
    static constexpr int CHUNKS_OF_HEAD = CHUNKS / BLOCK_HEADS_KV;
    static constexpr int ROWS_PER_PASS = WARP_SIZE / CHUNKS;
    static constexpr int PASSES = ceil_div(ROWS, ROWS_PER_PASS);

    DEVICE static int lane_row() { return lane_id() / CHUNKS; }  // in the first pass
    // This lane's chunk of a row of the first of the block's heads, of which `heads` exist; others repeat the last one.
    DEVICE static i64 lane_element(i64 head_stride, int heads) {
        const int chunk = lane_id() % CHUNKS;
        return min_of(chunk / CHUNKS_OF_HEAD, heads - 1) * head_stride + chunk % CHUNKS_OF_HEAD * (16 / KV_BYTES);
    }

    // Starts copying rows [begin, end) of a tile and makes the others zeros. `source` is this lane's chunk of its row in the
    // first pass, `pass_stride` leads to that of the next pass.
    DEVICE static void start(const SmemTile<ROWS, COLUMNS>& tile, const KvElement* source, i64 pass_stride, int begin, int end) {
        gather(tile, begin, end, [&](int) {
            const KvElement* here = source;
            source += pass_stride;
            return here;
        });
    }
    // The same from wherever the rows are: row_pointer(r) is this lane's chunk of row r. All lanes call it, in every pass.
    template <typename RowPointer>
    DEVICE static void gather(const SmemTile<ROWS, COLUMNS>& tile, int begin, int end, RowPointer row_pointer) {
        const int row = lane_row(), chunk = lane_id() % CHUNKS;
        const bool column_exists = COLUMNS % 16 == 0 || chunk * 8 < COLUMNS;
        const bool lane_copies = WARP_SIZE % CHUNKS == 0 || row < ROWS_PER_PASS;
        const u32 first_address = tile.address(row, chunk);
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int later = pass * ROWS_PER_PASS;
            const bool exists = later < end - row && (!Mask::HAS_ROW_BEGIN || later >= begin - row);
            // Rows of a pass and passes share no bits if there are 2^n rows a pass, so their swizzles add up by exclusive or.
            const u32 address = ROWS_PER_PASS & (ROWS_PER_PASS - 1) ? tile.address(row + later, chunk)
                                                                     : (first_address ^ (later % 8 * 16)) + later * 128;
            const KvElement* source = row_pointer(row + later);
            if (lane_copies && (ROWS % ROWS_PER_PASS == 0 || row + later < ROWS))
                stream_async_16<PREFETCH>(address, source, exists && column_exists);
        }
    }
};

// ---- decode_mma/kv/paged.cuh
// Keys and values in pages: key j of a sequence is slot j % page_size of the page that its table names at j / page_size.
// Table entries of keys that do not exist are not read.
struct KvRows {
    using KLoader = WarpLoader<BLOCK_N, K_COLUMNS, L2_PREFETCH>;
    using VLoader = WarpLoader<BLOCK_N, V_COLUMNS, L2_PREFETCH>;
    const KvElement *k, *v;  // this lane's chunks of slot 0 of page 0
    const int* table;
    i64 k_page_stride, v_page_stride, k_stride, v_stride;
    int begin, end;  // keys that exist
    int page_size, page_shift;
    u32 page_magic;

    DEVICE KvRows(const Params& p, const Rows& rows, int first, int last, int)
        : k(p.k + rows.head_kv * p.k_head_stride + KLoader::lane_element(p.k_head_stride, p.heads_kv - rows.head_kv)),
          v(p.v + rows.head_kv * p.v_head_stride + VLoader::lane_element(p.v_head_stride, p.heads_kv - rows.head_kv)),
          table(p.page_table + rows.batch * p.page_table_stride), k_page_stride(p.k_batch_stride), v_page_stride(p.v_batch_stride),
          k_stride(p.k_row_stride), v_stride(p.v_row_stride), begin(first), end(last), page_size(p.page_size),
          page_shift(p.page_shift), page_magic(p.page_magic) {}

    static constexpr int ENTRIES = ceil_div(BLOCK_N, WARP_SIZE);
    // Lane l holds page and slot of rows l, l + 32, ... of a tile.
    struct Place { int page[ENTRIES], slot[ENTRIES]; };

    DEVICE Place find(int first_key) const {
        return find(first_key, [](const int* entry) { return *entry; });
    }
    // The same with the table read by read(place of an entry).
    template <typename Read> DEVICE Place find(int first_key, Read read) const {
        Place place;
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) {
            const int key = first_key + lane_id() + i * WARP_SIZE;
            const int index = divide(key, page_magic, page_shift);
            place.slot[i] = key - index * page_size;
            place.page[i] = begin <= key && key < end ? read(table + index) : 0;
        }
        return place;
    }
    // Starts copying a warp's next tile, which begins at `first_key`.
    template <typename Tile> DEVICE void start_k(const Tile& tile, int first_key, const Place& at) const {
        start<KLoader>(tile, k, k_page_stride, k_stride, first_key, at);
    }
    template <typename Tile> DEVICE void start_v(const Tile& tile, int first_key, const Place& at) const {
        start<VLoader>(tile, v, v_page_stride, v_stride, first_key, at);
    }
    template <typename Loader, typename Tile>
    DEVICE void start(const Tile& tile, const KvElement* matrix, i64 page_stride, i64 stride, int first_key, const Place& at) const {
        i64 offset[ENTRIES];
#pragma unroll
        for (int i = 0; i < ENTRIES; ++i) offset[i] = at.page[i] * page_stride + at.slot[i] * stride;
        Loader::gather(tile, begin - first_key, end - first_key, [&](int row) {
            i64 here = shuffle(offset[0], row);
#pragma unroll
            for (int i = 1; i < ENTRIES; ++i) {
                const i64 other = shuffle(offset[i], row);
                if (row >= i * WARP_SIZE) here = other;
            }
            return matrix + here;
        });
    }
};

// ---- decode_mma/products/same.cuh
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

// ---- decode_mma/prefetch/paged.cuh
// Where a key stands that is prefetched: in a page of the cache, in the right one if its number does not change any more.
struct KeyPlace { i64 batch, row; };  // page and slot
DEVICE KeyPlace guess_place(const Params& p, int batch, int key) {
    const int index = divide(key, p.page_magic, p.page_shift);
    const int page = load_guess(p.page_table + batch * p.page_table_stride + index);
    return {max_of(0, min_of(page, p.pages - 1)), key - index * p.page_size};
}

// ---- decode_mma/prefetch.cuh
// While the kernel before this one ends and HBM is idle, a block has L2 fetch the keys and values that its warps load first. Lengths,
// query_starts and numbers of pages may still be written by then, so that the piece is a guess: it lies in the cache whatever
// stands there, and nothing but L2 gets to know of it.
struct Guessing { DEVICE static int read(const int* place) { return load_guess(place); } };

// p.prefetch_tiles tiles of each warp of a piece, one key a thread.
DEVICE void prefetch_piece(const Params& p, const Piece& piece, const Tiles& tiles) {
    const Cut& cut = piece.cut;
    const KvElement *k = p.k + piece.rows.head_kv * p.k_head_stride, *v = p.v + piece.rows.head_kv * p.v_head_stride;
    const int tile_end = min_of(piece.tile_begin + p.prefetch_tiles * NUM_WARPS, piece.tile_end);
    const int begin = max_of(tiles.first_key(piece.tile_begin), tiles.key_begin);
    const int end = min_of(tiles.first_key(tile_end), tiles.key_end);
    constexpr int AT_ONCE = 4;  // so many places are asked for before the first is needed
#pragma unroll 1
    for (int key = begin + thread_id(); key < end; key += AT_ONCE * THREADS) {
        KeyPlace place[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) place[i] = guess_place(p, cut.batch, min_of(key + i * THREADS, end - 1));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (key + i * THREADS >= end) break;
#pragma unroll
            for (int h = 0; h < BLOCK_HEADS_KV; ++h) {
                if (h > 0 && piece.rows.head_kv + h >= p.heads_kv) break;
                prefetch_l2(k + place[i].batch * p.k_batch_stride + place[i].row * p.k_row_stride + h * p.k_head_stride,
                            HEAD_DIM * KV_BYTES);
                prefetch_l2(v + place[i].batch * p.v_batch_stride + place[i].row * p.v_row_stride + h * p.v_head_stride,
                            HEAD_DIM_V * KV_BYTES);
            }
        }
    }
}

// ---- decode_mma/start/guess.cuh
// Where a block over pages begins. Lengths, then the page table, then keys: read one after the other once the kernel before this
// one has ended they take 3 us. So a block takes what stands there before for right, has its first keys on their way when that
// kernel ends, and looks again meanwhile. Where it was wrong it begins anew.

// How the page table is read: as it stands, or as a guess of what will stand there, which is a page of the cache in any case.
DEVICE int read_entry(const int* entry) { return *entry; }
struct GuessEntry {
    int pages;
    DEVICE int operator()(const int* entry) const { return max_of(0, min_of(load_guess(entry), pages - 1)); }
};
// Of this lane's sequence.
template <typename How> DEVICE int own_length(const Params& p) { return lane_id() < p.batch ? length_of<How>(p, lane_id()) : 0; }

// Each lane keeps one length to look at again. Where each sequence has queries of its own, wrong numbers of them would look for
// some outside of q. A launch that does not come early counts no pages.
DEVICE bool may_guess(const Params& p) { return p.pages > 0 && p.batch <= WARP_SIZE && !p.query_starts; }
// The cut of this block's piece, given each lane's own length. If there is none, one without keys.
DEVICE Cut guess_cut(const Params& p, int length) {
    if (may_guess(p)) {
        auto passed = [](int, int through) { return block_id() < through; };
        const Cut cut = uniform(p) ? cut_of_piece(p, block_id()) : find_cut<Plainly>(p, [&](int) { return length; }, passed);
        if (cut.batch < p.batch) return cut;
    }
    return {0, 0, {0, p.seqlen_q}, 1, block_id(), 0};
}

struct Start {
    using Places = KvRows::Place[NUM_STAGES + 1];  // of a warp's next tiles to load
    int length;  // of this lane's sequence, by which the piece was found
    Piece piece;
    Tiles tiles;
    KvRows kv;
    Places found;

    DEVICE explicit Start(const Params& p) : Start(p, may_guess(p) ? own_length<Guessing>(p) : 0) {}
    DEVICE Start(const Params& p, int guessed) : Start(p, guess_cut(p, guessed), guessed, GuessEntry{p.pages}) {}
    template <typename Read> DEVICE Start(const Params& p, const Cut& cut, int of_lane, Read read)
        : length(of_lane), piece(p, cut, block_id() - cut.first_piece),
          tiles(Mask(p, cut.queries.count, cut.length), cut.queries.count), kv(p, piece.rows, tiles.key_begin, tiles.key_end, 0) {
        find(found, read);
    }
    DEVICE int first_tile() const { return piece.tile_begin + warp_id(); }
    template <typename Read> DEVICE void find(Places& places, Read read) const {
#pragma unroll
        for (int i = 0; i <= NUM_STAGES; ++i) places[i] = kv.find(tiles.first_key(first_tile() + i * NUM_WARPS), read);
    }

    // Waits for the kernels before this one. load_first(tile, places) starts loading; what it started last was right. False if
    // the block has no piece: the grid is made for the worst lengths.
    template <typename LoadFirst> DEVICE bool load(const Params& p, LoadFirst load_first) {
        const bool guessed = piece.cut.length > 0;
        if (guessed && p.prefetch_tiles > 0) prefetch_piece(p, piece, tiles);
        wait_for_dependencies(kv.k, kv.v, found[0].page[0]);
#pragma unroll 1
        for (bool known = !guessed;; known = true) {
            if (known) {
                const Cut cut = cut_of_piece(p, block_id());
                if (cut.batch == p.batch) return false;
                *this = Start(p, cut, 0, read_entry);
            }
            int length_now = 0;
            Places taken, now;
            if (!known) {
                length_now = own_length<Plainly>(p);
                find(now, read_entry);
#pragma unroll
                for (int i = 0; i <= NUM_STAGES; ++i) taken[i] = found[i];
            }
            load_first(first_tile(), found);
            if (known || !any_in_warp(length_now != length || !same_pages(taken, now))) return true;
            copy_async_wait<0>();
            sync_warp();
        }
    }
    DEVICE static bool same_pages(const Places& a, const Places& b) {
        bool same = true;
#pragma unroll
        for (int i = 0; i <= NUM_STAGES; ++i)
#pragma unroll
            for (int n = 0; n < KvRows::ENTRIES; ++n) same &= a[i].page[n] == b[i].page[n];
        return same;
    }
};

// ---- decode_mma/work.cuh.j2
// What softmax asks of the rows.
struct Work {
    const Params& p;
    const Rows& rows;
    DEVICE int query(int row) const { return rows.query(p, row); }
};

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

// ---- lib/softmax/online.cuh
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

// ---- attention/mask_scores.cuh
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

// ---- attention/partial.cuh
// Partial results of the same rows and different keys: O, the row maximum (log2 units) and the row sum relative to it. What
// blocks leave of each in the workspace, and how a row is closed when all of them are put together.

constexpr int COLUMNS_PER_THREAD = 8;
constexpr int THREADS_PER_ROW = HEAD_DIM_V / COLUMNS_PER_THREAD;

struct Partial {
    float maximum = -INF, sum = 0, o[COLUMNS_PER_THREAD] = {};
};

DEVICE float weight_of(float maximum, float top) { return top == -INF ? 0 : exp2_approx(maximum - top); }

// Where partial results stand: in slots of `rows` rows.
struct Workspace {
    float *o, *statistics;
    int rows;
    DEVICE float* row(int slot, int r) const { return o + (i64(slot) * rows + r) * HEAD_DIM_V; }
    DEVICE float* row_statistics(int slot, int r) const { return statistics + (i64(slot) * rows + r) * 2; }
};

// Closes a row, sink included. Writes 8 columns times `scale` to `out`, and the log-sum-exp unless `lse` is null.
DEVICE void finish(const Partial& whole, float sink_log2, float scale, Element* out, float* lse) {
    const RowEnd end = finish_row(whole.maximum, whole.sum, sink_log2);
    const float factor = end.factor * scale;
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = pack2<Element>(whole.o[2 * i] * factor, whole.o[2 * i + 1] * factor);
    store_global_16(out, chunk);
    if (lse) *lse = end.lse;
}

// ---- decode_mma/merge.cuh
// What pieces leave in the workspace, put together, always in the order of the keys, so that the result is the same bit for bit
// however blocks ran.

DEVICE Workspace workspace_of(const Params& p) {  // a slot for each piece
    return {p.partial_o, p.partial_statistics, BLOCK_M - HEAD_ROWS + min_of(HEAD_ROWS, p.group * p.seqlen_q)};
}

DEVICE void store_partial(const Workspace& workspace, int slot, int row, int column, const Partial& part) {
    float* to = workspace.row(slot, row) + column;
    store_global_floats(to, {part.o[0], part.o[1], part.o[2], part.o[3]});
    store_global_floats(to + 4, {part.o[4], part.o[5], part.o[6], part.o[7]});
    if (column == 0) store_global_floats(workspace.row_statistics(slot, row), part.maximum, part.sum);
}

// Writes 8 columns of a finished row, sink included.
DEVICE void finish(const Params& p, const Rows& rows, int row, int column, const Partial& whole) {
    const int head = rows.head(p, row), query = rows.first_query + rows.query(p, row);
    Element* out = p.out + rows.batch * p.out_batch_stride + head * p.out_head_stride + query * p.out_row_stride + column;
    float* lse = p.lse && column == 0 ? p.lse + rows.batch * p.lse_batch_stride + head * p.lse_head_stride + query : nullptr;
    finish(whole, sink_logit_log2(p.sinks, p.sink_dtype, head), output_scale(p, rows.kv_head(row)), out, lse);
}

// Merges the splits of `rows`, with all THREADS threads of the block. Shared memory takes the statistics of all splits, and O of
// as many splits as there is room for at a time, so that one wait covers them: a wait for L2 takes 0.8 us.
template <int THREADS> DEVICE void merge_splits(const Params& p, const Rows& rows, const Cut& cut, u32 smem, int smem_bytes) {
    const Workspace workspace = workspace_of(p);
    const SharedArray<float> statistics{smem};
    const int stride = unsplit_pieces(p, cut.queries.count), first = cut.first_slot + rows.unsplit;  // slots of the splits
    const int statistics_bytes = round_up(cut.splits * rows.count * 8, 16), slot_bytes = rows.count * HEAD_DIM_V * 4;
    const int at_once = min_of(quotient(smem_bytes - statistics_bytes, slot_bytes), cut.splits);
    const u32 slots = smem + statistics_bytes;
    auto start = [&](int split) {  // copies of O of the splits from this one on
        const int chunks = slot_bytes / 16, here = min_of(at_once, cut.splits - split), slots_ahead = quotient(THREADS, chunks);
        int slot = quotient(thread_id(), chunks), chunk = thread_id() - slot * chunks;
#pragma unroll 4
        for (int i = thread_id(); i < here * chunks; i += THREADS) {
            copy_async_16(slots + i * 16, workspace.row(first + (split + slot) * stride, 0) + chunk * 4, true);
            slot += slots_ahead;
            chunk += THREADS - slots_ahead * chunks;
            if (chunk >= chunks) chunk -= chunks, ++slot;
        }
        copy_async_commit();
    };
    start(0);
#pragma unroll 1
    for (int i = thread_id(); i < cut.splits * rows.count; i += THREADS) {
        const int split = quotient(i, rows.count), row = i - split * rows.count;
        float maximum, sum;
        load_global_floats(workspace.row_statistics(first + split * stride, row), maximum, sum);
        statistics.set(2 * i, maximum);
        statistics.set(2 * i + 1, sum);
    }
    copy_async_wait<0>();
    sync_block();
    int loaded = 0;  // the first split in shared memory
#pragma unroll 1
    for (int begin = 0; begin < rows.count * THREADS_PER_ROW; begin += THREADS) {
        const int i = begin + thread_id(), row = min_of(i / THREADS_PER_ROW, rows.count - 1);
        const int column = i % THREADS_PER_ROW * COLUMNS_PER_THREAD;
        Partial whole;
#pragma unroll 8
        for (int split = 0; split < cut.splits; ++split)
            whole.maximum = max_of(whole.maximum, statistics.get(2 * (split * rows.count + row)));
#pragma unroll 1
        for (int split = 0; split < cut.splits; split += at_once) {
            if (split != loaded) {
                sync_block();  // nobody reads the splits before them any more
                start(split);
                copy_async_wait<0>();
                sync_block();
                loaded = split;
            }
            const int here = min_of(at_once, cut.splits - split);
#pragma unroll 4
            for (int s = 0; s < here; ++s) {
                const int at = 2 * ((split + s) * rows.count + row);
                const u32 from = slots + s * slot_bytes + (row * HEAD_DIM_V + column) * 4;
                const Floats4 left = load_shared_floats(from), right = load_shared_floats(from + 16);
                const float weight = weight_of(statistics.get(at), whole.maximum);
                whole.sum += weight * statistics.get(at + 1);
#pragma unroll
                for (int c = 0; c < 4; ++c) whole.o[c] += weight * left.x[c], whole.o[4 + c] += weight * right.x[c];
            }
        }
        if (i < rows.count * THREADS_PER_ROW && (BLOCK_HEADS_KV == 1 || rows.exists(row))) finish(p, rows, row, column, whole);
    }
}

// ---- decode_mma/memory.cuh
// Tiles of decode_mma, and where they lie in a block's shared memory.
using QTile = SmemTile<BLOCK_M, BLOCK_HEADS_KV * HEAD_DIM>;
using KTile = SmemTile<BLOCK_N, K_COLUMNS>;
using VTile = SmemTile<BLOCK_N, V_COLUMNS>;

// Shared memory: Q unless it is in registers, then a ring for each warp; when all is read, the warps' partial results.
constexpr int Q_BYTES = Q_IN_REGISTERS ? 0 : QTile::BYTES;
constexpr int STAGE_BYTES = KTile::BYTES + VTile::BYTES;
constexpr int PITCH = HEAD_DIM_V + 8;  // floats of a row of O: 32 bytes more, so that 4 rows of C stand in different banks
constexpr int WARP_O_BYTES = BLOCK_M * PITCH * 4;
constexpr int STATISTICS_OFFSET = NUM_WARPS * WARP_O_BYTES, LAST_OFFSET = STATISTICS_OFFSET + NUM_WARPS * BLOCK_M * 8;
static_assert(SMEM_BYTES == larger(larger(Q_BYTES + NUM_WARPS * NUM_STAGES * STAGE_BYTES, LAST_OFFSET + 16),
                                   MAX_SPLITS * BLOCK_M * 8 + BLOCK_M * HEAD_DIM_V * 4), "shared memory request");
static_assert(BLOCK_M % 16 == 0 && BLOCK_N % 16 == 0 && HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "fragments and 16-byte chunks");
static_assert(BLOCK_HEADS_KV == 1 || (HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0), "a fragment is of one head");

// ---- decode_mma/shared_queries.cuh
// Starts copying the block's queries; rows that do not exist, and columns of another head, become zeros.
DEVICE void load_q(const QTile& tile, const Params& p, const Rows& rows) {
    constexpr int CHUNKS_OF_HEAD = round_up(HEAD_DIM, 16) / 8, CHUNKS = BLOCK_HEADS_KV * CHUNKS_OF_HEAD;
#pragma unroll 1
    for (int i = thread_id(); i < BLOCK_M * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS, of_head = chunk % CHUNKS_OF_HEAD;
        const bool valid = rows.exists(row) && chunk / CHUNKS_OF_HEAD == row / HEAD_ROWS &&
                           (HEAD_DIM % 16 == 0 || of_head * 8 < HEAD_DIM);
        copy_async_16(tile.address(row, chunk), valid ? rows.pointer(p, row) + of_head * 8 : p.q, valid);
    }
}

// ---- decode_mma/warp_results.cuh
// What the warps of a block leave in shared memory for each other, and how it is put together.

// Leaves a warp's O, row maxima and row sums in shared memory.
DEVICE void store_warp(const float (&o)[TILES_M][TILES_V][4], const RowStatistics<TILES_M>& rows, float scale_log2,
                       const Rows& block) {
    const u32 base = smem_base() + warp_id() * WARP_O_BYTES;
    const SharedArray<float> statistics{smem_base() + STATISTICS_OFFSET + warp_id() * BLOCK_M * 8};
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m * 16 + half * 8 + c_row();
            const float sum = row_sum(rows.sum[m][half]);
            if (!block.exists(row)) continue;
            store_row(base + row * PITCH * 4, o[m], head_of(m, half) * TILES_OF_HEAD, half);
            if (c_column() == 0) {
                statistics.set(2 * row, in_log2(rows.maximum[m][half], scale_log2));
                statistics.set(2 * row + 1, sum);
            }
        }
}

// The warps' results for 8 columns of a row, put together.
DEVICE Partial merge_warps(int row, int column) {
    const SharedArray<float> statistics{smem_base() + STATISTICS_OFFSET};
    Partial whole;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; ++warp)
        whole.maximum = max_of(whole.maximum, statistics.get(2 * (warp * BLOCK_M + row)));
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS; ++warp) {
        const int at = 2 * (warp * BLOCK_M + row);
        const float weight = weight_of(statistics.get(at), whole.maximum);
        whole.sum += weight * statistics.get(at + 1);
        const u32 from = smem_base() + warp * WARP_O_BYTES + (row * PITCH + column) * 4;
        const Floats4 left = load_shared_floats(from), right = load_shared_floats(from + 16);
#pragma unroll
        for (int c = 0; c < 4; ++c) whole.o[c] += weight * left.x[c], whole.o[4 + c] += weight * right.x[c];
    }
    return whole;
}

// ---- decode_mma/kernel.cu.j2
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM) decode_mma(const __grid_constant__ Params p) {
    Start start(p);
    const Piece& piece = start.piece;
    const Cut& cut = piece.cut;
    const Tiles& tiles = start.tiles;
    KvRows& kv = start.kv;
    const u32 ring = smem_base() + Q_BYTES + warp_id() * (NUM_STAGES * STAGE_BYTES);
    auto k_tile = [&](int stage) { return KTile{ring + stage * STAGE_BYTES}; };
    auto v_tile = [&](int stage) { return VTile{ring + stage * STAGE_BYTES + KTile::BYTES}; };

    // A group of copies is K or V of one tile, in turn, empty for tiles beyond the piece: so the group to wait for is
    // always the same number of groups back.
    auto load_k = [&](int stage, int t, const KvRows::Place& place) {
        if (t < piece.tile_end) kv.start_k(k_tile(stage), tiles.first_key(t), place);
        copy_async_commit();
    };
    auto load_v = [&](int stage, int t, const KvRows::Place& place) {
        if (t < piece.tile_end) kv.start_v(v_tile(stage), tiles.first_key(t), place);
        copy_async_commit();
    };
    const QTile q_tile{smem_base()};
    u32 q_fragments[TILES_M][STEPS_D][4];
    float scale_log2 = p.scale_log2;
    // Queries, and the first tiles from `tile` on. These stand at the first places of `found`, which has the next ones then.
    auto load_first = [&](int tile, KvRows::Place (&found)[NUM_STAGES + 1]) {
        if constexpr (!Q_IN_REGISTERS) {
            load_q(q_tile, p, piece.rows);
            copy_async_commit();
        }

#pragma unroll 1
        for (int i = 0; i < NUM_STAGES; ++i) {
            load_k(i, tile + i * NUM_WARPS, found[0]);
            load_v(i, tile + i * NUM_WARPS, found[0]);
#pragma unroll
            for (int next = 0; next < NUM_STAGES; ++next) found[next] = found[next + 1];
        }
        if constexpr (Q_IN_REGISTERS || KV_BYTES == 1) scale_log2 = load_q(q_fragments, p, piece.rows);
    };

    if (!start.load(p, load_first)) return;
    const Mask mask(p, cut.queries.count, cut.length);
    int tile = start.first_tile();  // the tile at work; the warp's next one is NUM_WARPS further
    auto& found = start.found;
    if constexpr (!Q_IN_REGISTERS) {
        copy_async_wait<2 * NUM_STAGES>();
        sync_block();
    }
    const float softcap_scale = scale_log2 * reciprocal_approx(p.softcap_log2);
    scale_log2 = p.softcap_log2;  // of what is left after tanh
    auto q_fragment = [&](u32 (&a)[4], int m, int d) {
        if constexpr (Q_IN_REGISTERS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = q_fragments[m][d][i];
        } else {
            load_a(a, q_tile, m * 16, d * 2);
        }
    };

    float o[TILES_M][TILES_V][4] = {};
    RowStatistics<TILES_M> rows;
    int stage = 0;
    for (; tile < piece.tile_end; tile += NUM_WARPS) {
        if (tile >= piece.tile_end - p.trigger_tiles * NUM_WARPS) launch_dependents();  // the next kernel's prefetches follow
        const int ahead = tile + NUM_STAGES * NUM_WARPS;
        const KvRows::Place here = found[0];
        found[0] = kv.find(tiles.first_key(ahead + NUM_WARPS));
        float s[TILES_M][TILES_N][4];
        clear(s);
        copy_async_wait<2 * NUM_STAGES - 1>();
        sync_warp();  // all lanes' copies of K have come
        multiply_qk(s, k_tile(stage), q_fragment);
        sync_warp();  // and all lanes have read it
        load_k(stage, ahead, here);
        cap_scores(s, softcap_scale);
        if (tiles.needs_mask(tile)) mask_scores(s, mask, Work{p, piece.rows}, 0, tiles, tile);
        rescale_output(o, move_maximum<RESCALE_SLACK, true>(s, rows, scale_log2));
        exponentiate<true>(s, rows, scale_log2);

        copy_async_wait<2 * NUM_STAGES - 1>();
        sync_warp();
        multiply_pv(o, s, v_tile(stage));
        sync_warp();
        load_v(stage, ahead, here);
        stage = stage == NUM_STAGES - 1 ? 0 : stage + 1;
    }

    sync_block();  // nobody reads K, V or Q any more
    launch_dependents();  // HBM has nothing to do from here on: the next kernel prefetches. It need not fear what ran before this
    store_warp(o, rows, scale_log2, piece.rows);
    sync_block();
    const Workspace workspace = workspace_of(p);
#pragma unroll 1
    for (int i = thread_id(); i < piece.rows.count * THREADS_PER_ROW; i += THREADS) {
        const int row = i / THREADS_PER_ROW, column = i % THREADS_PER_ROW * COLUMNS_PER_THREAD;
        if (BLOCK_HEADS_KV > 1 && !piece.rows.exists(row)) continue;
        const Partial whole = merge_warps(row, column);
        if (cut.splits == 1) finish(p, piece.rows, row, column, whole);
        else store_partial(workspace, cut.first_slot + block_id() - cut.first_piece, row, column, whole);
    }
    if (cut.splits == 1 || !p.tickets) return;

    const SharedArray<u32> last{smem_base() + LAST_OFFSET};
    sync_block();
    if (thread_id() == 0) {
        fence_device();  // before the ticket, all that the block has stored; after it, all that others have
        last.set(0, take_ticket(p.tickets + cut.batch * unsplit_pieces(p, p.seqlen_q) + piece.rows.unsplit, cut.splits - 1));
        fence_device();
    }
    sync_block();
    if (last.get(0) != u32(cut.splits - 1)) return;
    sync_block();  // everybody has read the ticket before its place is reused
    merge_splits<THREADS>(p, piece.rows, cut, smem_base(), SMEM_BYTES);
}

// ---- decode_mma/combine.cuh.j2
// Merges the splits of each sequence, head and tile of rows, one a block, after decode_mma without tickets.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 1) decode_combine(const __grid_constant__ Params p) {
    const int unsplit = unsplit_pieces(p, p.seqlen_q), batch = block_id() / unsplit, number = block_id() - batch * unsplit;
    launch_dependents();
    wait_for_dependencies();
    const Cut cut = cut_of_batch(p, batch);
    if (cut.splits == 1 || number >= unsplit_pieces(p, cut.queries.count)) return;  // finished, or no such rows
    merge_splits<COMBINE_THREADS>(p, Rows(p, cut, number), cut, smem_base(), COMBINE_BYTES);
}
