// Multiplies of a warpgroup. One starts when all four warps have called it, reads shared memory at a random moment after
// that, and is finished for a warp when it has waited for its group: until then its accumulators are poison.
#include <algorithm>
#include <deque>
#include <list>

#include "memory.hpp"

namespace sim {

constexpr u32 POISON = 0x7fc0dead;  // a NaN that arithmetic does not make

struct Call {  // what a lane passes
    Format format;
    float* c;
    int n;
    const u32* a_registers;
    u64 a, b;
    bool b_mn_major, accumulate;
    int line;
};

struct Multiply {
    Call call;  // of the first warp; the others' must be the same
    int warps = 0;
    u32 a_registers[WARPGROUP_WARPS][WARP][4];
    struct Accumulator* accumulator[WARPGROUP_WARPS];
};

// A register tile of one warp that belongs to the tensor cores.
struct Accumulator {
    float* registers[WARP];
    int n;
    u32 last;  // the multiply after which it may be free: its number + 1
    std::vector<float> value;  // (16, n)
};

struct WarpState {
    u32 calls = 0;              // multiplies that it has called
    std::vector<u32> groups;    // for each group that it has committed, `calls` then
    std::list<Accumulator> accumulators;
    bool fenced = false;
    u32 waits_for = 0;          // it is blocked until that many multiplies have landed; 0: it is not
};
struct Warpgroup {
    std::deque<Multiply> multiplies;  // of the block so far, by number
    u32 landed = 0;
    WarpState warp[WARPGROUP_WARPS];
};
static std::vector<Warpgroup> warpgroups;

void reset_multiplies() { warpgroups = std::vector<Warpgroup>(block.warp.size() / WARPGROUP_WARPS + 1); }

static Warpgroup& my_group() { return warpgroups[self->warp->id / WARPGROUP_WARPS]; }
static WarpState& my_state() { return my_group().warp[self->warp->id % WARPGROUP_WARPS]; }

// ---- operands in shared memory

struct Operand {
    u32 base, leading, stride;
    int swizzle;
    bool mn_major;
    // Address of element k of row (A) or column (B) i.
    u32 address(int i, int k) const {
        if (mn_major) return swizzled(base + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2, 128);
        if (!swizzle) return base + i / 8 * stride + i % 8 * 16 + k / 8 * leading + k % 8 * 2;
        return swizzled(base + i / 8 * stride + i % 8 * swizzle + k * 2, swizzle);
    }
};

static Operand operand(u64 descriptor, bool mn_major, int line) {
    const int spans[] = {0, 128, 64, 32};
    Operand o{u32(descriptor & 0x3fff) << 4, u32(descriptor >> 16 & 0x3fff) << 4, u32(descriptor >> 32 & 0x3fff) << 4,
              spans[descriptor >> 62], mn_major};
    if (descriptor >> 49 & 7) fatal("not simulated", line, "a descriptor with a base offset");
    if (mn_major && o.swizzle != 128) fatal("not simulated", line, "an MN-major operand without the 128-byte swizzle");
    return o;
}

// Calls visit(address) for each 16-byte chunk of `rows` x 16 elements.
template <typename Visit> static void each_chunk(const Operand& o, int rows, Visit visit) {
    if (o.mn_major)
        for (int k = 0; k < 16; ++k)
            for (int i = 0; i < rows; i += 8) visit(o.address(i, k));
    else
        for (int i = 0; i < rows; ++i)
            for (int k = 0; k < 16; k += 8) visit(o.address(i, k));
}

static void check_operand(const Call& call, const Operand& o, int rows, bool last_warp, u32 number) {
    const Warp& warp = *self->warp;
    const int group = warp.id / WARPGROUP_WARPS;
    const Actor actor{*warp.lanes[0], u32(warpgroup_agent(group)), number + 1, true, call.line};
    each_chunk(o, rows, [&](u32 address) {
        check_shared_bounds(address, 16, false, call.line);
        check_read(actor, address, 16);
        if (last_warp) stamp_read(actor, address, 16);
    });
}

// ---- landing

static void load(Format format, const Operand& o, int rows, float* matrix) {  // (rows, 16)
    for (int i = 0; i < rows; ++i)
        for (int k = 0; k < 16; ++k) {
            u16 bits;
            memcpy(&bits, shared_bytes(o.address(i, k)), 2);
            matrix[i * 16 + k] = to_float(format, bits);
        }
}

static void land(const Multiply& m) {
    const Call& call = m.call;
    std::vector<float> a(64 * 16), b_rows(call.n * 16), b(16 * call.n);
    if (call.a_registers) {
        for (int w = 0; w < WARPGROUP_WARPS; ++w)
            for (int lane = 0; lane < WARP; ++lane)
                for (int i = 0; i < 4; ++i) {
                    float* at = &a[(16 * w + lane / 4 + i % 2 * 8) * 16 + lane % 4 * 2 + i / 2 * 8];
                    at[0] = to_float(call.format, m.a_registers[w][lane][i] & 0xffff);
                    at[1] = to_float(call.format, m.a_registers[w][lane][i] >> 16);
                }
    } else {
        load(call.format, operand(call.a, false, call.line), 64, a.data());
    }
    load(call.format, operand(call.b, call.b_mn_major, call.line), call.n, b_rows.data());
    for (int n = 0; n < call.n; ++n)
        for (int k = 0; k < 16; ++k) b[k * call.n + n] = b_rows[n * 16 + k];
    for (int w = 0; w < WARPGROUP_WARPS; ++w) {
        std::vector<float>& c = m.accumulator[w]->value;
        if (!call.accumulate) std::fill(c.begin(), c.end(), 0.0f);
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < 16; ++k)
                for (int n = 0; n < call.n; ++n) c[i * call.n + n] += a[(16 * w + i) * 16 + k] * b[k * call.n + n];
    }
}

