#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// Every query sees every key of its sequence.
struct Mask {
    int first, end;
    DEVICE Mask(const Params&, const Keys& keys) : first(keys.key_begin), end(keys.key_end) {}
    // Keys outside [key_begin, key_end) are seen by none of the rows [row_begin, row_end).
    DEVICE int key_begin(int row_begin) const { return first; }
    DEVICE int key_end(int row_end) const { return end; }
    // Keys inside [shared_begin, shared_end) are seen by all of them.
    DEVICE int shared_begin(int row_end) const { return first; }
    DEVICE int shared_end(int row_begin) const { return end; }
    // Row `row` sees keys [row_begin, row_end) of its tiles' own: none of those comes before the sequence.
    static constexpr bool HAS_ROW_BEGIN = false;
    DEVICE int row_begin(int row) const { return 0; }
    DEVICE int row_end(int row) const { return end; }
};
