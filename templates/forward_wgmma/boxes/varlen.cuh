// Boxes of K and V in packed arrays: one for a tile, at its first key, whatever sequences its rows belong to.
struct KeyBoxes {
    int head;
    DEVICE KeyBoxes(const Params&, const Work& work, const KvTiles<BLOCK_N>&) : head(work.head_kv) {}
    // Starts the copies of a tile. All lanes of the warp call it.
    template <typename Tile> DEVICE void load(const Tile& tile, const TensorMap& map, u32 barrier, int first_key) const {
        if (lane_id() == 0) load_tile(tile, map, barrier, first_key, head, 0, CACHE_EVICT_LAST);
    }
};
