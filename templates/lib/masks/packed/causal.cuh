#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// Bottom-right causal: row i sees the keys of its sequence up to i + diagonal.
struct Mask {
    int first, diagonal;
    DEVICE Mask(const Params&, const Keys& keys) : first(keys.key_begin), diagonal(keys.diagonal) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return first; }
    DEVICE int key_end(int row_end) const { return max_of(first, row_end + diagonal); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return first; }
    DEVICE int shared_end(int row_begin) const { return max_of(first, row_begin + diagonal + 1); }
    // Row `row` sees keys [row_begin, row_end) of its tiles' own: none of those comes before the sequence.
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return row + diagonal + 1; }
};
