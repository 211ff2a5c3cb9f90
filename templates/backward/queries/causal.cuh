// The queries of a sequence that see some key, or all keys, of [key_begin, key_end): those from the one that stands at the key on.
struct Observers {
    int begin, end;            // queries outside see none of them
    int whole_begin, whole_end;  // those inside see all of them
    DEVICE Observers(const Params&, const Sequence& s, int key_begin, int key_end)
        : begin(min_of(max_of(key_begin - s.diagonal, s.row_begin), s.row_end)), end(s.row_end),
          whole_begin(key_end - 1 - s.diagonal), whole_end(s.row_end) {}
};
