#include "lib/base.cuh"
#include "lib/params.cuh.j2"
#include "lib/sequences/keys.cuh"

// Where the keys of a sequence stand in a cache of pages: key j is slot j % page_size of the page that the sequence's table names
// at j / page_size; without a table, of page `number`. Table entries of keys that do not exist are not read.
struct Pages {
    const int* table;
    int number, page_size, page_shift;
    u32 page_magic;

    DEVICE Pages(const Params& p, const Keys& keys)
        : table(p.page_table ? p.page_table + keys.number * p.page_table_stride : nullptr), number(keys.number),
          page_size(p.page_size), page_shift(p.page_shift), page_magic(p.page_magic) {}

    struct Place { int page, slot; };
    DEVICE Place find(int key) const {
        const int index = int(u64(u32(key)) * page_magic >> (31 + page_shift));  // key / page_size
        return {table ? table[index] : number, key - index * page_size};
    }
    // Elements from the first slot of page 0 to a key's row.
    DEVICE i64 offset(int key, i64 page_stride, i64 row_stride) const {
        const Place at = find(key);
        return at.page * page_stride + at.slot * row_stride;
    }
};
