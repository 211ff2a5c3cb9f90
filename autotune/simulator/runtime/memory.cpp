#include "memory.hpp"

#include <algorithm>

namespace sim {

constexpr u8 POISON = 0xff;  // NaN in every float type

std::vector<Buffer> buffers;
static std::vector<u8> data;                     // dynamic shared memory
static std::vector<Access> written;              // for each byte
static std::vector<std::vector<Access>> read_by;  // [warp][byte]: the last lane's

void reset_memory() {
    data.assign(block.smem_bytes, POISON);
    written.assign(block.smem_bytes, Access{});
    read_by.resize(block.warp.size());
    for (auto& accesses : read_by) accesses.assign(block.smem_bytes, Access{});
}

u8* shared_bytes(u32 address) { return data.data() + (address - SHARED_BASE); }

// ---- shared memory

static std::string place(u32 address) { return format("shared byte %d", int(address - SHARED_BASE)); }

void check_shared_bounds(u32 address, int bytes, bool writes, int line) {
    long offset = long(address) - SHARED_BASE;
    if (offset < 0 || offset + bytes > long(block.smem_bytes))
        fatal("out of bounds", line, format("%s %s %d bytes at shared byte %ld; the block has %u", name_of(*self).c_str(),
                                            writes ? "writes" : "reads", bytes, offset, block.smem_bytes));
    if (address % bytes)
        fatal("misaligned", line, format("%s %s %d bytes at shared byte %ld", name_of(*self).c_str(),
                                         writes ? "writes" : "reads", bytes, offset));
}

static std::string agent_name(const Access& a) {
    int warp = a.agent - warp_agent(block.warp[0]);
    return a.agent < block.threads ? name_of(block.thread[a.agent]) : warp < 0 ? "the copy engine" : format("warp %d", warp);
}

static bool happened_before(const Thread& thread, const Access& a) {
    return a.step != PENDING && (a.agent == thread.id || order_seen(thread, a.agent, a.step));
}

static bool same(const Access& a, const Access& b) { return a.step == b.step && a.agent == b.agent; }

static void race(const Thread& thread, const char* verb, u32 address, const char* other_verb, const Access& other, int line) {
    const char* why = other.step != PENDING ? "nothing orders the two"
                      : other.agent == thread.id ? "that is asynchronous and has not been waited for"
                                                 : "that is asynchronous and may still be under way";
    finding("race", line, format("%s %s %s, which %s %s at line %d, and %s", name_of(thread).c_str(), verb, place(address).c_str(),
                                 agent_name(other).c_str(), other_verb, other.line, why), other.line);
}

static void check_after_writes(const Thread& thread, const char* verb, u32 address, int bytes, int line) {
    const Access* w = &written[address - SHARED_BASE];
    for (int i = 0; i < bytes; ++i) {
        if (i && same(w[i], w[i - 1])) continue;
        if (w[i].step && !happened_before(thread, w[i])) return race(thread, verb, address + i, "wrote", w[i], line);
    }
}

void stamp_read(const Thread& thread, u32 address, int bytes, u32 agent, u32 step, int line) {
    const Access* w = &written[address - SHARED_BASE];
    for (int i = 0; i < bytes; ++i)
        if (!w[i].step) {
            finding("uninitialised read", line, format("%s reads %s, which nobody has written", name_of(thread).c_str(),
                                                       place(address + i).c_str()));
            break;
        }
    check_after_writes(thread, "reads", address, bytes, line);
    std::fill_n(&read_by[thread.warp->id][address - SHARED_BASE], bytes, Access{step, u16(agent), u16(line)});
}

void stamp_write(const Thread& thread, u32 address, int bytes, u32 agent, u32 step, int line) {
    check_after_writes(thread, "writes", address, bytes, line);
    for (const auto& accesses : read_by) {
        const Access* r = &accesses[address - SHARED_BASE];
        for (int i = 0; i < bytes; ++i) {
            if (!r[i].step || (i && same(r[i], r[i - 1]))) continue;
            if (!happened_before(thread, r[i])) {
                race(thread, "writes", address + i, "reads", r[i], line);
                break;
            }
        }
    }
    std::fill_n(&written[address - SHARED_BASE], bytes, Access{step, u16(agent), u16(line)});
}

void settle_write(u32 address, int bytes, u32 agent, u32 step) {
    Access* w = &written[address - SHARED_BASE];
    for (int i = 0; i < bytes; ++i)
        if (w[i].step == PENDING && w[i].agent == agent) w[i].step = step;
}

const u8* shared_read(u32 address, int bytes, int line) {
    self->line = line;
    check_shared_bounds(address, bytes, false, line);
    stamp_read(*self, address, bytes, self->id, order_now(*self), line);
    return shared_bytes(address);
}

u8* shared_write(u32 address, int bytes, int line) {
    self->line = line;
    check_shared_bounds(address, bytes, true, line);
    stamp_write(*self, address, bytes, self->id, order_now(*self), line);
    return shared_bytes(address);
}

// ---- global memory

static const Buffer* nearest_buffer(const u8* address) {
    auto distance = [&](const Buffer& b) {
        return address < b.begin ? b.begin - address : address >= b.begin + b.bytes ? address - (b.begin + b.bytes) + 1 : 0;
    };
    const Buffer* best = nullptr;
    for (const Buffer& b : buffers)
        if (!best || distance(b) < distance(*best)) best = &b;
    return best;
}

std::string describe_global(const void* pointer, int bytes) {
    const u8* address = static_cast<const u8*>(pointer);
    if (!address) return "a null pointer";
    const Buffer* b = nearest_buffer(address);
    long offset = b ? address - b->begin : 0;
    if (!b || offset < -(1L << 24) || offset > long(b->bytes) + (1L << 24)) return format("%p, which is near no array", pointer);
    if (offset < 0) return format("%ld bytes before %s", -offset, b->name.c_str());
    if (offset >= long(b->bytes)) return format("%ld bytes after the end of %s", offset - long(b->bytes), b->name.c_str());
    const char* how = offset + bytes > long(b->bytes) ? ", across its end" : "";
    return format("byte %ld of %s%s", offset, b->name.c_str(), how);
}

static void check_global(const void* pointer, int bytes, bool writes, int line) {
    const u8* address = static_cast<const u8*>(pointer);
    const char* verb = writes ? "writes" : "reads";
    const Buffer* b = address ? nearest_buffer(address) : nullptr;
    if (!b || address < b->begin || address + bytes > b->begin + b->bytes)
        fatal("out of bounds", line, format("%s %s %d bytes at %s", name_of(*self).c_str(), verb, bytes,
                                            describe_global(pointer, bytes).c_str()));
    if (std::find(b->mask + (address - b->begin), b->mask + (address - b->begin) + bytes, 0) != b->mask + (address - b->begin) + bytes)
        fatal("out of bounds", line, format("%s %s %d bytes at %s, in a gap between its rows", name_of(*self).c_str(), verb, bytes,
                                            describe_global(pointer, bytes).c_str()));
    if (writes && !b->writable)
        fatal("out of bounds", line, format("%s writes to %s, an input", name_of(*self).c_str(), describe_global(pointer, bytes).c_str()));
    if (reinterpret_cast<u64>(pointer) % bytes)
        fatal("misaligned", line, format("%s %s %d bytes at %s", name_of(*self).c_str(), verb, bytes,
                                         describe_global(pointer, bytes).c_str()));
}

const u8* global_read(const void* pointer, int bytes, int line) {
    self->line = line;
    check_global(pointer, bytes, false, line);
    return static_cast<const u8*>(pointer);
}

u8* global_write(void* pointer, int bytes, int line) {
    self->line = line;
    check_global(pointer, bytes, true, line);
    return static_cast<u8*>(pointer);
}

}  // namespace sim
