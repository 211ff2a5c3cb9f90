// The loader's part where sequences are packed: one warp that keeps the rings full, item after item. Its lanes look for the work
// together; what only one thread may do, the first one does.
DEVICE void load_blocks(const Params& p, const Rings& rings) {
    Place<Q_STAGES> q_place;
    Place<NUM_STAGES> k_place, v_place;
    Walk walk(p);
    const bool first = lane_id() == 0;
    Work work = walk.find(p, block_id());
    const bool idle = !work.exists();  // the grid is made for the worst lengths
    while (work.exists()) {
        const KvTiles<BLOCK_N> tiles(Mask(p, work), work.query_begin, work.query_end);
        const KeyBoxes boxes(p, work, tiles);
        auto load = [&](const auto& tile, const TensorMap& map, const Ring& ring, auto& place, int first_key) {
            mbarrier_wait(ring.empty(place.stage), place.phase ^ 1);
            if (first) mbarrier_arrive_expect(ring.full(place.stage), tile.BYTES);
            sync_warp();  // no lane falls behind by a round of the ring, where a phase has the same parity again
            boxes.load(tile, map, ring.full(place.stage), first_key);
            place.advance();
        };
        auto load_k = [&](int tile) { load(k_tile(k_place.stage), p.k_map, rings.k, k_place, tiles.first_key(tile)); };
        mbarrier_wait(rings.q.empty(q_place.stage), q_place.phase ^ 1);
        if (first) {
            task_at(q_place.stage).set(0, Task{work, tiles, true});
            mbarrier_arrive_expect(rings.q.full(q_place.stage), NUM_WARPGROUPS * QTile::BYTES);
            for (int group = 0; group < NUM_WARPGROUPS; ++group)
                load_tile(q_tile(q_place.stage, group), p.q_map, rings.q.full(q_place.stage), work.query(group * UNIT_ROWS),
                          work.head_begin, 0, CACHE_EVICT_FIRST);
        }
        q_place.advance();
        load_k(tiles.first());
        for (int tile = tiles.first(); tiles.contains(tile); tile = tiles.next(tile)) {
            if (tiles.contains(tiles.next(tile))) load_k(tiles.next(tile));  // K runs one tile ahead, as its use does
            load(v_tile(v_place.stage), p.v_map, rings.v, v_place, tiles.first_key(tile));
        }
        const int drawn = first ? draw_block(p, walk.items) : 0;
        work = walk.find(p, shuffle(drawn, 0));
    }
    if (!p.tickets && !idle) return;
    mbarrier_wait(rings.q.empty(q_place.stage), q_place.phase ^ 1);
    if (!first) return;
    task_at(q_place.stage).set(0, Task{});
    mbarrier_arrive(rings.q.full(q_place.stage));
}
