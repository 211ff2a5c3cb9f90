// What the parts of the runtime share: threads, warps, the random choices of a run, findings.
#pragma once
#include <string>
#include <vector>

#include "sim.hpp"

namespace sim {

enum class Wait { none, collective, barrier, mbarrier, multiply, dependencies, finished };

struct Warp;
struct Thread {
    int id = 0, lane = 0;
    int in_block = 0, rank = 0;  // its number in its block, and that block's in the cluster
    Warp* warp = nullptr;
    int line = 0;  // where it stands or waits
    Wait wait = Wait::none;
    u32 wait_object = 0, wait_parity = 0;  // the barrier's index, or the mbarrier's address and the parity waited for
    WarpOperation operation = nullptr;
    void* argument = nullptr;
    void* stack_pointer = nullptr;
};

struct Warp {
    int id = 0;
    Thread* lanes[WARP] = {};
    u32 ready = 0;    // lanes that can run
    u32 waiting = 0;  // lanes that wait for the others of their warp
};

// One block at a time, or all blocks of a cluster at once: `threads`, numbered through, are those of all of them, and `id` and
// `grid` count clusters.
struct Block {
    int id = 0, threads = 0, grid = 0;
    int cluster = 1;       // blocks of it
    int threads_each = 0;  // threads of one block
    u32 smem_bytes = 0;    // of one block
    std::vector<Thread> thread;
    std::vector<Warp> warp;
};
extern Block block;

// ---- choices of a run, all from its seed

struct Random {
    u64 state = 0;
    u64 next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return state * 0x2545f4914f6cdd1dull;
    }
    u32 below(u32 n) { return u32((next() >> 32) * n >> 32); }
    bool one_in(u32 n) { return below(n) == 0; }
};
extern Random chance;

enum class Landing { early, late, mixed };
struct Policy {
    Landing landing = Landing::mixed;
    int quantum = 0;       // warp operations before another warp may run; 0: until the warp must wait
    bool priority = false;  // run the ready warp that stands first in a random order, else any
};
extern Policy policy;

// ---- findings

// Reports one, once for each (kind, lines). The run goes on.
void finding(const char* kind, int line, const std::string& message, int other_line = 0);
// Reports it and ends the process.
[[noreturn]] void fatal(const char* kind, int line, const std::string& message);
[[noreturn]] void finish();  // flushes the findings, and ends the process as a completed simulation

std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
std::string name_of(const Thread& thread);  // "warp 2 lane 5"

// ---- between the parts

void reset_launch();                                    // global.cpp
void start_block(int id, int threads_each, int cluster, u32 smem_bytes);  // fresh state of everything below
void run_block(void (*body)());                         // schedule.cpp
void reset_global_order();
void reset_memory();
void leave_memory(int rank);  // memory.cpp: the block's last thread has finished
void reset_copies();
void reset_mbarriers();
void reset_bulk_copies();
void reset_bulk_stores();
void reset_multiplies();
// Each lands one operation of its kind that is in flight; false if there is none.
bool land_copy();
bool land_bulk_copy();
bool land_bulk_store();
bool land_multiply();
int bulk_copies_in_flight();
int bulk_stores_in_flight();

// Kernels before this one that may still run (dependency.cpp).
void set_dependent(bool yes);       // whether those that follow are such launches
void reset_dependencies();
bool end_dependencies();            // lets those kernels end; false if no thread waits for that
void finish_dependencies();         // at the end of a block
bool too_early();                   // whether this thread must not touch an array yet
bool hidden(const void* address);   // whether plain pointers to this part of an array fail because of that
extern long long open_arrays;             // how far behind the arrays they are mapped once more, for reading, and never hidden

void wake(Thread& thread);
void set_waiting(Thread& thread, Wait wait, u32 object, u32 parity, int line);
void pass_on();                                                // schedule.cpp: lets others run
std::string describe_mbarrier(u32 address, u32 parity);        // mbarrier.cpp

// Happens-before order (order.cpp). Agents are the threads, the mbarriers (for the copies that they count), the warps (for
// what their lanes do as one), the warpgroups (for their multiplies) and the blocks of the grid (for what they publish). A
// clock has a component for each: the last of its steps that is known to have happened.
constexpr int MBARRIERS = 32;
constexpr int WARPGROUP_WARPS = 4;
enum class Visible { to_thread, to_async_proxy, to_device };
void order_reset();
std::vector<u32> order_empty();
int mbarrier_agent(int index);
int warp_agent(int warp);
int warpgroup_agent(int warpgroup);
int block_agent(int id);
u32 order_now(const Thread& thread);                           // the step that stamps its accesses
u32 order_step_of(const Thread& thread, u32 agent);            // the last that the thread knows
u32 order_warp_step(const Warp& warp);                         // the step of what its lanes do now as one
// Whether that step happened before what the thread does now, and, if `to` something else, a fence for that stood in between.
bool order_seen(const Thread& thread, u32 agent, u32 step, Visible to = Visible::to_thread);
void order_learn(const Thread& thread, u32 agent, u32 step);   // it has waited for that step
std::vector<u32> order_clock(const Thread& thread, Visible to);  // the component of each agent
void order_step(const Thread& thread);                         // what follows is not yet part of any release
void order_release(const Thread& thread, u32* into);           // what it did happened before whoever acquires from `into`
void order_acquire(const Thread& thread, const u32* from);
void order_warp(const Warp& warp);                             // its lanes see what each of them did
void order_fence(const Thread& thread, Visible to);            // what it has seen so far is visible there

}  // namespace sim
