#include "lib/base.cuh"
#include "lib/ptx/fp16.cuh"

// One element of a tensor to float and back, for every dtype and arch.
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(fp16 x) { return half_to_float(x); }
DEVICE float to_float(bf16 x) { return bf16_to_float(x); }

template <typename Element> DEVICE Element from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE fp16 from_float<fp16>(float x) { return float_to_half(x); }
template <> DEVICE bf16 from_float<bf16>(float x) { return float_to_bf16(x); }
