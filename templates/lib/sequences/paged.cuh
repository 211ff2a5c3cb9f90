#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// Sequences whose queries follow each other in packed arrays, while their keys stand in the pages of a cache. Rows are counted
// through all sequences, so that row r is row r of the array; keys are counted from the first of each sequence.
struct Sequence : Keys {
    int row_begin, row_end;  // queries

    Sequence() = default;
    // Empty beyond the last one, and where another kernel serves the few queries that there are. Lengths are cut to what the
    // arrays have, so that wrong ones read nothing outside.
    DEVICE Sequence(const Params& p, int n) : Keys{n, 0, 0, 0}, row_begin(0), row_end(0) {
        if (n >= p.batch) return;
        row_begin = min_of(max_of(p.cu_seqlens_q[n], 0), p.seqlen_q);
        row_end = min_of(max_of(p.cu_seqlens_q[n + 1], row_begin), p.seqlen_q);
        if (row_end - row_begin < p.min_queries) row_end = row_begin;
        key_end = p.cache_seqlens ? min_of(max_of(p.cache_seqlens[n], 0), p.seqlen_k) : p.seqlen_k;
        diagonal = key_end - row_end;
    }
};
