#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// A window, inclusive on both sides: row i sees the keys of its sequence from i + diagonal - left to i + diagonal + right. Rows
// and keys are at most 2^30 and bounds at most 2^30 - 2^16, which stands for "unbounded", so that sums stay in 32 bits; causal
// is right = 0.
struct Mask {
    int first, end, diagonal, left, right;
    DEVICE Mask(const Params& p, const Keys& keys)
        : first(keys.key_begin), end(keys.key_end), diagonal(keys.diagonal), left(p.window_left), right(p.window_right) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return clamp(row_begin + diagonal - left); }
    DEVICE int key_end(int row_end) const { return clamp(row_end + diagonal + right); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return clamp(row_end - 1 + diagonal - left); }
    DEVICE int shared_end(int row_begin) const { return clamp(row_begin + 1 + diagonal + right); }
    // Row `row` sees keys [row_begin, row_end).
    static constexpr bool HAS_ROW_BEGIN = true;
    DEVICE int row_begin(int row) const { return row + diagonal - left; }
    DEVICE int row_end(int row) const { return min_of(row + diagonal + right + 1, end); }
    DEVICE int clamp(int key) const { return min_of(max_of(key, first), end); }
};
