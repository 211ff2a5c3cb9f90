// Zeros for rows [begin, end) of no sequence, of the 64 from `first` on.
template <int COLUMNS> DEVICE void clear_unused(Element* rows, i64 row_stride, int first, int begin, int end, int count) {
    for (int i = thread_id(); i < ROWS_PER_BLOCK * (COLUMNS / 8); i += ROWS_THREADS) {
        const int row = first + i / (COLUMNS / 8), chunk = i % (COLUMNS / 8);
        if (row < count && (row < begin || row >= end)) store_global_16(rows + row * row_stride + chunk * 8, Chunk{});
    }
}