// Lands the oldest one that has started but not landed.
static bool land_next(Warpgroup& group) {
    if (group.landed == group.multiplies.size() || group.multiplies[group.landed].warps < WARPGROUP_WARPS) return false;
    land(group.multiplies[group.landed++]);
    return true;
}

bool land_multiply() {
    for (Warpgroup& group : warpgroups)
        if (land_next(group)) return true;
    return false;
}

// ---- registers

static bool is_poison(const float* registers, int n) {
    for (int i = 0; i < n / 2; ++i)
        if (memcmp(&registers[i], &POISON, 4)) return false;
    return true;
}

template <typename Visit> static void each_element(int n, Visit visit) {  // visit(lane, register, place in (16, n))
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < n / 2; ++i)
            visit(lane, i, (lane / 4 + i / 2 % 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2);
}

static void check_untouched(const Accumulator& acc, int line) {
    for (int lane = 0; lane < WARP; ++lane)
        if (!is_poison(acc.registers[lane], acc.n))
            finding("register hazard", line, format("warp %d lane %d: accumulators were written while a multiply was under way", self->warp->id, lane));
}

static Accumulator& take_registers(WarpState& state, void* const* calls, int n, u32 number, int line) {
    for (Accumulator& acc : state.accumulators)
        if (acc.registers[0] == static_cast<const Call*>(calls[0])->c) {
            check_untouched(acc, line);
            acc.last = number + 1;
            return acc;
        }
    state.accumulators.push_back({});
    Accumulator& acc = state.accumulators.back();
    acc.n = n, acc.last = number + 1, acc.value.resize(16 * n);
    for (int lane = 0; lane < WARP; ++lane) acc.registers[lane] = static_cast<const Call*>(calls[lane])->c;
    each_element(n, [&](int lane, int i, int place) {
        acc.value[place] = acc.registers[lane][i];
        memcpy(&acc.registers[lane][i], &POISON, 4);
    });
    return acc;
}

// ---- what a warp calls

