// A launch that may begin while the kernels before it run (programmatic dependent launch). Those end as late as they may: when
// every thread of the block waits for them or for one that does. Until then no array may be touched,
// but for prefetches and guesses.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "memory.hpp"

namespace sim {

static bool dependent;  // this launch
static bool pending;    // this block: the kernels before it have not ended
static u32 one_wrong;   // this block: of so many guesses, 0: none
static std::vector<std::pair<u32, u32>> waits;  // (thread, its step) of those that have waited

long long open_arrays;

void set_dependent(bool yes) { dependent = yes; }

// Makes all arrays, which have their pages for themselves, such that plain pointers cannot touch them, or can.
static void hide_arrays(bool hidden) {
    const u64 page = u64(sysconf(_SC_PAGESIZE));
    for (const Buffer& b : buffers) {
        const u64 first = reinterpret_cast<u64>(b.begin) / page * page, end = reinterpret_cast<u64>(b.begin) + b.bytes;
        const u64 bytes = (end - first + page - 1) / page * page;
        mprotect(reinterpret_cast<void*>(first), bytes, hidden ? PROT_NONE : PROT_READ | PROT_WRITE);
    }
}

void reset_dependencies() {
    pending = dependent;
    waits.clear();
    one_wrong = dependent && !chance.one_in(4) ? 4u << 5 * chance.below(3) : 0;
    if (pending) hide_arrays(true);
}

void wait_for_dependencies(int line) {
    self->line = line;
    if (pending) {
        set_waiting(*self, Wait::dependencies, 0, 0, line);
        pass_on();
    }
    waits.push_back({u32(self->id), order_now(*self)});
}

bool end_dependencies() {
    bool awaited = false;
    for (Thread& t : block.thread)
        if (t.wait == Wait::dependencies) awaited = true, wake(t);
    if (awaited) {
        pending = false;
        hide_arrays(false);
    }
    return awaited;
}

void finish_dependencies() {
    if (!pending) return;
    finding("dependency", 0, "the block ended and has not waited for the kernels before this one: whoever waits for this one "
                             "would not know that those have ended");
    pending = false;
    hide_arrays(false);
}

void prefetch(const void* pointer, int bytes, int line) {
    self->line = line;
    check_place(pointer, bytes, 16, "prefetches", line);
    if (bytes <= 0 || bytes % 16) fatal("misaligned", line, format("%d bytes are prefetched; it must be a multiple of 16", bytes));
}

int guess(const int* pointer, int line) {
    self->line = line;
    check_place(pointer, 4, 4, "reads", line);
    if (!pending) return *pointer;
    const int value = *reinterpret_cast<const int*>(reinterpret_cast<const u8*>(pointer) + open_arrays);
    if (one_wrong == 0 || !chance.one_in(one_wrong)) return value;
    return int(chance.one_in(2) ? u32(chance.next()) : u32(value) + chance.below(33) - 16);  // anything, or what could be true
}

bool too_early() {  // unless it has waited, or whatever orders threads tells it of one that has
    return dependent && std::none_of(waits.begin(), waits.end(), [](const std::pair<u32, u32>& wait) {
        return wait.first == u32(self->id) || order_seen(*self, wait.first, wait.second);
    });
}

bool hidden(const void* pointer) {
    const u8* address = static_cast<const u8*>(pointer);
    for (const Buffer& b : buffers)
        if (pending && address >= b.begin && address < b.begin + b.bytes) return true;
    return false;
}

}  // namespace sim
