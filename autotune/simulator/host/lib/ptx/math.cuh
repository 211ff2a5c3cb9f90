// Twin of lib/ptx/math.cuh.

DEVICE float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }  // subnormals to 0
DEVICE float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
DEVICE float log2_approx(float x) { return std::log2(flushed(x)); }
DEVICE float multiply_rounded(float a, float b) { volatile float product = a * b; return product; }
DEVICE float reciprocal_approx(float x) { return flushed(1.0f / flushed(x)); }

DEVICE int float_bits(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
DEVICE float bits_float(int bits) { float x; memcpy(&x, &bits, 4); return x; }
DEVICE int max_of_three(int a, int b, int c) { return std::max(a, std::max(b, c)); }

template <typename Element> DEVICE u32 pack2(float low, float high);
template <> DEVICE u32 pack2<bf16>(float low, float high) {
    return sim::from_float(sim::Format::bf16, low) | sim::from_float(sim::Format::bf16, high) << 16;
}
template <> DEVICE u32 pack2<fp16>(float low, float high) {
    return sim::from_float(sim::Format::fp16, low) | sim::from_float(sim::Format::fp16, high) << 16;
}