static void finish_wait(Warp& warp, WarpState& state, u32 count, int line) {
    for (const Thread* lane : warp.lanes) order_learn(*lane, warpgroup_agent(warp.id / WARPGROUP_WARPS), count);
    for (auto acc = state.accumulators.begin(); acc != state.accumulators.end();) {
        if (acc->last > count) {
            ++acc;
            continue;
        }
        check_untouched(*acc, line);
        each_element(acc->n, [&](int lane, int i, int place) { acc->registers[lane][i] = acc->value[place]; });
        state.fenced = false;
        acc = state.accumulators.erase(acc);
    }
}

// Lands what the blocked warps of the group wait for, if it has all started, and sets them free.
static void release_waiting(Warpgroup& group, int first_warp) {
    for (int w = 0; w < WARPGROUP_WARPS; ++w) {
        WarpState& state = group.warp[w];
        if (!state.waits_for) continue;
        while (group.landed < state.waits_for && land_next(group)) {}
        if (group.landed < state.waits_for) continue;
        Warp& warp = block.warp[first_warp + w];
        finish_wait(warp, state, state.waits_for, warp.lanes[0]->line);
        state.waits_for = 0;
        for (Thread* lane : warp.lanes) wake(*lane);
    }
}

static void call_warp(void* const* calls) {
    const Call& call = *static_cast<const Call*>(calls[0]);
    Warp& warp = *self->warp;
    Warpgroup& group = my_group();
    WarpState& state = my_state();
    const int w = warp.id % WARPGROUP_WARPS;
    if (!state.fenced) finding("register hazard", call.line, format("warp %d multiplies without wgmma_fence since it could last use its registers", warp.id));
    const u32 number = state.calls++;
    if (number == group.multiplies.size()) group.multiplies.push_back({call, 0, {}, {}});
    Multiply& m = group.multiplies[number];
    for (int lane = 0; lane < WARP; ++lane) {
        const Call& other = *static_cast<const Call*>(calls[lane]);
        if (other.a != m.call.a || other.b != m.call.b || other.n != m.call.n || other.accumulate != m.call.accumulate)
            fatal("barrier misuse", call.line, "the threads of a warpgroup multiply different matrices");
        if (call.a_registers) memcpy(m.a_registers[w][lane], other.a_registers, sizeof m.a_registers[w][lane]);
    }
    const bool last_warp = ++m.warps == WARPGROUP_WARPS;
    if (!call.a_registers) check_operand(call, operand(call.a, false, call.line), 64, last_warp, number);
    check_operand(call, operand(call.b, call.b_mn_major, call.line), call.n, last_warp, number);
    m.accumulator[w] = &take_registers(state, calls, call.n, number, call.line);
    if (last_warp && policy.landing == Landing::early) land_next(group);
    if (last_warp) release_waiting(group, warp.id - w);
}

void wgmma(Format format, float* c, int n, const u32* a_registers, u64 a, u64 b, bool b_mn_major, bool accumulate, int line) {
    Call call{format, c, n, a_registers, a, b, b_mn_major, accumulate, line};
    collective(call_warp, &call, line);
}

void wgmma_fence(int line) {
    collective([](void* const*) { my_state().fenced = true; }, nullptr, line);
}

void wgmma_commit(int line) {
    collective([](void* const*) { my_state().groups.push_back(my_state().calls); }, nullptr, line);
}

struct WaitCall { int pending, line; };

static void wait_warp(void* const* calls) {
    const WaitCall& call = *static_cast<const WaitCall*>(calls[0]);
    WarpState& state = my_state();
    if (int(state.groups.size()) <= call.pending) return;
    state.waits_for = state.groups[state.groups.size() - 1 - call.pending];
    if (!state.waits_for) return;
    for (Thread* lane : self->warp->lanes) set_waiting(*lane, Wait::multiply, 0, 0, call.line);
    release_waiting(my_group(), self->warp->id / WARPGROUP_WARPS * WARPGROUP_WARPS);
}

void wgmma_wait(int pending, int line) {
    WaitCall call{pending, line};
    collective(wait_warp, &call, line);
}

void set_registers(int, int line) {
    collective([](void* const*) {}, nullptr, line);
}

}  // namespace sim
