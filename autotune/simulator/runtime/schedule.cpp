// Who runs next; how the lanes of a warp and the warps of a block wait for each other; what a deadlock looks like.
#include <algorithm>

#include "fiber.hpp"

namespace sim {

Thread* self;
Block block;
Random chance;
Policy policy;

int thread_id() { return self->in_block; }
int block_id() { return block.id * block.cluster + self->rank; }
int grid_size() { return block.grid * block.cluster; }

static void* main_stack;
static std::vector<int> running;  // threads of each block that have not finished
static int current_warp, budget;
static std::vector<int> order;  // of the warps, for Policy::priority

constexpr int BARRIERS = 16;
struct Barrier {
    int threads = 0, arrived = 0;
    int line = 0;
    std::vector<Warp*> waiting;
    std::vector<u32> clock;
};
static std::vector<Barrier> barriers;  // BARRIERS of each block, and that of the cluster

// ---- choosing

void wake(Thread& t) {
    t.wait = Wait::none;
    t.warp->ready |= 1u << t.lane;
}

void set_waiting(Thread& t, Wait wait, u32 object, u32 parity, int line) {
    t.wait = wait, t.wait_object = object, t.wait_parity = parity, t.line = line;
    t.warp->ready &= ~(1u << t.lane);
}

// Lands one asynchronous operation that is in flight; false if there is none.
static bool land_one() {
    bool (*const kinds[])() = {land_copy, land_bulk_copy, land_bulk_store, land_multiply};
    for (u32 first = chance.below(4), i = 0; i < 4; ++i)
        if (kinds[(first + i) % 4]()) return true;
    return false;
}

static bool choose_warp() {
    int count = int(block.warp.size()), first = int(chance.below(count));
    if (policy.priority && chance.one_in(8)) std::swap(order[chance.below(count)], order[chance.below(count)]);
    for (int i = 0; i < count; ++i) {
        int w = policy.priority ? order[i] : (first + i) % count;
        if (!block.warp[w].ready) continue;
        current_warp = w;
        budget = policy.quantum ? 1 + int(chance.below(2 * policy.quantum)) : 1 << 30;
        return true;
    }
    return false;
}

static void deadlock();

// The fiber that shall run now. The lanes of a warp run by turns, from a random first.
static Thread* choose() {
    for (;;) {
        if ((budget > 0 && block.warp[current_warp].ready) || choose_warp()) break;
        if (!land_one() && !end_dependencies()) deadlock();
    }
    Warp& warp = block.warp[current_warp];
    u32 turn = chance.below(WARP), ready = warp.ready >> turn | u32(u64(warp.ready) << (WARP - turn));
    return warp.lanes[(turn + __builtin_ctz(ready)) % WARP];
}

// Gives the processor to the fiber that shall run now; returns when it is this one's turn again.
void pass_on() {
    Thread* me = self;
    Thread* next = choose();
    if (next == me) return;
    self = next;
    switch_fiber(&me->stack_pointer, next->stack_pointer);
}

// ---- warps

void collective(WarpOperation operation, void* argument, int line) {
    Thread& t = *self;
    Warp& warp = *t.warp;
    t.operation = operation, t.argument = argument;
    set_waiting(t, Wait::collective, 0, 0, line);
    warp.waiting |= 1u << t.lane;
    if (warp.waiting != 0xffffffffu) return pass_on();
    void* arguments[WARP];
    for (int i = 0; i < WARP; ++i) {
        Thread& other = *warp.lanes[i];
        if (other.operation != operation || other.line != line)
            fatal("barrier misuse", line, format("%s calls a warp operation here while lane %d of its warp calls one at line %d",
                                                 name_of(t).c_str(), i, other.line));
        arguments[i] = other.argument;
        other.wait = Wait::none;
    }
    warp.waiting = 0;
    warp.ready = 0xffffffffu;
    operation(arguments);
    --budget;
    if (policy.landing == Landing::mixed && chance.one_in(4)) land_one();
    if (!(warp.ready >> t.lane & 1) || budget <= 0) pass_on();
}

void sync_warp(int line) {
    collective([](void* const*) { order_warp(*self->warp); }, nullptr, line);
}

// ---- barriers

static void barrier_complete(Barrier& b) {
    for (Warp* warp : b.waiting)
        for (Thread* lane : warp->lanes) {
            order_acquire(*lane, b.clock.data());
            wake(*lane);
        }
    b.waiting.clear();
    b.arrived = b.threads = 0;
    b.clock = order_empty();
}

static std::string barrier_name(u32 index) {
    return index == barriers.size() - 1 ? "the barrier of the cluster" : format("barrier %u", index % BARRIERS);
}

struct BarrierCall { int index, threads; bool wait; int line; };

static void barrier_warp(void* const* arguments) {
    const BarrierCall call = *static_cast<const BarrierCall*>(arguments[0]);
    Warp& warp = *self->warp;
    Barrier& b = barriers[call.index];
    if (b.arrived && b.threads != call.threads)
        fatal("barrier misuse", call.line, format("%s is for %d threads here and for %d at line %d", barrier_name(call.index).c_str(),
                                                  call.threads, b.threads, b.line));
    b.threads = call.threads, b.line = call.line;
    b.arrived += WARP;
    for (Thread* lane : warp.lanes) {
        order_release(*lane, b.clock.data());
        if (call.wait) set_waiting(*lane, Wait::barrier, call.index, 0, call.line);
    }
    if (call.wait) b.waiting.push_back(&warp);
    if (b.arrived > b.threads)
        fatal("barrier misuse", call.line, format("%s is for %d threads, and warp %d is one more", barrier_name(call.index).c_str(),
                                                  b.threads, warp.id));
    if (b.arrived == b.threads) barrier_complete(b);
}

void barrier(int id, int threads, bool wait, int line) {
    if (threads == 0) threads = block.threads_each;
    if (id < 0 || id >= BARRIERS || threads < WARP || threads % WARP || threads > block.threads_each)
        fatal("barrier misuse", line, format("barrier %d for %d threads, in a block of %d", id, threads, block.threads_each));
    BarrierCall call{self->rank * BARRIERS + id, threads, wait, line};
    collective(barrier_warp, &call, line);
}

void cluster_barrier(int line) {
    BarrierCall call{int(barriers.size()) - 1, block.threads, true, line};
    collective(barrier_warp, &call, line);
}

// ---- deadlock

static std::string waits_for(const Thread& t) {
    switch (t.wait) {
        case Wait::none: return "runs";
        case Wait::collective: return "waits for the other lanes of its warp";
        case Wait::barrier: {
            const Barrier& b = barriers[t.wait_object];
            return format("waits at %s, where %d of %d threads have arrived", barrier_name(t.wait_object).c_str(), b.arrived, b.threads);
        }
        case Wait::mbarrier: return describe_mbarrier(t.wait_object, t.wait_parity);
        case Wait::multiply: return "waits for a multiply that not all warps of its warpgroup have started";
        case Wait::dependencies: return "waits for the kernels before this one";
        case Wait::finished: return "has finished";
    }
    return "";
}

static void deadlock() {
    std::string text = "nobody can go on: ";
    int line = 0;
    for (size_t i = 0; i < block.thread.size();) {
        const Thread& first = block.thread[i];
        std::string what = waits_for(first);
        size_t end = i + 1;
        while (end < block.thread.size() && block.thread[end].line == first.line && waits_for(block.thread[end]) == what) ++end;
        if (i) text += "; ";
        text += end - i == 1 ? name_of(first) : name_of(first) + " to " + name_of(block.thread[end - 1]);
        text += first.wait == Wait::finished ? " has finished" : format(" [line %d] ", first.line) + what;
        if (first.wait != Wait::finished && !line) line = first.line;
        i = end;
    }
    fatal("deadlock", line, text);
}

// ---- a block

static void (*thread_body)();

static void fiber_main() {
    thread_body();
    set_waiting(*self, Wait::finished, 0, 0, 0);
    if (--running[self->rank] == 0) {
        leave_memory(self->rank);
        if (std::any_of(running.begin(), running.end(), [](int threads) { return threads > 0; })) pass_on();
        Thread* me = self;
        self = nullptr;
        switch_fiber(&me->stack_pointer, main_stack);
    }
    pass_on();
    __builtin_unreachable();
}

void start_block(int id, int threads_each, int cluster, u32 smem_bytes) {
    const int threads = threads_each * cluster;
    block.id = id, block.threads = threads, block.smem_bytes = smem_bytes;
    block.cluster = cluster, block.threads_each = threads_each;
    block.thread.assign(threads, Thread{});
    block.warp.assign(threads / WARP, Warp{});
    order.resize(threads / WARP);
    for (int w = 0; w < threads / WARP; ++w) {
        block.warp[w].id = w, block.warp[w].ready = 0xffffffffu;
        order[w] = w;
        std::swap(order[w], order[chance.below(w + 1)]);
    }
    for (int i = 0; i < threads; ++i) {
        Thread& t = block.thread[i];
        t.id = i, t.lane = i % WARP, t.warp = &block.warp[i / WARP];
        t.in_block = i % threads_each, t.rank = i / threads_each;
        t.warp->lanes[t.lane] = &t;
    }
    order_reset();
    reset_global_order();
    reset_memory();
    reset_copies();
    reset_mbarriers();
    reset_bulk_copies();
    reset_bulk_stores();
    reset_multiplies();
    reset_dependencies();
    barriers.assign(cluster * BARRIERS + 1, Barrier{});
    for (Barrier& b : barriers) b.clock = order_empty();
}

void run_block(void (*body)()) {
    thread_body = body;
    running.assign(block.cluster, block.threads_each);
    for (Thread& t : block.thread) prepare_fiber(t, fiber_main);
    choose_warp();
    self = choose();
    switch_fiber(&main_stack, self->stack_pointer);
    while (land_copy()) {}
    finish_dependencies();
    if (int count = bulk_copies_in_flight())
        finding("race", 0, format("the block ended while %d copies into its shared memory were under way", count));
    if (int count = bulk_stores_in_flight())
        finding("race", 0, format("the block ended while %d stores from its shared memory were under way", count));
    while (land_bulk_store()) {}
}

}  // namespace sim
