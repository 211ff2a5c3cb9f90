#include "fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#if defined(SIM_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#define USE_UCONTEXT 1
#include <ucontext.h>

#include <map>
#endif

namespace sim {

constexpr long STACK_BYTES = 512 * 1024;  // address space; a page becomes memory when it is touched

static u8* stacks;
static int stack_count;

void make_stacks(int count) {
    if (count <= stack_count) return;
    long page = sysconf(_SC_PAGESIZE);
    void* memory = mmap(nullptr, count * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fatal("machine", 0, format("no memory for the stacks of %d threads", count));
    stacks = static_cast<u8*>(memory);
    stack_count = count;
    for (int i = 0; i < count; ++i) mprotect(stacks + i * STACK_BYTES, page, PROT_NONE);
}

bool in_stack_guard(const void* address, int* owner) {
    long offset = static_cast<const u8*>(address) - stacks;
    if (!stacks || offset < 0 || offset >= stack_count * STACK_BYTES) return false;
    *owner = int(offset / STACK_BYTES);
    return true;
}

#ifdef USE_UCONTEXT

static std::map<void**, ucontext_t> contexts;  // keyed by where the stack pointer would be kept

static void** key_of(Thread& thread) { return &thread.stack_pointer; }

void prepare_fiber(Thread& thread, void (*body)()) {
    ucontext_t& context = contexts[key_of(thread)];
    getcontext(&context);
    context.uc_stack.ss_sp = stacks + thread.id * STACK_BYTES + sysconf(_SC_PAGESIZE);
    context.uc_stack.ss_size = STACK_BYTES - sysconf(_SC_PAGESIZE);
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
    thread.stack_pointer = &context;
}

void switch_fiber(void** from, void* to) {
    ucontext_t& here = contexts[from];
    *from = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}

#else

// Layout of a suspended fiber's stack, from its stack pointer up: the preserved registers, then where to go on.
#if defined(__x86_64__)
asm(R"(
.text
.type sim_switch, %function
sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size sim_switch, .-sim_switch
)");
constexpr int RETURN_WORD = 6, FRAME_WORDS = 8;  // a function expects its stack pointer at 8 below a multiple of 16
#else
asm(R"(
.text
.type sim_switch, %function
sim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size sim_switch, .-sim_switch
)");
constexpr int RETURN_WORD = 11, FRAME_WORDS = 20;
#endif
extern "C" void sim_switch(void** from, void* to);

void prepare_fiber(Thread& thread, void (*body)()) {
    u64* top = reinterpret_cast<u64*>(stacks + (thread.id + 1) * STACK_BYTES);
    u64* frame = top - FRAME_WORDS;
    for (int i = 0; i < FRAME_WORDS; ++i) frame[i] = 0;
    frame[RETURN_WORD] = reinterpret_cast<u64>(body);
    thread.stack_pointer = frame;
}

void switch_fiber(void** from, void* to) { sim_switch(from, to); }

#endif

}  // namespace sim
