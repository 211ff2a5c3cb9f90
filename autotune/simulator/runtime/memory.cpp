#include "memory.hpp"

#include <algorithm>
#include <unordered_map>

namespace sim {

constexpr u8 POISON = 0xff;  // NaN in every float type

static std::vector<u8> data;                     // dynamic shared memory
static std::vector<Access> written;              // for each byte
static std::vector<std::vector<Access>> read_by;  // [warp of the block][byte]: the last lane's
// Threads may write, without order, the value that is already there, each before its own reads: whoever comes after one of
// them or after the first writer reads that value. For each such byte, those that wrote it again.
static std::unordered_map<u32, std::vector<Access>> co_writers;

// Blocks of a cluster stand one behind the other; what one of them has read in another one, and who has ended.
struct RemoteRead {
    u32 address;
    int bytes;
    Access access;
};
static std::vector<std::vector<RemoteRead>> remote_reads;  // [block]
static std::vector<bool> ended;
static u32 window;  // bytes from one block to the next

static u32 base_of(int rank) { return SHARED_BASE + rank * window; }
static int rank_of(u32 address) { return int((address - SHARED_BASE) / window); }
u32 shared_base() { return base_of(self->rank); }

void reset_memory() {
    window = (block.smem_bytes + 1024) / 1024 * 1024;  // swizzles are the same everywhere
    const size_t bytes = size_t(window) * block.cluster;
    data.assign(bytes, POISON);
    written.assign(bytes, Access{});
    co_writers.clear();
    read_by.resize(block.threads_each / WARP);
    for (auto& accesses : read_by) accesses.assign(bytes, Access{});
    remote_reads.assign(block.cluster, {});
    ended.assign(block.cluster, false);
}

static std::vector<Access>& reads_of(const Warp& warp) { return read_by[warp.id % read_by.size()]; }

u8* shared_bytes(u32 address) { return data.data() + (address - SHARED_BASE); }

static std::string place(u32 address) {
    const int rank = rank_of(address);
    const std::string text = format("shared byte %d", int(address - base_of(rank)));
    return rank == self->rank ? text : text + format(" of block %d of the cluster", rank);
}

void check_shared_bounds(u32 address, int bytes, bool writes, int line) {
    long offset = long(address) - shared_base();
    if (offset < 0 || offset + bytes > long(block.smem_bytes))
        fatal("out of bounds", line, format("%s %s %d bytes at shared byte %ld; the block has %u", name_of(*self).c_str(),
                                            writes ? "writes" : "reads", bytes, offset, block.smem_bytes));
    if (address % bytes)
        fatal("misaligned", line, format("%s %s %d bytes at shared byte %ld", name_of(*self).c_str(),
                                         writes ? "writes" : "reads", bytes, offset));
}

static std::string agent_name(const Access& a) {
    if (a.agent < block.threads) return name_of(block.thread[a.agent]);
    if (a.agent < warp_agent(0)) return "TMA";
    if (a.agent < warpgroup_agent(0)) return format("warp %d", a.agent - warp_agent(0));
    return format("the multiply of warpgroup %d", a.agent - warpgroup_agent(0));
}

static bool same(const Access& a, const Access& b) { return a.step == b.step && a.agent == b.agent; }

static bool happened_before(const Actor& actor, const Access& a) {
    return a.step != PENDING && (a.agent == actor.thread.id || a.agent == actor.agent || order_seen(actor.thread, a.agent, a.step));
}

static void race(const Actor& actor, const char* verb, u32 address, const char* other_verb, const Access& other, const char* why) {
    if (other.step == PENDING) why = "that copy has not been waited for";
    finding("race", actor.line, format("%s %s %s, which %s %s at line %d, and %s", name_of(actor.thread).c_str(), verb,
                                       place(address).c_str(), agent_name(other).c_str(), other_verb, other.line, why), other.line);
}

static const char* unordered(const Actor& actor, const Access& a) {
    if (!happened_before(actor, a)) return "nothing orders the two";
    if (actor.async && !a.async && !order_seen(actor.thread, a.agent, a.step, Visible::to_async_proxy))
        return "no proxy fence makes that visible to the async proxy";
    return nullptr;
}

static bool knows_co_writer(const Actor& actor, u32 address) {
    auto found = co_writers.find(address);
    if (found == co_writers.end()) return false;
    return std::any_of(found->second.begin(), found->second.end(), [&](const Access& a) { return !unordered(actor, a); });
}

static void check_after_writes(const Actor& actor, const char* verb, u32 address, int bytes) {
    const Access* w = &written[address - SHARED_BASE];
    for (int i = 0; i < bytes; ++i) {
        if (!w[i].step || (i && same(w[i], w[i - 1]))) continue;
        const char* why = unordered(actor, w[i]);
        if (why && !knows_co_writer(actor, address + i)) return race(actor, verb, address + i, "wrote", w[i], why);
    }
}

void check_read(const Actor& actor, u32 address, int bytes) {
    const Access* w = &written[address - SHARED_BASE];
    for (int i = 0; i < bytes; ++i)
        if (!w[i].step) {
            finding("uninitialised read", actor.line, format("%s reads %s, which nobody has written", name_of(actor.thread).c_str(),
                                                             place(address + i).c_str()));
            break;
        }
    check_after_writes(actor, "reads", address, bytes);
}

static Access stamp_of(const Actor& actor) {
    Access stamp{};
    stamp.step = actor.step, stamp.agent = u16(actor.agent), stamp.line = actor.line & 0x7fff, stamp.async = actor.async;
    return stamp;
}

void stamp_read(const Actor& actor, u32 address, int bytes) {
    std::fill_n(&reads_of(*actor.thread.warp)[address - SHARED_BASE], bytes, stamp_of(actor));
}

void check_write(const Actor& actor, u32 address, int bytes) {
    check_after_writes(actor, "writes", address, bytes);
    for (const auto& accesses : read_by) {
        const Access* r = &accesses[address - SHARED_BASE];
        for (int i = 0; i < bytes; ++i) {
            if (!r[i].step || (i && same(r[i], r[i - 1]))) continue;
            if (const char* why = unordered(actor, r[i])) {
                race(actor, "writes", address + i, "reads", r[i], why);
                break;
            }
        }
    }
    for (const RemoteRead& r : remote_reads[rank_of(address)])
        if (r.address < address + bytes && address < r.address + r.bytes)
            if (const char* why = unordered(actor, r.access)) return race(actor, "writes", address, "reads", r.access, why);
}

void stamp_write(const Actor& actor, u32 address, int bytes) {
    std::fill_n(&written[address - SHARED_BASE], bytes, stamp_of(actor));
    if (!co_writers.empty())
        for (int i = 0; i < bytes; ++i) co_writers.erase(address + i);
}

// Whether an ordinary write of these bytes changes nothing that is there for good, and other threads use them unordered.
static bool repeats_a_write(const Actor& actor, u32 address, const void* data, int bytes) {
    if (memcmp(shared_bytes(address), data, bytes)) return false;
    bool ordered = true;
    for (int i = 0; i < bytes; ++i) {
        const Access& w = written[address - SHARED_BASE + i];
        const bool before = happened_before(actor, w);
        if (!w.step || (!before && (w.step == PENDING || w.agent >= block.threads))) return false;
        ordered &= before;
        for (const auto& accesses : read_by) {
            const Access& r = accesses[address - SHARED_BASE + i];
            ordered &= !r.step || happened_before(actor, r);
        }
    }
    for (const RemoteRead& r : remote_reads[rank_of(address)])
        if (r.address < address + bytes && address < r.address + r.bytes) ordered &= happened_before(actor, r.access);
    return !ordered;
}

static void settle(Access* accesses, int bytes, u32 agent, u32 step) {
    for (int i = 0; i < bytes; ++i)
        if (accesses[i].step == PENDING && accesses[i].agent == agent) accesses[i].step = step;
}

void settle_write(u32 address, int bytes, u32 agent, u32 step) { settle(&written[address - SHARED_BASE], bytes, agent, step); }

void settle_read(const Warp& warp, u32 address, int bytes, u32 agent, u32 step) {
    settle(&reads_of(warp)[address - SHARED_BASE], bytes, agent, step);
}

Actor this_thread(int line) { return {*self, u32(self->id), order_now(*self), false, line}; }

const u8* shared_read(u32 address, int bytes, int line) {
    self->line = line;
    check_shared_bounds(address, bytes, false, line);
    const Actor me = this_thread(line);
    check_read(me, address, bytes);
    stamp_read(me, address, bytes);
    return shared_bytes(address);
}

void shared_write(u32 address, const void* data, int bytes, int line) {
    self->line = line;
    check_shared_bounds(address, bytes, true, line);
    const Actor me = this_thread(line);
    if (repeats_a_write(me, address, data, bytes)) {
        for (int i = 0; i < bytes; ++i) co_writers[address + i].push_back(stamp_of(me));
        return;
    }
    check_write(me, address, bytes);
    stamp_write(me, address, bytes);
    memcpy(shared_bytes(address), data, bytes);
}

// ---- other blocks of the cluster

u32 remote_address(u32 address, int rank, int line) {
    self->line = line;
    if (rank < 0 || rank >= block.cluster)
        fatal("out of bounds", line, format("%s asks for block %d of a cluster of %d", name_of(*self).c_str(), rank, block.cluster));
    return address - shared_base() + base_of(rank);
}

const u8* remote_read(u32 address, int bytes, int line) {
    self->line = line;
    const long offset = long(address) - SHARED_BASE, within = offset % window;
    if (offset < 0 || offset >= long(window) * block.cluster || within + bytes > long(block.smem_bytes))
        fatal("out of bounds", line, format("%s reads %d bytes at shared byte %ld of block %ld of the cluster; a block has %u",
                                            name_of(*self).c_str(), bytes, within, offset / window, block.smem_bytes));
    if (address % bytes)
        fatal("misaligned", line, format("%s reads %d bytes at %s", name_of(*self).c_str(), bytes, place(address).c_str()));
    const Actor me = this_thread(line);
    const int owner = rank_of(address);
    if (ended[owner]) fatal("race", line, format("%s reads %s, which has ended", name_of(*self).c_str(), place(address).c_str()));
    check_read(me, address, bytes);
    remote_reads[owner].push_back({address, bytes, stamp_of(me)});
    return shared_bytes(address);
}

// A block's shared memory goes when it ends: what others have read of it must have happened before, as one of its threads knows.
void leave_memory(int rank) {
    ended[rank] = true;
    const Thread* first = &block.thread[rank * block.threads_each];
    for (const RemoteRead& r : remote_reads[rank])
        if (std::none_of(first, first + block.threads_each, [&](const Thread& t) { return order_seen(t, r.access.agent, r.access.step); }))
            return finding("race", r.access.line, format("%s reads shared byte %d of block %d of the cluster, which may end before that",
                                                         agent_name(r.access).c_str(), int(r.address - base_of(rank)), rank));
}

}  // namespace sim
