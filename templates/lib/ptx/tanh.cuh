#include "lib/base.cuh"

// tanh to the last digit but one, for fp32 results: the approximations cost 3e-6 of a probability under a soft cap of 30.
DEVICE float tanh_exact(float x) { return tanhf(x); }
