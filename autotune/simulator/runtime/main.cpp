// The process that simulates one job. The job comes on standard input, a line for each fact; the arrays are a file, the program's
// only argument, that is mapped at a fixed address, so that the pointers in the kernels' arguments are known to who wrote the job.
//
//   memory ADDRESS BYTES                where to map the file
//   guard OFFSET BYTES                  whole pages that must not be touched
//   buffer NAME OFFSET BYTES MASK WRITABLE    an array, and the offset of its mask
//   seed NUMBER
//   step ENTRY GRID BLOCK SMEM_BYTES DEPENDENT CLUSTER OFFSET    a launch in clusters of so many blocks; its Params stand at OFFSET
//                                       of the file, and if DEPENDENT is not 0 it may begin before those before it have ended
//
// Findings go to standard output, a line each: kind TAB line TAB address of the instruction or 0 TAB message. The kind "machine" is
// none of the kernel's: no memory, no file. The first line is "ready", once all is set up; the last line of a completed simulation
// is "done".
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <new>
#include <set>
#include <sstream>
#include <tuple>

#include "fiber.hpp"
#include "memory.hpp"

namespace sim {

// ---- findings

constexpr int MAX_FINDINGS = 20;

std::string format(const char* text, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, text);
    vsnprintf(line, sizeof line, text, arguments);
    va_end(arguments);
    return line;
}

std::string name_of(const Thread& thread) {
    const std::string name = format("warp %d lane %d", thread.in_block / WARP, thread.lane);
    return block.cluster == 1 ? name : name + format(" of block %d", block.id * block.cluster + thread.rank);
}

static u64 faulting_address;  // of the instruction, within the program

void finding(const char* kind, int line, const std::string& message, int other_line) {
    static std::set<std::tuple<std::string, int, int>> known;
    if (!known.insert({kind, line, other_line}).second) return;
    printf("%s\t%d\t%llu\tblock %d: %s\n", kind, line, faulting_address, self ? block_id() : block.id * block.cluster,
           message.c_str());
    if (known.size() >= MAX_FINDINGS) finish();
}

void fatal(const char* kind, int line, const std::string& message) {
    finding(kind, line, message, 0);
    finish();
}

void finish() {
    printf("done\n");
    fflush(stdout);
    _exit(0);
}

extern "C" const char __ehdr_start __attribute__((visibility("hidden")));  // where the program was loaded

static u64 instruction_of(void* context) {
    const mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    u64 address = machine.gregs[REG_RIP];
#elif defined(__aarch64__)
    u64 address = machine.pc;
#else
    return (void)machine, 0;
#endif
    return address - reinterpret_cast<u64>(&__ehdr_start);
}

// An access through a plain pointer that missed every array, undefined behaviour, or a stack that overflowed.
static void on_fault(int signal, siginfo_t* info, void* context) {
    faulting_address = instruction_of(context);
    const void* address = info->si_addr;
    int owner = 0, line = self ? self->line : 0;
    if (signal == SIGBUS) fatal("machine", 0, "the file of the arrays lost its place on the disk");
    if (!self) fatal("crash", 0, format("signal %d at %p outside of any thread", signal, address));
    if (signal == SIGILL || signal == SIGTRAP)
        fatal("undefined behaviour", line, format("%s computes what C++ does not define", name_of(*self).c_str()));
    if (signal == SIGFPE) fatal("undefined behaviour", line, format("%s divides by zero", name_of(*self).c_str()));
    if (in_stack_guard(address, &owner)) fatal("crash", line, format("the stack of thread %d is full", owner));
    if (hidden(address))
        fatal("dependency", line, format("%s uses a pointer to %s before it has waited for the kernels before this one",
                                         name_of(*self).c_str(), describe_global(address, 1).c_str()));
    fatal("out of bounds", line, format("%s uses a pointer to %s", name_of(*self).c_str(), describe_global(address, 1).c_str()));
}

static void catch_faults() {
    static u8 handler_stack[64 * 1024];
    stack_t stack{};
    stack.ss_sp = handler_stack, stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigaction(signal, &action, nullptr);
}

// ---- the job

static Entry* entries;

Entry::Entry(const char* name, void (*call)(const void*)) : name(name), call(call), next(entries) { entries = this; }

static const Entry* entry;
static const void* params;

static void call_entry() { entry->call(params); }

static u8* map_file(const std::string& path, u64 address, u64 bytes) {
    int file = open(path.c_str(), O_RDWR);
    if (file < 0) fatal("machine", 0, format("the file of the arrays cannot be opened: %s", strerror(errno)));
    void* memory = mmap(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != reinterpret_cast<void*>(address))
        fatal("machine", 0, format("the arrays cannot be mapped at %llx: %s", address, strerror(errno)));
    void* again = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
    if (again == MAP_FAILED) fatal("machine", 0, format("the arrays cannot be mapped twice: %s", strerror(errno)));
    open_arrays = static_cast<u8*>(again) - static_cast<u8*>(memory);
    return static_cast<u8*>(memory);
}

// Consecutive seeds take the extremes of what is chosen once for a run in turn; the rest is random.
static void set_seed(u64 seed) {
    chance.state = (seed + 1) * 0x9e3779b97f4a7c15ull;
    for (int i = 0; i < 8; ++i) chance.next();
    const int quanta[] = {4, 0, 1, 32};
    policy.landing = Landing(seed % 3);
    policy.quantum = quanta[seed / 3 % 4];
    policy.priority = seed % 2 == 0;
}

static void launch(const std::string& name, int grid, int threads, u32 smem_bytes, int cluster, const u8* arguments) {
    for (entry = entries; entry && name != entry->name;) entry = entry->next;
    if (!entry) fatal("setup", 0, "the kernel has no entry " + name);
    params = arguments;
    if (grid % cluster) fatal("setup", 0, format("%d blocks are no multiple of a cluster of %d", grid, cluster));
    std::vector<int> blocks(grid / cluster);
    for (int i = 0; i < grid / cluster; ++i) {
        blocks[i] = i;
        std::swap(blocks[i], blocks[chance.below(i + 1)]);
    }
    block.grid = grid / cluster;
    reset_launch();
    make_stacks(threads * cluster);
    for (int id : blocks) {
        start_block(id, threads, cluster, smem_bytes);
        run_block(call_entry);
    }
}

static void run_job(const std::string& path) {
    u8* memory = nullptr;
    std::string text;
    while (std::getline(std::cin, text)) {
        std::istringstream words(text);
        std::string what, name;
        u64 a = 0, b = 0, c = 0, d = 0, e = 0, f = 0;
        words >> what;
        if (what == "memory") {
            words >> a >> b;
            memory = map_file(path, a, b);
        } else if (what == "guard") {
            words >> a >> b;
            mprotect(memory + a, b, PROT_NONE);
        } else if (what == "buffer") {
            words >> name >> a >> b >> c >> d;
            buffers.push_back({name, memory + a, b, d != 0, memory + c});
        } else if (what == "seed") {
            words >> a;
            set_seed(a);
        } else if (what == "step") {
            words >> name >> a >> b >> c >> d >> e >> f;
            if (entry == nullptr) printf("ready\n"), fflush(stdout);
            set_dependent(d != 0);
            launch(name, int(a), int(b), u32(c), int(e), memory + f);
        }
    }
}

}  // namespace sim

static void no_memory() { sim::fatal("machine", 0, "there is not enough memory"); }

int main(int, char** arguments) {
    std::set_new_handler(no_memory);
    sim::catch_faults();
    sim::run_job(arguments[1]);
    sim::finish();
}
