// Where a key stands that is prefetched: keys of a sequence stand in order.
struct KeyPlace { i64 batch, row; };
DEVICE KeyPlace guess_place(const Params&, int batch, int key) { return {batch, key}; }
#include "decode_mma/prefetch.cuh"
