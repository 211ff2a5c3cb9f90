// The queries of a sequence that see some key, or all keys, of [key_begin, key_end): all of them if that begins, or ends, within the
// first `p.prefix` keys of the sequence, and else those from the one that stands at the key on.
struct Observers {
    int begin, end;            // queries outside see none of them
    int whole_begin, whole_end;  // those inside see all of them
    DEVICE Observers(const Params& p, const Sequence& s, int key_begin, int key_end)
        : begin(min_of(max_of(key_begin - s.diagonal, s.row_begin), s.row_end)), end(s.row_end),
          whole_begin(key_end - 1 - s.diagonal), whole_end(s.row_end) {
        const int prefix_end = s.key_begin + min_of(p.prefix, s.key_end - s.key_begin);
        if (key_begin < prefix_end) begin = s.row_begin;
        if (key_end <= prefix_end) whole_begin = s.row_begin;
    }
};
