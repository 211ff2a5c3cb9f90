#pragma once
#include "memory.hpp"

namespace sim {

struct Mbarrier {
    u32 address = 0;
    int agent = 0;
    int count = 0, pending = 0;  // arrivals that a phase needs, and still needs
    long bytes = 0;              // that the phase waits for; below 0 when they land before they are announced
    u32 phases = 0;              // completed
    int init_thread = 0, init_line = 0;
    u32 init_step = 0;
    bool init_fenced = false;    // known to TMA
    std::vector<u32> arrived, completed;  // what happened before the arrivals so far, and before the last completed phase
    std::vector<Thread*> waiters;
};

Mbarrier& mbarrier_at(u32 address, int line);  // ends the run if there is none
void mbarrier_land(Mbarrier& barrier, long bytes);  // bytes that it was told to expect have come

}  // namespace sim
