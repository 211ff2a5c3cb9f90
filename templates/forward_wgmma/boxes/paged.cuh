#include "lib/sequences/pages.cuh"

// Boxes of K and V in the pages of a cache: box_rows keys each, the most that divide a page as well as a tile. Each lane looks up
// and copies one.
struct KeyBoxes {
    Pages pages;
    int head, box_rows, key_begin, key_end;
    DEVICE KeyBoxes(const Params& p, const Work& work, const KvTiles<BLOCK_N>& tiles)
        : pages(p, work), head(work.head_kv), box_rows(p.box_rows), key_begin(tiles.key_begin), key_end(tiles.key_end) {}
    // Starts the copies of a tile. All lanes of the warp call it. Boxes that nobody sees lie outside of the cache: zeros.
    template <typename Tile> DEVICE void load(const Tile& tile, const TensorMap& map, u32 barrier, int first_key) const {
        const int row = lane_id() * box_rows, key = first_key + row;
        if (row >= BLOCK_N) return;
        Pages::Place at{-1, 0};
        if (key < key_end && key + box_rows > key_begin) at = pages.find(key);
#pragma unroll
        for (int panel = 0; panel < Tile::PANELS; ++panel)
            tma_load(tile.base + panel * Tile::PANEL_BYTES + row * 128, map, barrier, panel * 64, at.slot, head, at.page, CACHE_EVICT_LAST);
    }
};
