#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// Sequences of any length that follow each other in packed arrays. Rows and keys are counted through all of them, so that row
// r is row r of the array: an address needs no more than in a batch of one.
struct Sequence : Keys {
    int row_begin, row_end;  // queries

    Sequence() = default;
    // Empty beyond the last one. Lengths are cut to what the arrays have, so that wrong ones read nothing outside.
    DEVICE Sequence(const Params& p, int n) : Keys{n, 0, 0, 0}, row_begin(0), row_end(0) {
        if (n >= p.batch) return;
        row_begin = min_of(max_of(p.cu_seqlens_q[n], 0), p.seqlen_q);
        row_end = min_of(max_of(p.cu_seqlens_q[n + 1], row_begin), p.seqlen_q);
        key_begin = min_of(max_of(p.cu_seqlens_k[n], 0), p.seqlen_k);
        key_end = min_of(max_of(p.cu_seqlens_k[n + 1], key_begin), p.seqlen_k);
        diagonal = key_end - row_end;
    }
};
