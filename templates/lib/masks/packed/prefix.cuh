#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// Causal, bottom-right, but for the first `p.prefix` keys of each sequence, which all of its rows see.
struct Mask {
    int first, prefix_end, diagonal;
    DEVICE Mask(const Params& p, const Keys& keys)
        : first(keys.key_begin), prefix_end(keys.key_begin + min_of(p.prefix, keys.key_end - keys.key_begin)),
          diagonal(keys.diagonal) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return first; }
    DEVICE int key_end(int row_end) const { return max_of(prefix_end, row_end + diagonal); }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return first; }
    DEVICE int shared_end(int row_begin) const { return max_of(prefix_end, row_begin + diagonal + 1); }
    // Row `row` sees keys [row_begin, row_end) of its tiles' own: none of those comes before the sequence.
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return max_of(prefix_end, row + diagonal + 1); }
};
