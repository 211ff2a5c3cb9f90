// Twin of lib/ptx/turing.cuh.

struct half_turing { unsigned short bits; };

template <bool TURING, typename Element> struct ElementOf { using Type = Element; };
template <typename Element> struct ElementOf<true, Element>;
template <> struct ElementOf<true, fp16> { using Type = half_turing; };

template <> DEVICE u32 pack2<half_turing>(float low, float high) { return pack2<fp16>(low, high); }

DEVICE void mma_m16n8k8(float (&c)[4], u32 a0, u32 a1, u32 b, AT) {
    const u32 a[4] = {a0, a1, 0, 0};
    sim::mma_m16n8k16(sim::Format::fp16, c, a, b, 0, line);
}
template <> DEVICE void mma_m16n8k16<half_turing>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, int line) {
    mma_m16n8k8(c, a[0], a[1], b0, line);
    mma_m16n8k8(c, a[2], a[3], b1, line);
}

DEVICE Chunk load_global_16(const void* global, bool valid, AT) {
    Chunk c = {};
    if (valid) memcpy(c.word, sim::global_read(global, 16, line), 16);
    return c;
}
