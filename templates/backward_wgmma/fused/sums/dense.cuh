// Where the sums of dQ stand: a place for each head and 64 queries of a sequence, 64 x HEAD_DIM floats in the order of C fragments.
DEVICE i64 dq_places(const Params& p) { return i64(p.batch) * p.heads_q * ceil_div(p.seqlen_q, 64); }
DEVICE i64 dq_place(const Params& p, const Share& share, int head, int query) {
    return (i64(share.batch) * p.heads_q + head) * ceil_div(p.seqlen_q, 64) + query / 64;
}
