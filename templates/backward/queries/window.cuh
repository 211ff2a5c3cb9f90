// The queries of a sequence that see some key, or all keys, of [key_begin, key_end): query i sees the keys from
// i + diagonal - left to i + diagonal + right. Sums stay in 32 bits as in masks/window.cuh.
struct Observers {
    int begin, end;            // queries outside see none of them
    int whole_begin, whole_end;  // those inside see all of them
    DEVICE Observers(const Params& p, const Sequence& s, int key_begin, int key_end)
        : begin(min_of(max_of(key_begin - s.diagonal - p.window_right, s.row_begin), s.row_end)),
          end(max_of(min_of(key_end - s.diagonal + p.window_left, s.row_end), begin)),
          whole_begin(key_end - 1 - s.diagonal - p.window_right), whole_end(key_begin + 1 - s.diagonal + p.window_left) {}
};
