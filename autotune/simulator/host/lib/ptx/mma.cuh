// Twin of lib/ptx/mma.cuh.

template <typename Element> constexpr sim::Format FORMAT = sim::Format::bf16;
template <> constexpr sim::Format FORMAT<fp16> = sim::Format::fp16;

template <typename Element> DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, AT) {
    sim::mma_m16n8k16(FORMAT<Element>, c, a, b0, b1, line);
}
