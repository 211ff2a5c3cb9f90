#include "lib/base.cuh"
#include "lib/ptx/math.cuh"
#include "lib/ptx/fp16.cuh"

// Attention sinks: one extra logit per query head that joins the maximum and the denominator of a finished row only.

// sink_dtype: 0 float32, 1 float16, 2 bfloat16, 3 float64. A null pointer is "no sink".
DEVICE float sink_logit_log2(const void* sinks, int sink_dtype, int head) {
    if (!sinks) return -INF;
    float sink = sink_dtype == 0   ? static_cast<const float*>(sinks)[head]
                 : sink_dtype == 1 ? half_to_float(static_cast<const fp16*>(sinks)[head])
                 : sink_dtype == 2 ? bf16_to_float(static_cast<const bf16*>(sinks)[head])
                                   : float(static_cast<const double*>(sinks)[head]);
    return sink * LOG2E;
}

struct RowEnd {
    float factor;  // o * factor is the output: 0 for a row that saw no key
    float lse;     // natural logarithm, sink included; -inf for a row that saw nothing at all
};

// Closes a row from its maximum (log2 units, -inf if it saw no key), its sum relative to that, and its sink.
DEVICE RowEnd finish_row(float maximum_log2, float sum, float sink_log2) {
    float top = max_of(maximum_log2, sink_log2);
    if (top == -INF) return {0, -INF};
    float scale = exp2_approx(maximum_log2 - top);
    float denominator = sum * scale + exp2_approx(sink_log2 - top);
    return {scale * reciprocal_approx(denominator), (top + log2_approx(denominator)) * LN2};
}
