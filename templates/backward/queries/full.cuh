// The queries of a sequence that see some key, or all keys, of [key_begin, key_end): every query sees every key.
struct Observers {
    int begin, end;            // queries outside see none of them
    int whole_begin, whole_end;  // those inside see all of them
    DEVICE Observers(const Params&, const Sequence& s, int, int)
        : begin(s.row_begin), end(s.row_end), whole_begin(s.row_begin), whole_end(s.row_end) {}
};
