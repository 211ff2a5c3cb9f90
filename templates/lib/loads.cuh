// The loader's part: one thread that keeps the rings full, block after block.
DEVICE void load_blocks(const Params& p, const Rings& rings, int blocks) {
//% if split_keys
    launch_dependents();  // forward_combine may be put in place once all blocks have begun
    blocks *= p.num_splits;
//% endif
    Place<Q_STAGES> q_place;
    Place<NUM_STAGES> k_place, v_place;
    for (int block = block_id(); block < blocks; block = draw_block(p, blocks)) {
//% if split_keys
        const int unsplit = block / p.num_splits, split = block - unsplit * p.num_splits;
        const Work work(p, unsplit);
        const KvTiles<BLOCK_N> tiles = tiles_of_split({Mask(p), work.query_begin, work.query_end}, split, p.num_splits);
//% else
        const Work work(p, block);
        const KvTiles<BLOCK_N> tiles(Mask(p), work.query_begin, work.query_end);
//% endif
        auto load_k = [&](int tile) {
            mbarrier_wait(rings.k.empty(k_place.stage), k_place.phase ^ 1);
            mbarrier_arrive_expect(rings.k.full(k_place.stage), KTile::BYTES);
            load_tile(k_tile(k_place.stage), p.k_map, rings.k.full(k_place.stage), tiles.first_key(tile), work.head_kv, work.batch, CACHE_EVICT_LAST);
            k_place.advance();
        };
        mbarrier_wait(rings.q.empty(q_place.stage), q_place.phase ^ 1);
//% if split_keys
        task_at(q_place.stage).set(0, Task{work, tiles, true, split});
//% else
        task_at(q_place.stage).set(0, Task{work, tiles, true});
//% endif
        mbarrier_arrive_expect(rings.q.full(q_place.stage), tiles.empty() ? 0 : NUM_WARPGROUPS * QTile::BYTES);
        for (int group = 0; group < NUM_WARPGROUPS && !tiles.empty(); ++group)
            load_tile(q_tile(q_place.stage, group), p.q_map, rings.q.full(q_place.stage), work.query(group * UNIT_ROWS),
                      work.head_begin, work.batch, CACHE_EVICT_FIRST);
        q_place.advance();
        if (tiles.empty()) continue;
        load_k(tiles.first());
#pragma unroll 1  // four copies would push the groups' code out of the instruction cache
        for (int tile = tiles.first(); tiles.contains(tile); tile = tiles.next(tile)) {
            if (tiles.contains(tiles.next(tile))) load_k(tiles.next(tile));  // K runs one tile ahead, as its use does
            mbarrier_wait(rings.v.empty(v_place.stage), v_place.phase ^ 1);
            mbarrier_arrive_expect(rings.v.full(v_place.stage), VTile::BYTES);
            load_tile(v_tile(v_place.stage), p.v_map, rings.v.full(v_place.stage), tiles.first_key(tile), work.head_kv, work.batch, CACHE_EVICT_LAST);
            v_place.advance();
        }
    }
    if (!p.tickets) return;
    mbarrier_wait(rings.q.empty(q_place.stage), q_place.phase ^ 1);
    task_at(q_place.stage).set(0, Task{});
    mbarrier_arrive(rings.q.full(q_place.stage));
}
