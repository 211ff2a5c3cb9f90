// TMA: boxes of a tensor to swizzled shared memory. The bytes arrive at a random moment after the issue, and
// count towards an mbarrier.
#include "tma.hpp"

namespace sim {

struct BulkCopy {
    Box box;
    Mbarrier* mbarrier;
};
static std::vector<BulkCopy> in_flight;

void reset_bulk_copies() { in_flight.clear(); }
int bulk_copies_in_flight() { return int(in_flight.size()); }

u8* Box::global(long line, long& before, long& inside) const {
    const Tensor& t = tensor;
    const long place[4] = {at[0], at[1] + line % long(t.box_rows), at[2] + line / long(t.box_rows), at[3]};
    for (int i = 1; i < 4; ++i)
        if (place[i] < 0 || place[i] >= long(t.dims[i])) return nullptr;
    const long begin = std::max(at[0], 0L), end = std::min(at[0] + long(t.box_columns), long(t.dims[0]));
    if (begin >= end) return nullptr;
    before = (begin - at[0]) * long(t.element_bytes), inside = (end - begin) * long(t.element_bytes);
    return reinterpret_cast<u8*>(t.address) + begin * long(t.element_bytes) + place[1] * long(t.strides[0]) +
           place[2] * long(t.strides[1]) + place[3] * long(t.strides[2]);
}

Box checked_box(const void* tensor, u32 address, const int (&at)[4], bool writes_global, int line) {
    self->line = line;
    Box box;
    memcpy(&box.tensor, tensor, sizeof box.tensor);
    box.address = address;
    std::copy(at, at + 4, box.at);
    // The swizzle's pattern repeats at this many bytes: tiles that the kernel addresses itself must begin there.
    const u32 alignment = box.tensor.swizzle_bytes ? u32(box.tensor.swizzle_bytes) * 8 : 128;
    if (address % alignment)
        fatal("misaligned", line, format("a box stands at shared byte %d; it needs a multiple of %u", int(address - SHARED_BASE), alignment));
    if (address < SHARED_BASE || u64(address) + box.bytes() > u64(SHARED_BASE) + block.smem_bytes)
        fatal("out of bounds", line, format("a box of %u bytes stands at shared byte %d; the block has %u", box.bytes(),
                                            int(address - SHARED_BASE), block.smem_bytes));
    if (writes_global && std::any_of(at, at + 4, [](int first) { return first < 0; }))  // an H200 stops: illegal instruction
        fatal("out of bounds", line, "a box to store begins before its tensor; only a load may");
    for (long i = 0; i < box.lines(); ++i) {
        long before, inside;
        if (const u8* there = box.global(i, before, inside)) check_global(there, int(inside), 1, writes_global, line);
    }
    return box;
}

static void land(const BulkCopy& copy) {
    const Box& box = copy.box;
    std::vector<u8> data(box.pitch());
    for (long line = 0; line < box.lines(); ++line) {
        long before = 0, inside = 0;
        std::fill(data.begin(), data.end(), 0);
        if (const u8* source = box.global(line, before, inside)) memcpy(data.data() + before, source, inside);
        for (long i = 0; i < box.pitch(); i += 16)
            memcpy(shared_bytes(box.shared(line, i)), data.data() + i, std::min(16L, box.pitch() - i));
    }
    mbarrier_land(*copy.mbarrier, box.bytes());
}

void tma_load(u32 address, const void* tensor, u32 mbarrier, const int (&at)[4], int line) {
    BulkCopy copy{checked_box(tensor, address, at, false, line), &mbarrier_at(mbarrier, line)};
    if (!copy.mbarrier->init_fenced)
        finding("race", line, format("TMA uses an mbarrier, and no mbarrier_init_fence follows its initialisation at "
                                     "line %d", copy.mbarrier->init_line), copy.mbarrier->init_line);
    const Actor engine{*self, u32(copy.mbarrier->agent), copy.mbarrier->phases + 1, true, line};
    check_write(engine, address, int(copy.box.bytes()));
    stamp_write(engine, address, int(copy.box.bytes()));
    if (policy.landing == Landing::early || (policy.landing == Landing::mixed && chance.one_in(4))) return land(copy);
    in_flight.push_back(copy);
}

bool land_bulk_copy() {
    if (in_flight.empty()) return false;
    const u32 i = chance.below(u32(in_flight.size()));
    BulkCopy copy = in_flight[i];
    in_flight.erase(in_flight.begin() + i);
    land(copy);
    return true;
}

void fence_async_proxy(int line) {
    self->line = line;
    order_fence(*self, Visible::to_async_proxy);
}

}  // namespace sim
