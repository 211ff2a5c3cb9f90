// Number formats, ldmatrix and mma.sync.
#include <algorithm>

#include "memory.hpp"

namespace sim {

// ---- formats

struct Shape { int exponent_bits, mantissa_bits; };

static float small_to_float(u32 bits, Shape shape) {
    int bias = (1 << (shape.exponent_bits - 1)) - 1;
    u32 mantissa = bits & ((1u << shape.mantissa_bits) - 1), exponent = bits >> shape.mantissa_bits & ((1u << shape.exponent_bits) - 1);
    float sign = bits >> (shape.exponent_bits + shape.mantissa_bits) & 1 ? -1.0f : 1.0f;
    if (shape.mantissa_bits == 10 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
    if (shape.mantissa_bits == 3 && (bits & 0x7f) == 0x7f) return NAN;  // e4m3 has no infinity
    float fraction = std::ldexp(float(mantissa), -shape.mantissa_bits);
    return sign * (exponent ? std::ldexp(1 + fraction, int(exponent) - bias) : std::ldexp(fraction, 1 - bias));
}

static const std::vector<float>& fp16_values() {
    static const std::vector<float> table = [] {
        std::vector<float> values(1 << 16);
        for (u32 i = 0; i < values.size(); ++i) values[i] = small_to_float(i, {5, 10});
        return values;
    }();
    return table;
}

static float float_of_bits(u32 bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

float to_float(Format format, u32 bits) {
    switch (format) {
        case Format::bf16: return float_of_bits(bits << 16);
        case Format::fp16: return fp16_values()[bits];
        case Format::e4m3: return small_to_float(bits, {4, 3});
    }
    return 0;
}

static u32 round_small(float x, Shape shape) {
    u32 sign = std::signbit(x) ? 1u << (shape.exponent_bits + shape.mantissa_bits) : 0;
    int bias = (1 << (shape.exponent_bits - 1)) - 1;
    float magnitude = std::fabs(x);
    if (magnitude == 0) return sign;
    int exponent = std::max(std::isinf(x) ? 1000 : std::ilogb(magnitude), 1 - bias);
    u32 scaled = exponent > bias + 1 ? 0 : u32(std::nearbyint(std::ldexp(magnitude, shape.mantissa_bits - exponent)));
    u32 bits = exponent > bias + 1 ? 0xffffffff : scaled + (u32(exponent + bias - 1) << shape.mantissa_bits);  // carries work out
    u32 infinity = shape.mantissa_bits == 10 ? 0x7c00 : 0x7e;  // e4m3 saturates at 448
    return sign | std::min(bits, infinity);
}

u32 from_float(Format format, float x) {
    if (std::isnan(x)) return format == Format::e4m3 ? 0x7f : 0x7fff;
    if (format == Format::fp16) return round_small(x, {5, 10});
    if (format == Format::e4m3) return round_small(x, {4, 3});
    u32 bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// ---- mma.sync

static void unpack(Format format, u32 word, float* two) {
    two[0] = to_float(format, word & 0xffff), two[1] = to_float(format, word >> 16);
}

struct Mma { float* c; const u32* a; u32 b[2]; };

template <Format FORMAT> static void mma_warp(void* const* arguments) {
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const Mma& mma = *static_cast<const Mma*>(arguments[lane]);
        int row = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 4; ++i) unpack(FORMAT, mma.a[i], &a[row + i % 2 * 8][pair + i / 2 * 8]);
        for (int i = 0; i < 2; ++i) {
            float two[2];
            unpack(FORMAT, mma.b[i], two);
            b[pair + i * 8][row] = two[0], b[pair + i * 8 + 1][row] = two[1];
        }
        for (int i = 0; i < 4; ++i) c[row + i / 2 * 8][pair + i % 2] = mma.c[i];
    }
    for (int i = 0; i < 16; ++i)
        for (int k = 0; k < 16; ++k)
            for (int j = 0; j < 8; ++j) c[i][j] += a[i][k] * b[k][j];
    for (int lane = 0; lane < WARP; ++lane) {
        float* out = static_cast<const Mma*>(arguments[lane])->c;
        for (int i = 0; i < 4; ++i) out[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
}

void mma_m16n8k16(Format format, float* c, const u32* a, u32 b0, u32 b1, int line) {
    Mma mma{c, a, {b0, b1}};
    collective(format == Format::bf16 ? mma_warp<Format::bf16> : mma_warp<Format::fp16>, &mma, line);
}

// ---- ldmatrix

struct LoadMatrix { u32* registers; u32 address; int line; };

template <bool TRANSPOSED> static void ldmatrix_warp(void* const* arguments) {
    u16 element[4][8][8];
    const Warp& warp = *self->warp;
    const u32 step = order_warp_step(warp);
    for (int lane = 0; lane < WARP; ++lane) {
        const LoadMatrix& load = *static_cast<const LoadMatrix*>(arguments[lane]);
        check_shared_bounds(load.address, 16, false, load.line);
        const Actor actor{*warp.lanes[lane], u32(warp_agent(warp.id)), step, false, load.line};
        check_read(actor, load.address, 16);
        stamp_read(actor, load.address, 16);
        memcpy(element[lane / 8][lane % 8], shared_bytes(load.address), 16);
    }
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < 4; ++i) {
            int row = lane / 4, pair = lane % 4 * 2;
            u32 low = TRANSPOSED ? element[i][pair][row] : element[i][row][pair];
            u32 high = TRANSPOSED ? element[i][pair + 1][row] : element[i][row][pair + 1];
            static_cast<const LoadMatrix*>(arguments[lane])->registers[i] = low | high << 16;
        }
}

void ldmatrix_x4(u32* registers, u32 address, bool transposed, int line) {
    LoadMatrix load{registers, address, line};
    collective(transposed ? ldmatrix_warp<true> : ldmatrix_warp<false>, &load, line);
}

// ---- stmatrix

struct StoreMatrix { u32 address; const u32* registers; int line; };

static void stmatrix_warp(void* const* arguments) {
    u16 element[4][8][8];
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < 4; ++i) memcpy(&element[i][lane / 4][lane % 4 * 2], &static_cast<const StoreMatrix*>(arguments[lane])->registers[i], 4);
    for (int lane = 0; lane < WARP; ++lane) {
        const StoreMatrix& store = *static_cast<const StoreMatrix*>(arguments[lane]);
        const Thread& thread = *self->warp->lanes[lane];
        const Actor actor{thread, u32(thread.id), order_now(thread), false, store.line};
        check_shared_bounds(store.address, 16, true, store.line);
        check_write(actor, store.address, 16);
        stamp_write(actor, store.address, 16);
        memcpy(shared_bytes(store.address), element[lane / 8][lane % 8], 16);
    }
}

void stmatrix_x4(u32 address, const u32* registers, int line) {
    StoreMatrix store{address, registers, line};
    collective(stmatrix_warp, &store, line);
}

}  // namespace sim
