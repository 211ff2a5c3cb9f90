// A box of a tensor and its place in shared memory.
#pragma once
#include <algorithm>

#include "mbarrier.hpp"

namespace sim {

struct Box {
    Tensor tensor;
    u32 address;
    long at[4];

    // Rows of a head, then the next head's.
    long lines() const { return long(tensor.box_rows * tensor.box_heads); }
    long pitch() const { return long(tensor.box_columns * tensor.element_bytes); }
    u32 bytes() const { return u32(lines() * pitch()); }
    // Global address of what of a line lies in the tensor: `inside` bytes, after `before` that do not. Null if nothing does.
    u8* global(long line, long& before, long& inside) const;
    // Where a chunk of 16 bytes stands.
    u32 shared(long line, long byte) const { return swizzled(address + u32(line * pitch() + byte), int(tensor.swizzle_bytes)); }
};

// Ends the run if it does not fit where it is to be; checks its global addresses.
Box checked_box(const void* tensor, u32 address, const int (&at)[4], bool writes_global, int line);

}  // namespace sim
