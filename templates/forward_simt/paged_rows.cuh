#include "lib/sequences/pages.cuh"

// Rows of K or V in the pages of a cache, as load_rows takes them.
struct PagedRows {
    const Element* matrix;  // of page 0
    i64 page_stride;
    Pages pages;
};

template <int ROWS, int COLUMNS, typename To, typename HasKey>
DEVICE void load_rows(SharedArray<To> to, int pitch, const PagedRows& rows, i64 row_stride, int first_key, HasKey has_key) {
    for (int i = thread_id(); i < ROWS * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS, key = first_key + row;
        const float x = has_key(key) ? to_float(rows.matrix[rows.pages.offset(key, rows.page_stride, row_stride) + column]) : 0.0f;
        to.set(row * pitch + column, from_float<To>(x));
    }
}
