#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// Sequences of one length, each a batch entry of its own, in the words of sequences/varlen.cuh.
struct Sequence : Keys {
    int row_begin, row_end;  // queries

    Sequence() = default;
    DEVICE Sequence(const Params& p, int n) : Keys{n, 0, p.seqlen_k, p.seqlen_k - p.seqlen_q}, row_begin(0), row_end(p.seqlen_q) {}
};
