// The copy engine: boxes of a tensor to swizzled shared memory. The bytes arrive at a random moment after the issue, and
// count towards an mbarrier.
#include <algorithm>

#include "mbarrier.hpp"

namespace sim {

struct BulkCopy {
    Tensor tensor;
    u32 address;
    Mbarrier* mbarrier;
    long at[4];
};
static std::vector<BulkCopy> in_flight;

void reset_bulk_copies() { in_flight.clear(); }
int bulk_copies_in_flight() { return int(in_flight.size()); }

static long box_lines(const Tensor& t) { return long(t.box_rows * t.box_heads); }
static long line_bytes(const Tensor& t) { return long(t.box_columns * t.element_bytes); }

// Global address of a line of the box (rows of a head, then the next head's): what of it lies in the tensor is `bytes` bytes,
// after `before` that do not. Null if nothing does.
static const u8* source_of(const BulkCopy& copy, long line, long& before, long& bytes) {
    const Tensor& t = copy.tensor;
    const long at[4] = {copy.at[0], copy.at[1] + line % long(t.box_rows), copy.at[2] + line / long(t.box_rows), copy.at[3]};
    for (int i = 1; i < 4; ++i)
        if (at[i] < 0 || at[i] >= long(t.dims[i])) return nullptr;
    const long begin = std::max(at[0], 0L), end = std::min(at[0] + long(t.box_columns), long(t.dims[0]));
    if (begin >= end) return nullptr;
    before = (begin - at[0]) * long(t.element_bytes), bytes = (end - begin) * long(t.element_bytes);
    return reinterpret_cast<const u8*>(t.address) + begin * long(t.element_bytes) + at[1] * long(t.strides[0]) +
           at[2] * long(t.strides[1]) + at[3] * long(t.strides[2]);
}

static void land(const BulkCopy& copy) {
    const Tensor& t = copy.tensor;
    const long pitch = line_bytes(t);
    std::vector<u8> data(pitch);
    for (long line = 0; line < box_lines(t); ++line) {
        long before = 0, bytes = 0;
        std::fill(data.begin(), data.end(), 0);
        if (const u8* source = source_of(copy, line, before, bytes)) memcpy(data.data() + before, source, bytes);
        for (long i = 0; i < pitch; i += 16) {
            u32 address = copy.address + u32(line * pitch + i);
            memcpy(shared_bytes(swizzled(address, int(t.swizzle_bytes))), data.data() + i, std::min(16L, pitch - i));
        }
    }
    mbarrier_land(*copy.mbarrier, box_lines(t) * pitch);
}

void tma_load(u32 address, const void* tensor, u32 mbarrier, const int (&at)[4], int line) {
    BulkCopy copy;
    memcpy(&copy.tensor, tensor, sizeof copy.tensor);
    copy.address = address;
    copy.mbarrier = &mbarrier_at(mbarrier, line);
    std::copy(at, at + 4, copy.at);
    const Tensor& t = copy.tensor;
    const int bytes = int(box_lines(t) * line_bytes(t));
    if (!copy.mbarrier->init_fenced)
        finding("race", line, format("the copy engine uses an mbarrier, and no mbarrier_init_fence follows its initialisation at "
                                     "line %d", copy.mbarrier->init_line), copy.mbarrier->init_line);
    const u32 alignment = t.swizzle_bytes ? u32(t.swizzle_bytes) * 8 : 128;
    if (address % alignment || u64(address) + bytes > u64(SHARED_BASE) + block.smem_bytes)
        fatal(address % alignment ? "misaligned" : "out of bounds", line,
              format("a box of %d bytes goes to shared byte %d; it needs multiples of %u, and the block has %u bytes", bytes,
                     int(address - SHARED_BASE), alignment, block.smem_bytes));
    for (long i = 0; i < box_lines(t); ++i) {
        long before, inside;
        if (const u8* source = source_of(copy, i, before, inside)) check_global(source, int(inside), 1, false, line);
    }
    const Actor engine{*self, u32(copy.mbarrier->agent), copy.mbarrier->phases + 1, true, line};
    check_write(engine, address, bytes);
    stamp_write(engine, address, bytes);
    if (policy.landing == Landing::early || (policy.landing == Landing::mixed && chance.one_in(4))) return land(copy);
    in_flight.push_back(copy);
}

// The other way, done at once: the issuing thread waits for its reads before it lets anybody write there.
void tma_store(const void* tensor, u32 address, const int (&at)[4], int line) {
    BulkCopy copy;
    memcpy(&copy.tensor, tensor, sizeof copy.tensor);
    std::copy(at, at + 4, copy.at);
    const Tensor& t = copy.tensor;
    const long pitch = line_bytes(t);
    for (long i = 0; i < box_lines(t); ++i) {
        long before, bytes;
        u8* target = const_cast<u8*>(source_of(copy, i, before, bytes));
        if (!target) continue;
        check_global(target, int(bytes), 1, true, line);
        for (long b = before; b < before + bytes; b += 2)
            memcpy(target + b - before, shared_bytes(swizzled(address + u32(i * pitch + b), int(t.swizzle_bytes))), 2);
    }
}

bool land_bulk_copy() {
    if (in_flight.empty()) return false;
    u32 i = chance.below(u32(in_flight.size()));
    BulkCopy copy = in_flight[i];
    in_flight.erase(in_flight.begin() + i);
    land(copy);
    return true;
}

void fence_async_proxy(int line) {
    self->line = line;
    order_fence_proxy(*self);
}

}  // namespace sim
