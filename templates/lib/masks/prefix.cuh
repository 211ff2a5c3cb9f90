#include "lib/base.cuh"
#include "lib/params.cuh.j2"

// Causal, bottom-right, but for the first `prefix` keys, which every row sees: row i sees key j iff
// j < max(prefix, i + seqlen_k - seqlen_q + 1).
struct Mask {
    int offset, prefix;
    DEVICE Mask(const Params& p) : Mask(p, p.seqlen_q, p.seqlen_k) {}
    DEVICE Mask(const Params& p, int queries, int keys) : offset(keys - queries), prefix(min_of(p.prefix, keys)) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return 0; }
    DEVICE int key_end(int row_end) const { return max_of(prefix, row_end + offset); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return 0; }
    DEVICE int shared_end(int row_begin) const { return max_of(prefix, row_begin + offset + 1); }
    // Row `row` sees keys [row_begin, row_end).
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return max_of(prefix, row + offset + 1); }
};
