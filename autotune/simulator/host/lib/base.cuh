// The machine, simulated: what lib/base.cuh declares, in plain C++ on the functions of simulator/runtime/sim.hpp.
#include "sim.hpp"

#define DEVICE inline
#define EVERYWHERE constexpr
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP_SIZE = 32;
#define INF __builtin_inff()
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

DEVICE int thread_id() { return sim::thread_id(); }
DEVICE int lane_id() { return sim::thread_id() % WARP_SIZE; }
DEVICE int block_id() { return sim::block_id(); }
DEVICE int grid_size() { return sim::grid_size(); }

DEVICE void sync_block(AT) { sim::barrier(0, 0, true, line); }
DEVICE void sync_warp(AT) { sim::sync_warp(line); }

struct AnyInWarp { bool condition, any; };
DEVICE bool any_in_warp(bool condition, AT) {
    AnyInWarp mine{condition, false};
    sim::collective([](void* const* lanes) {
        bool any = false;
        for (int i = 0; i < WARP_SIZE; ++i) any |= static_cast<AnyInWarp*>(lanes[i])->condition;
        for (int i = 0; i < WARP_SIZE; ++i) static_cast<AnyInWarp*>(lanes[i])->any = any;
    }, &mine, line);
    return mine.any;
}

template <typename T> struct Shuffled { T value, result; int source; };
template <typename T> void shuffle_lanes(void* const* lanes) {
    for (int i = 0; i < WARP_SIZE; ++i) {
        auto mine = static_cast<Shuffled<T>*>(lanes[i]);
        mine->result = static_cast<Shuffled<T>*>(lanes[mine->source % WARP_SIZE])->value;
    }
}
template <typename T> DEVICE T shuffle(T value, int lane, AT) {
    Shuffled<T> mine{value, {}, lane};
    sim::collective(shuffle_lanes<T>, &mine, line);
    return mine.result;
}
DEVICE int warp_id(AT) { return shuffle(sim::thread_id() / WARP_SIZE, 0, line); }  // on a GPU, too: all lanes take part
template <typename T> DEVICE T shuffle_xor(T value, int mask, AT) { return shuffle(value, lane_id() ^ mask, line); }

DEVICE float warp_max(float x, AT) {
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask, line));
    return x;
}
DEVICE float warp_sum(float x, AT) {
    for (int mask = WARP_SIZE / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask, line);
    return x;
}

template <typename T> DEVICE T min_of(T a, T b) { return a < b ? a : b; }
template <typename T> DEVICE T max_of(T a, T b) { return a > b ? a : b; }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
template <typename T> EVERYWHERE T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <typename T> EVERYWHERE T round_up(T a, T b) { return ceil_div(a, b) * b; }

DEVICE u32 smem_base() { return sim::shared_base(); }

template <typename T> struct SharedArray {
    u32 address;
    DEVICE T get(int i, AT) const {
        alignas(T) unsigned char bytes[sizeof(T)];
        memcpy(bytes, sim::shared_read(address + i * sizeof(T), sizeof(T), line), sizeof(T));
        return *reinterpret_cast<T*>(bytes);
    }
    DEVICE void set(int i, T value, AT) const { sim::shared_write(address + i * sizeof(T), &value, sizeof(T), line); }
};

DEVICE float bf16_to_float(bf16 x) { return sim::to_float(sim::Format::bf16, x.bits); }
DEVICE bf16 float_to_bf16(float x) { return {static_cast<unsigned short>(sim::from_float(sim::Format::bf16, x))}; }

template <typename T, T VALUE> struct Constant { static constexpr T value = VALUE; };
EVERYWHERE int larger(int a, int b) { return a > b ? a : b; }

template <int M, int N, int E> DEVICE void clear(float (&tile)[M][N][E]) { memset(tile, 0, sizeof(tile)); }
template <int M, int N, int E> DEVICE void copy(float (&to)[M][N][E], const float (&from)[M][N][E]) { memcpy(to, from, sizeof(to)); }
