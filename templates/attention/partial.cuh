// Partial results of the same rows and different keys: O, the row maximum (log2 units) and the row sum relative to it. What
// blocks leave of each in the workspace, and how a row is closed when all of them are put together.

constexpr int COLUMNS_PER_THREAD = 8;
constexpr int THREADS_PER_ROW = HEAD_DIM_V / COLUMNS_PER_THREAD;

struct Partial {
    float maximum = -INF, sum = 0, o[COLUMNS_PER_THREAD] = {};
};

DEVICE float weight_of(float maximum, float top) { return top == -INF ? 0 : exp2_approx(maximum - top); }

// Where partial results stand: in slots of `rows` rows.
struct Workspace {
    float *o, *statistics;
    int rows;
    DEVICE float* row(int slot, int r) const { return o + (i64(slot) * rows + r) * HEAD_DIM_V; }
    DEVICE float* row_statistics(int slot, int r) const { return statistics + (i64(slot) * rows + r) * 2; }
};

// Closes a row, sink included. Writes 8 columns times `scale` to `out`, and the log-sum-exp unless `lse` is null.
DEVICE void finish(const Partial& whole, float sink_log2, float scale, Element* out, float* lse) {
    const RowEnd end = finish_row(whole.maximum, whole.sum, sink_log2);
    const float factor = end.factor * scale;
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) chunk.word[i] = pack2<Element>(whole.o[2 * i] * factor, whole.o[2 * i + 1] * factor);
    store_global_16(out, chunk);
    if (lse) *lse = end.lse;
}
