// Which accesses happened before which. A thread's clock says of every agent (thread or mbarrier) up to which of its steps
// this thread has seen its accesses; a release ends a step. An access is stamped with its agent and step.
#include <algorithm>

#include "state.hpp"

namespace sim {

static int components;
static std::vector<u32> clocks;  // (threads, components)
static std::vector<u32> warp_steps;

static u32* clock_of(int thread) { return clocks.data() + size_t(thread) * components; }

static void join(u32* into, const u32* from) {
    for (int i = 0; i < components; ++i) into[i] = std::max(into[i], from[i]);
}

void order_reset() {
    components = block.threads + MBARRIERS + int(block.warp.size());
    warp_steps.assign(block.warp.size(), 0);
    clocks.assign(size_t(block.threads) * components, 0);
    for (int i = 0; i < block.threads; ++i) clock_of(i)[i] = 1;
}

std::vector<u32> order_empty() { return std::vector<u32>(components, 0); }

int mbarrier_agent(int index) { return block.threads + index; }
int warp_agent(const Warp& warp) { return block.threads + MBARRIERS + warp.id; }

u32 order_warp_step(const Warp& warp) {
    u32 step = ++warp_steps[warp.id];
    for (const Thread* lane : warp.lanes) clock_of(lane->id)[warp_agent(warp)] = step;
    return step;
}

u32 order_now(const Thread& thread) { return clock_of(thread.id)[thread.id]; }

bool order_seen(const Thread& thread, u32 agent, u32 step) { return clock_of(thread.id)[agent] >= step; }

void order_release(const Thread& thread, u32* into) {
    join(into, clock_of(thread.id));
    ++clock_of(thread.id)[thread.id];
}

void order_acquire(const Thread& thread, const u32* from) { join(clock_of(thread.id), from); }

void order_warp(const Warp& warp) {
    std::vector<u32> all = order_empty();
    for (const Thread* lane : warp.lanes) order_release(*lane, all.data());
    for (const Thread* lane : warp.lanes) order_acquire(*lane, all.data());
}

}  // namespace sim
