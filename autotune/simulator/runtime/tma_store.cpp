// TMA the other way: boxes from shared memory to a tensor. A box is read at a random moment until its thread has
// waited for that.
#include "tma.hpp"

namespace sim {

struct BulkStore {
    Box box;
    Thread* thread;
    bool committed = false, landed = false;
};
static std::vector<BulkStore> stores;  // those not waited for, oldest first

void reset_bulk_stores() { stores.clear(); }
int bulk_stores_in_flight() { return int(stores.size()); }

static void land(BulkStore& store) {
    if (store.landed) return;
    store.landed = true;
    const Box& box = store.box;
    std::vector<u8> data(box.pitch());
    for (long line = 0; line < box.lines(); ++line) {
        long before = 0, inside = 0;
        u8* target = box.global(line, before, inside);
        if (!target) continue;
        for (long i = 0; i < box.pitch(); i += 16)
            memcpy(data.data() + i, shared_bytes(box.shared(line, i)), std::min(16L, box.pitch() - i));
        memcpy(target, data.data() + before, inside);
    }
}

void tma_store(const void* tensor, u32 address, const int (&at)[4], int line) {
    BulkStore store{checked_box(tensor, address, at, true, line), self};
    const Actor engine{*self, u32(self->id), PENDING, true, line};
    for (long i = 0; i < store.box.lines(); ++i) {
        long before, inside;
        if (!store.box.global(i, before, inside)) continue;
        for (long byte = before / 16 * 16; byte < before + inside; byte += 16) {
            check_read(engine, store.box.shared(i, byte), 16);
            stamp_read(engine, store.box.shared(i, byte), 16);
        }
    }
    stores.push_back(store);
    if (policy.landing == Landing::early || (policy.landing == Landing::mixed && chance.one_in(4))) land(stores.back());
}

void tma_store_commit(int line) {
    self->line = line;
    for (BulkStore& store : stores) store.committed |= store.thread == self;
}

void tma_store_wait_read(int line) {
    self->line = line;
    for (size_t i = 0; i < stores.size();) {
        BulkStore& store = stores[i];
        if (store.thread != self || !store.committed) {
            ++i;
            continue;
        }
        land(store);
        settle_read(*self->warp, store.box.address, int(store.box.bytes()), self->id, order_now(*self));
        stores.erase(stores.begin() + i);
    }
}

bool land_bulk_store() {
    for (BulkStore& store : stores)
        if (!store.landed) return land(store), true;
    return false;
}

}  // namespace sim
