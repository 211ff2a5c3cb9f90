// Barriers in shared memory that count arrivals and bytes.
#include "mbarrier.hpp"

#include <algorithm>
#include <deque>

namespace sim {

static std::deque<Mbarrier> mbarriers;  // of the block, by their agent number

void reset_mbarriers() { mbarriers.clear(); }

Mbarrier& mbarrier_at(u32 address, int line) {
    self->line = line;
    for (Mbarrier& b : mbarriers)
        if (b.address == address) {
            if (b.init_thread != self->id && !order_seen(*self, b.init_thread, b.init_step))
                finding("race", line, format("%s uses the mbarrier at shared byte %u, and nothing orders that after its "
                                             "initialisation at line %d", name_of(*self).c_str(), address - SHARED_BASE, b.init_line));
            return b;
        }
    fatal("barrier misuse", line, format("there is no initialised mbarrier at shared byte %d", int(address - SHARED_BASE)));
}

void mbarrier_init(u32 address, int arrivals, int line) {
    const u64 fresh = 0;
    shared_write(address, &fresh, 8, line);
    for (const Mbarrier& b : mbarriers)
        if (b.address == address) fatal("barrier misuse", line, format("this mbarrier was already initialised at line %d", b.init_line));
    if (int(mbarriers.size()) == MBARRIERS) fatal("barrier misuse", line, format("a block has more than %d mbarriers", MBARRIERS));
    if (arrivals < 1) fatal("barrier misuse", line, "an mbarrier needs a count of at least 1");
    Mbarrier b;
    b.address = address, b.agent = mbarrier_agent(int(mbarriers.size()));
    b.count = b.pending = arrivals;
    b.init_thread = self->id, b.init_step = order_now(*self), b.init_line = line;
    b.arrived = b.completed = order_empty();
    mbarriers.push_back(b);
}

void mbarrier_init_fence(int line) {
    self->line = line;
    for (Mbarrier& b : mbarriers) b.init_fenced |= b.init_thread == self->id;
}

static void complete_if_full(Mbarrier& b) {
    if (b.pending || b.bytes) return;
    ++b.phases;
    b.pending = b.count;
    b.arrived[b.agent] = b.phases;
    b.completed = b.arrived;
    for (Thread* waiter : b.waiters) {
        order_acquire(*waiter, b.completed.data());
        wake(*waiter);
    }
    b.waiters.clear();
}

static void arrive(u32 address, int bytes, int line) {
    Mbarrier& b = mbarrier_at(address, line);
    if (b.pending == 0)
        fatal("barrier misuse", line, format("this phase already has its %d arrivals, and still waits for %ld bytes", b.count, b.bytes));
    order_release(*self, b.arrived.data());
    b.bytes += bytes;
    --b.pending;
    complete_if_full(b);
}

void mbarrier_arrive(u32 address, int line) { arrive(address, 0, line); }
void mbarrier_arrive_expect(u32 address, int bytes, int line) { arrive(address, bytes, line); }

void mbarrier_land(Mbarrier& b, long bytes) {
    b.bytes -= bytes;
    complete_if_full(b);
}

void mbarrier_wait(u32 address, u32 parity, int line) {
    Mbarrier& b = mbarrier_at(address, line);
    if ((b.phases & 1) != (parity & 1)) return order_acquire(*self, b.completed.data());
    set_waiting(*self, Wait::mbarrier, address, parity, line);
    b.waiters.push_back(self);
    pass_on();
}

std::string describe_mbarrier(u32 address, u32 parity) {
    for (const Mbarrier& b : mbarriers)
        if (b.address == address)
            return format("waits for parity %u of the mbarrier at shared byte %u, which is in phase %u with %d of %d arrivals and "
                          "%ld bytes to come", parity, address - SHARED_BASE, b.phases, b.count - b.pending, b.count, b.bytes);
    return "";
}

}  // namespace sim
