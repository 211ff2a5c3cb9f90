// One stack for each thread of a block, and the switch from one to another: a few nanoseconds, because nothing but the
// registers that a call preserves is exchanged. (swapcontext makes a system call each time; it serves other machines.)
#pragma once
#include "state.hpp"

namespace sim {

void make_stacks(int count);                          // at the start of the process; each ends in a page that cannot be touched
bool in_stack_guard(const void* address, int* owner);  // whether a fault at `address` is that of a stack that overflowed
void prepare_fiber(Thread& thread, void (*body)());   // the next switch to `thread` calls body(), which must not return
void switch_fiber(void** from, void* to);             // stores where it stands to *from, goes on at `to`

}  // namespace sim
