#include "lib/base.cuh"
#include "lib/params.cuh.j2"

// Every query sees every key.
struct Mask {
    int seqlen_k;
    DEVICE Mask(const Params& p) : Mask(p, p.seqlen_q, p.seqlen_k) {}
    DEVICE Mask(const Params&, int, int keys) : seqlen_k(keys) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return 0; }
    DEVICE int key_end(int row_end) const { return seqlen_k; }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return 0; }
    DEVICE int shared_end(int row_begin) const { return seqlen_k; }
    // Row `row` sees keys [row_begin, row_end).
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return seqlen_k; }
};
