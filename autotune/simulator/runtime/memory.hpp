// Shared memory with a history for each byte, and the buffers in global memory.
#pragma once
#include "state.hpp"

namespace sim {

// The last access of a kind to one byte. All zeros: none.
struct Access {
    u32 step;    // of the agent; PENDING: an asynchronous one that nobody has waited for
    u16 agent;
    u16 line : 15, async : 1;  // async: through the async proxy, by TMA or wgmma
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

// Who makes an access: `thread` answers for what happened before it; `agent` and `step` are what later ones must know of.
// `async`: through the async proxy, which sees ordinary writes only after a proxy fence.
struct Actor {
    const Thread& thread;
    u32 agent, step;
    bool async;
    int line;
};
Actor this_thread(int line);

u8* shared_bytes(u32 address);  // unchecked
// Where the 16-byte chunk at `address` stands under a swizzle of this span (128, 64 or 32 bytes; 0: none).
inline u32 swizzled(u32 address, int span) { return address ^ (address >> 7 & u32(span / 16 - 1) & (span ? 7u : 0u)) << 4; }

void check_shared_bounds(u32 address, int bytes, bool writes, int line);
void check_read(const Actor& actor, u32 address, int bytes);  // for races with writes, and for initialisation
void stamp_read(const Actor& actor, u32 address, int bytes);
void check_write(const Actor& actor, u32 address, int bytes);
void stamp_write(const Actor& actor, u32 address, int bytes);
// The asynchronous write of `agent` to these bytes has been waited for: from now on it counts as one of its `step`.
void settle_write(u32 address, int bytes, u32 agent, u32 step);
void settle_read(const Warp& warp, u32 address, int bytes, u32 agent, u32 step);

void check_global(const void* pointer, int bytes, int alignment, bool writes, int line);
void check_place(const void* pointer, int bytes, int alignment, const char* verb, int line);  // in an array; whenever
std::string describe_global(const void* address, int bytes);

}  // namespace sim
