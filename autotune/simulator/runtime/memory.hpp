// Shared memory with a history for each byte, and the buffers in global memory.
#pragma once
#include "state.hpp"

namespace sim {

// The last access of a kind to one byte. All zeros: none.
struct Access {
    u32 step;    // of the agent; PENDING: an asynchronous one that nobody has waited for
    u16 agent;
    u16 line;
};
constexpr u32 PENDING = 0xffffffff;

struct Buffer {
    std::string name;
    u8* begin;
    size_t bytes;
    bool writable;
    const u8* mask;  // one byte for each: not 0 where there is an element
};
extern std::vector<Buffer> buffers;

u8* shared_bytes(u32 address);  // unchecked
void check_shared_bounds(u32 address, int bytes, bool writes, int line);
// Checks an access by `thread` against those before it, and stamps it with `agent` and its `step`.
void stamp_read(const Thread& thread, u32 address, int bytes, u32 agent, u32 step, int line);
void stamp_write(const Thread& thread, u32 address, int bytes, u32 agent, u32 step, int line);
// The asynchronous write of `agent` to these bytes has been waited for: from now on it counts as one of its `step`.
void settle_write(u32 address, int bytes, u32 agent, u32 step);

std::string describe_global(const void* address, int bytes);

}  // namespace sim
