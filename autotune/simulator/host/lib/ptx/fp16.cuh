// Twin of lib/ptx/fp16.cuh.

DEVICE float half_to_float(fp16 x) { return sim::to_float(sim::Format::fp16, x.bits); }
DEVICE fp16 float_to_half(float x) { return {static_cast<unsigned short>(sim::from_float(sim::Format::fp16, x))}; }
