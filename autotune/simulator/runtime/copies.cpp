// cp.async: copies that a thread starts, groups and waits for. The bytes arrive at a random moment in between.
#include "memory.hpp"

namespace sim {

struct Copy {
    u32 address;
    const u8* source;  // null: zeros
    int bytes;
    u32 group;
    bool landed;
};
struct Copies {
    std::vector<Copy> list;  // those not waited for, oldest first
    u32 group = 0;           // the one that is open
    size_t in_flight = 0;
};
static std::vector<Copies> copies;  // for each thread
static size_t in_flight;

void reset_copies() {
    copies.assign(block.threads, Copies{});
    in_flight = 0;
}

static void land(Copies& mine, Copy& copy) {
    if (copy.landed) return;
    copy.landed = true;
    --mine.in_flight, --in_flight;
    if (copy.source) memcpy(shared_bytes(copy.address), copy.source, copy.bytes);
    else memset(shared_bytes(copy.address), 0, copy.bytes);
}

void copy_async(u32 address, const void* global, int bytes, bool valid, int line) {
    const u8* source = valid ? global_read(global, bytes, line) : nullptr;
    self->line = line;
    check_shared_bounds(address, bytes, true, line);
    const Actor me{*self, u32(self->id), PENDING, false, line};
    check_write(me, address, bytes);
    stamp_write(me, address, bytes);
    Copies& mine = copies[self->id];
    mine.list.push_back({address, source, bytes, mine.group, false});
    ++mine.in_flight, ++in_flight;
    if (policy.landing == Landing::early || (policy.landing == Landing::mixed && chance.one_in(4))) land(mine, mine.list.back());
}

void copy_async_commit(int line) {
    self->line = line;
    ++copies[self->id].group;
}

void copy_async_wait(int pending, int line) {
    self->line = line;
    Copies& mine = copies[self->id];
    size_t done = 0;
    for (; done < mine.list.size() && int(mine.group - mine.list[done].group) > pending; ++done) {
        Copy& copy = mine.list[done];
        land(mine, copy);
        settle_write(copy.address, copy.bytes, self->id, order_now(*self));
    }
    mine.list.erase(mine.list.begin(), mine.list.begin() + done);
}

bool land_copy() {
    if (!in_flight) return false;
    for (u32 first = chance.below(block.threads), i = 0;; ++i) {
        Copies& some = copies[(first + i) % block.threads];
        if (!some.in_flight) continue;
        for (u32 k = chance.below(some.list.size());; k = (k + 1) % some.list.size())
            if (!some.list[k].landed) return land(some, some.list[k]), true;
    }
}

}  // namespace sim
