// Twin of lib/ptx/split.cuh.

struct Floats4 { float x[4]; };

DEVICE void store_shared_floats(u32 smem_address, float first, float second, AT) {
    const float two[2] = {first, second};
    sim::shared_write(smem_address, two, 8, line);
}
DEVICE Floats4 load_shared_floats(u32 smem_address, AT) {
    Floats4 v;
    memcpy(v.x, sim::shared_read(smem_address, 16, line), 16);
    return v;
}
DEVICE void store_global_floats(float* global, const Floats4& v, AT) { sim::global_write(global, v.x, 16, line); }
DEVICE void store_global_floats(float* global, float first, float second, AT) {
    const float two[2] = {first, second};
    sim::global_write(global, two, 8, line);
}
DEVICE Floats4 load_global_floats(const float* global, AT) {
    Floats4 v;
    memcpy(v.x, sim::global_read(global, 16, line), 16);
    return v;
}
DEVICE void load_global_floats(const float* global, float& first, float& second, AT) {
    float two[2];
    memcpy(two, sim::global_read(global, 8, line), 8);
    first = two[0], second = two[1];
}

DEVICE u32 load_global_4(const void* global, AT) {
    u32 value;
    memcpy(&value, sim::global_read(global, 4, line), 4);
    return value;
}

DEVICE void fence_device(AT) { sim::fence_device(line); }

template <int PREFETCH> DEVICE void stream_async_16(u32 smem_address, const void* global, bool valid, AT) {
    sim::copy_async(smem_address, global, 16, valid, line);
}
