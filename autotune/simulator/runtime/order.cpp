// Which accesses happened before which. A thread's clock says of every agent up to which of its steps this thread has seen
// its accesses; a release ends a step of the thread that makes it. Two more clocks stand behind it and travel with it: what is
// also visible to the async proxy, through which TMA and wgmma reach shared memory, and what is to other blocks.
#include <algorithm>

#include "state.hpp"

namespace sim {

static int components, first_block;
static std::vector<u32> clocks;  // (threads, Visible, components)
static std::vector<u32> warp_steps;

constexpr int CLOCKS = 3;  // of a thread: one for each Visible

static u32* clock_of(int thread) { return clocks.data() + size_t(thread) * CLOCKS * components; }

static void join(u32* into, const u32* from, int count) {
    for (int i = 0; i < count; ++i) into[i] = std::max(into[i], from[i]);
}

void order_reset() {
    int warps = int(block.warp.size());
    first_block = block.threads + MBARRIERS + warps + (warps + WARPGROUP_WARPS - 1) / WARPGROUP_WARPS;
    components = first_block + block.grid;
    warp_steps.assign(warps, 0);
    clocks.assign(size_t(block.threads) * CLOCKS * components, 0);
    for (int i = 0; i < block.threads; ++i) clock_of(i)[i] = 1;
}

std::vector<u32> order_empty() { return std::vector<u32>(CLOCKS * components, 0); }

int mbarrier_agent(int index) { return block.threads + index; }
int warp_agent(int warp) { return block.threads + MBARRIERS + warp; }
int block_agent(int id) { return first_block + id; }
int warpgroup_agent(int warpgroup) { return block.threads + MBARRIERS + int(block.warp.size()) + warpgroup; }

u32 order_step_of(const Thread& thread, u32 agent) { return clock_of(thread.id)[agent]; }
u32 order_now(const Thread& thread) { return order_step_of(thread, thread.id); }

u32 order_warp_step(const Warp& warp) {
    u32 step = ++warp_steps[warp.id];
    for (const Thread* lane : warp.lanes) order_learn(*lane, warp_agent(warp.id), step);
    return step;
}

bool order_seen(const Thread& thread, u32 agent, u32 step, Visible to) {
    return clock_of(thread.id)[int(to) * components + agent] >= step;
}

void order_learn(const Thread& thread, u32 agent, u32 step) {
    u32& known = clock_of(thread.id)[agent];
    known = std::max(known, step);
}

std::vector<u32> order_clock(const Thread& thread, Visible to) {
    const u32* clock = clock_of(thread.id) + int(to) * components;
    return {clock, clock + components};
}

void order_step(const Thread& thread) { ++clock_of(thread.id)[thread.id]; }

void order_release(const Thread& thread, u32* into) {
    join(into, clock_of(thread.id), CLOCKS * components);
    order_step(thread);
}

void order_acquire(const Thread& thread, const u32* from) { join(clock_of(thread.id), from, CLOCKS * components); }

void order_warp(const Warp& warp) {
    std::vector<u32> all = order_empty();
    for (const Thread* lane : warp.lanes) order_release(*lane, all.data());
    for (const Thread* lane : warp.lanes) order_acquire(*lane, all.data());
}

void order_fence(const Thread& thread, Visible to) {
    u32* clock = clock_of(thread.id);
    join(clock + int(to) * components, clock, components);
    order_step(thread);
}

}  // namespace sim
