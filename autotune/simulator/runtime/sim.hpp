// What the host twins of lib/base.cuh and lib/ptx/ are made of. One block runs at a time, or the blocks of one cluster; each of
// their threads is a fiber.
//
// Every function that reaches shared memory, global memory or another thread takes the line of the rendered source from
// which it was called, for the reports.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define AT int line = __builtin_LINE()

namespace sim {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int WARP = 32;
constexpr u32 SHARED_BASE = 1024;  // address of a block's first dynamic byte; not 0, so that an offset is not taken for an address

struct Thread;
extern Thread* self;
int thread_id();
int block_id();
int grid_size();
u32 shared_base();  // SHARED_BASE, but for blocks of a cluster, which stand one behind the other

// ---- warps (schedule.cpp)

// Runs once for all lanes of a warp, when each has called `collective` with it: arguments[lane] is what that lane passed.
using WarpOperation = void (*)(void* const* arguments);
void collective(WarpOperation operation, void* argument, int line);

void sync_warp(int line);
// Barrier `id` for `threads` threads, 0 for all of the block. Without `wait`, the warp arrives and goes on.
void barrier(int id, int threads, bool wait, int line);
void cluster_barrier(int line);  // for all threads of the cluster

// ---- memory (memory.cpp, global.cpp): checked for bounds, alignment, initialisation and races

const u8* shared_read(u32 address, int bytes, int line);
void shared_write(u32 address, const void* data, int bytes, int line);
u32 remote_address(u32 address, int rank, int line);  // the same place in another block of the cluster, for remote_read
const u8* remote_read(u32 address, int bytes, int line);
const u8* global_read(const void* pointer, int bytes, int line);
void global_write(void* pointer, const void* data, int bytes, int line);
void fence_device(int line);
void wait_for_dependencies(int line);  // dependency.cpp
void prefetch(const void* pointer, int bytes, int line);
int guess(const int* pointer, int line);  // before the wait, anything in place of what stands there
void add_floats(float* sums, const float* values, int count, int line);  // in no order with those of other threads
u32 atomic_inc(u32* counter, u32 last, int line);  // to 0 after `last`; gives the value before

// ---- asynchronous copies (copies.cpp)

void copy_async(u32 address, const void* global, int bytes, bool valid, int line);
void copy_async_commit(int line);
void copy_async_wait(int pending, int line);

// ---- mbarriers (mbarrier.cpp), as in lib/ptx/mbarrier.cuh

void mbarrier_init(u32 address, int arrivals, int line);
void mbarrier_init_fence(int line);
void mbarrier_arrive(u32 address, int line);
void mbarrier_arrive_expect(u32 address, int bytes, int line);
void mbarrier_wait(u32 address, u32 parity, int line);

// ---- matrices (matrix.cpp)

enum class Format { bf16, fp16, e4m3 };
float to_float(Format format, u32 bits);
u32 from_float(Format format, float x);  // to nearest, ties to even

// c (16 x 8) += a (16 x 16) b (16 x 8), fragments as in lib/ptx/mma.cuh.
void mma_m16n8k16(Format format, float* c, const u32* a, u32 b0, u32 b1, int line);
// Four 8 x 8 matrices of 16-bit elements; lane 8 i + j names row j of matrix i.
void ldmatrix_x4(u32* registers, u32 address, bool transposed, int line);
void stmatrix_x4(u32 address, const u32* registers, int line);

// ---- TMA (tma.cpp)

// What stands in the 128 bytes of a TensorMap on the host. Sizes in elements, strides in bytes; from the innermost out.
struct Tensor {
    u64 address, dims[4], strides[3], box_columns, box_rows, box_heads, element_bytes, swizzle_bytes, unused[3];
};
void tma_load(u32 address, const void* tensor, u32 mbarrier, const int (&at)[4], int line);
void tma_store(const void* tensor, u32 address, const int (&at)[4], int line);
void tma_store_commit(int line);
void tma_store_wait_read(int line);
void fence_async_proxy(int line);

// ---- warpgroup multiplies (wgmma.cpp)

void wgmma_fence(int line);
void wgmma_commit(int line);
void wgmma_wait(int pending, int line);
// c (64 x n) = or += A B, B from a descriptor, K- or MN-major; A (64 x 16) from registers, or if they are null from `a`, K-major.
void wgmma(Format format, float* c, int n, const u32* a_registers, u64 a, u64 b, bool b_mn_major, bool accumulate, int line);
void set_registers(int count, int line);

// ---- what can be launched (main.cpp)

struct Entry {
    const char* name;
    void (*call)(const void* params);
    Entry* next;
    Entry(const char* name, void (*call)(const void*));
};

}  // namespace sim
