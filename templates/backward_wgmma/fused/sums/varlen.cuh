// Where the sums of dQ stand: a place for each head and 64 queries of a sequence, 64 x HEAD_DIM floats in the order of C fragments.
// A sequence of n rows that begins at row r has the places from r / 64 + its number on: those end before the next one's begin.
DEVICE i64 dq_places(const Params& p) { return i64(p.heads_q) * (p.seqlen_q / 64 + p.batch); }
DEVICE i64 dq_place(const Params& p, const Share& share, int head, int query) {
    const int begin = share.sequence.row_begin;
    return i64(head) * (p.seqlen_q / 64 + p.batch) + begin / 64 + share.sequence.number + (query - begin) / 64;
}
