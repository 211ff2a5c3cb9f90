// Twin of lib/ptx/fp8.cuh.

struct e4m3 { unsigned char bits; };

DEVICE u32 half_of_e4m3(u32 byte) { return sim::from_float(sim::Format::fp16, sim::to_float(sim::Format::e4m3, byte)); }
DEVICE void unpack_e4m3(u32 four, u32& low, u32& high) {
    low = half_of_e4m3(four & 255) | half_of_e4m3(four >> 8 & 255) << 16;
    high = half_of_e4m3(four >> 16 & 255) | half_of_e4m3(four >> 24) << 16;
}
DEVICE u32 part_pairs(u32 four) { return (four & 0xff0000ffu) | (four >> 8 & 0xff00) | (four << 8 & 0xff0000); }
