// Twin of lib/ptx/fp8_pack.cuh.

DEVICE u32 byte_of_e4m3(float x) { return sim::from_float(sim::Format::e4m3, x); }
DEVICE u32 pack_e4m3(float a, float b, float c, float d) {
    return byte_of_e4m3(a) | byte_of_e4m3(b) << 8 | byte_of_e4m3(c) << 16 | byte_of_e4m3(d) << 24;
}
