// Where a key stands that is prefetched: in a page of the cache, in the right one if its number does not change any more.
struct KeyPlace { i64 batch, row; };  // page and slot
DEVICE KeyPlace guess_place(const Params& p, int batch, int key) {
    const int index = divide(key, p.page_magic, p.page_shift);
    const int page = load_guess(p.page_table + batch * p.page_table_stride + index);
    return {max_of(0, min_of(page, p.pages - 1)), key - index * p.page_size};
}
#include "decode_mma/prefetch.cuh"
