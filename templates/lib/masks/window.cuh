#include "lib/base.cuh"
#include "lib/params.cuh.j2"

// A window, inclusive on both sides: row i sees key j iff i + offset - left <= j <= i + offset + right, with
// offset = seqlen_k - seqlen_q. Lengths are at most 2^30 and bounds at most 2^30 - 2^16, which stands for
// "unbounded", so that sums stay in 32 bits; causal is right = 0.
struct Mask {
    int seqlen_k, offset, left, right;
    DEVICE Mask(const Params& p) : Mask(p, p.seqlen_q, p.seqlen_k) {}
    DEVICE Mask(const Params& p, int queries, int keys)
        : seqlen_k(keys), offset(keys - queries), left(p.window_left), right(p.window_right) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return clamp(row_begin + offset - left); }
    DEVICE int key_end(int row_end) const { return clamp(row_end + offset + right); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return clamp(row_end - 1 + offset - left); }
    DEVICE int shared_end(int row_begin) const { return clamp(row_begin + 1 + offset + right); }
    // Row `row` sees keys [row_begin, row_end).
    static constexpr bool HAS_ROW_BEGIN = true;
    DEVICE int row_begin(int row) const { return row + offset - left; }
    DEVICE int row_end(int row) const { return min_of(row + offset + right + 1, seqlen_k); }
    DEVICE int clamp(int key) const { return min_of(max_of(key, 0), seqlen_k); }
};
