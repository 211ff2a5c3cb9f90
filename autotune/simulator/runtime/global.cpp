// The arrays in global memory: bounds, and the order of accesses by several blocks, which only tickets and fences make.
#include <algorithm>
#include <map>

#include "memory.hpp"

namespace sim {

std::vector<Buffer> buffers;

// The last write to a byte of a writable array in this launch.
struct GlobalWrite {
    u32 step = 0;  // of `thread` in `block`; 0: none
    u16 block = 0, thread = 0, line = 0;
};
static std::vector<std::vector<GlobalWrite>> written;  // [buffer][byte]

// Blocks run one after the other, but nothing orders them unless one publishes what it has done (a fence, then an atomic)
// and the other acquires that (an atomic at the same place, then a fence).
using Clock = std::vector<u32>;
static std::vector<std::vector<Clock>> publications;  // [block]: clocks of threads that published
static std::map<const void*, Clock> atomics;          // for each place: [block] how many of its publications stand there
static std::vector<Clock> acquired;  // of each thread of this block: what its atomics found, and its next fence makes known

void reset_launch() {
    written.assign(buffers.size(), {});
    for (size_t i = 0; i < buffers.size(); ++i)
        if (buffers[i].writable) written[i].resize(buffers[i].bytes);
    publications.assign(block.grid, {});
    atomics.clear();
}

void reset_global_order() {
    acquired.assign(block.threads, Clock(block.grid, 0));
}

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

void check_place(const void* pointer, int bytes, int alignment, const char* verb, int line) {
    const u8* address = static_cast<const u8*>(pointer);
    const Buffer* b = address ? nearest_buffer(address) : nullptr;
    if (!b || address < b->begin || address + bytes > b->begin + b->bytes)
        fatal("out of bounds", line, format("%s %s %d bytes at %s", name_of(*self).c_str(), verb, bytes,
                                            describe_global(pointer, bytes).c_str()));
    if (std::find(b->mask + (address - b->begin), b->mask + (address - b->begin) + bytes, 0) != b->mask + (address - b->begin) + bytes)
        fatal("out of bounds", line, format("%s %s %d bytes at %s, in a gap between its rows", name_of(*self).c_str(), verb, bytes,
                                            describe_global(pointer, bytes).c_str()));
    if (reinterpret_cast<u64>(pointer) % alignment)
        fatal("misaligned", line, format("%s %s %d bytes at %s", name_of(*self).c_str(), verb, bytes,
                                         describe_global(pointer, bytes).c_str()));
}

void check_global(const void* pointer, int bytes, int alignment, bool writes, int line) {
    const char* verb = writes ? "writes" : "reads";
    if (too_early())
        fatal("dependency", line, format("%s %s %s before it has waited for the kernels before this one", name_of(*self).c_str(), verb,
                                         describe_global(pointer, bytes).c_str()));
    check_place(pointer, bytes, alignment, verb, line);
    if (writes && !nearest_buffer(static_cast<const u8*>(pointer))->writable)
        fatal("out of bounds", line, format("%s writes to %s, an input", name_of(*self).c_str(), describe_global(pointer, bytes).c_str()));
}

static bool known(const GlobalWrite& w) {
    if (w.block == block.id) return w.thread == self->id || order_seen(*self, w.thread, w.step);
    const u32 count = order_step_of(*self, block_agent(w.block));
    return count && publications[w.block][count - 1][w.thread] >= w.step;
}

static GlobalWrite* history(const void* pointer) {
    const u8* address = static_cast<const u8*>(pointer);
    for (size_t i = 0; i < buffers.size(); ++i)
        if (address >= buffers[i].begin && address < buffers[i].begin + buffers[i].bytes && buffers[i].writable)
            return &written[i][address - buffers[i].begin];
    return nullptr;
}

static void check_order(const void* pointer, int bytes, const char* verb, int line) {
    const GlobalWrite* w = history(pointer);
    for (int i = 0; w && i < bytes; ++i) {
        if (!w[i].step || known(w[i])) continue;
        const std::string writer = w[i].block == block.id ? name_of(block.thread[w[i].thread]) : format("block %d", w[i].block * block.cluster);
        return finding("race", line, format("%s %s %s, which %s wrote at line %d, and nothing orders the two", name_of(*self).c_str(),
                                            verb, describe_global(pointer, bytes).c_str(), writer.c_str(), w[i].line), w[i].line);
    }
}

const u8* global_read(const void* pointer, int bytes, int line) {
    self->line = line;
    check_global(pointer, bytes, bytes, false, line);
    check_order(pointer, bytes, "reads", line);
    return static_cast<const u8*>(pointer);
}

void global_write(void* pointer, const void* data, int bytes, int line) {
    self->line = line;
    check_global(pointer, bytes, bytes, true, line);
    check_order(pointer, bytes, "writes", line);
    std::fill_n(history(pointer), bytes, GlobalWrite{order_now(*self), u16(block.id), u16(self->id), u16(line)});
    memcpy(pointer, data, bytes);
}

void fence_device(int line) {
    self->line = line;
    for (int b = 0; b < block.grid; ++b) order_learn(*self, block_agent(b), acquired[self->id][b]);
    order_fence(*self, Visible::to_device);
}

void add_floats(float* sums, const float* values, int count, int line) {
    self->line = line;
    check_global(sums, 4 * count, 4 * count, true, line);
    check_order(sums, 4 * count, "adds to", line);
    for (int i = 0; i < count; ++i) sums[i] += values[i];
}

u32 atomic_inc(u32* counter, u32 last, int line) {
    self->line = line;
    check_global(counter, 4, 4, true, line);
    Clock& here = atomics[counter];
    here.resize(block.grid);
    for (int b = 0; b < block.grid; ++b) acquired[self->id][b] = std::max(acquired[self->id][b], here[b]);
    const Clock mine = order_clock(*self, Visible::to_device);
    publications[block.id].push_back(mine);
    here[block.id] = u32(publications[block.id].size());
    for (int b = 0; b < block.grid; ++b)
        if (b != block.id) here[b] = std::max(here[b], mine[block_agent(b)]);
    const u32 before = *counter;
    *counter = before >= last ? 0 : before + 1;
    return before;
}

}  // namespace sim
