// Where a block over pages begins. Lengths, then the page table, then keys: read one after the other once the kernel before this
// one has ended they take 3 us. So a block takes what stands there before for right, has its first keys on their way when that
// kernel ends, and looks again meanwhile. Where it was wrong it begins anew.

// How the page table is read: as it stands, or as a guess of what will stand there, which is a page of the cache in any case.
DEVICE int read_entry(const int* entry) { return *entry; }
struct GuessEntry {
    int pages;
    DEVICE int operator()(const int* entry) const { return max_of(0, min_of(load_guess(entry), pages - 1)); }
};
// Of this lane's sequence.
template <typename How> DEVICE int own_length(const Params& p) { return lane_id() < p.batch ? length_of<How>(p, lane_id()) : 0; }

// Each lane keeps one length to look at again. Where each sequence has queries of its own, wrong numbers of them would look for
// some outside of q. A launch that does not come early counts no pages.
DEVICE bool may_guess(const Params& p) { return p.pages > 0 && p.batch <= WARP_SIZE && !p.query_starts; }
// The cut of this block's piece, given each lane's own length. If there is none, one without keys.
DEVICE Cut guess_cut(const Params& p, int length) {
    if (may_guess(p)) {
        auto passed = [](int, int through) { return block_id() < through; };
        const Cut cut = uniform(p) ? cut_of_piece(p, block_id()) : find_cut<Plainly>(p, [&](int) { return length; }, passed);
        if (cut.batch < p.batch) return cut;
    }
    return {0, 0, {0, p.seqlen_q}, 1, block_id(), 0};
}

struct Start {
    using Places = KvRows::Place[NUM_STAGES + 1];  // of a warp's next tiles to load
    int length;  // of this lane's sequence, by which the piece was found
    Piece piece;
    Tiles tiles;
    KvRows kv;
    Places found;

    DEVICE explicit Start(const Params& p) : Start(p, may_guess(p) ? own_length<Guessing>(p) : 0) {}
    DEVICE Start(const Params& p, int guessed) : Start(p, guess_cut(p, guessed), guessed, GuessEntry{p.pages}) {}
    template <typename Read> DEVICE Start(const Params& p, const Cut& cut, int of_lane, Read read)
        : length(of_lane), piece(p, cut, block_id() - cut.first_piece),
          tiles(Mask(p, cut.queries.count, cut.length), cut.queries.count), kv(p, piece.rows, tiles.key_begin, tiles.key_end, 0) {
        find(found, read);
    }
    DEVICE int first_tile() const { return piece.tile_begin + warp_id(); }
    template <typename Read> DEVICE void find(Places& places, Read read) const {
#pragma unroll
        for (int i = 0; i <= NUM_STAGES; ++i) places[i] = kv.find(tiles.first_key(first_tile() + i * NUM_WARPS), read);
    }

    // Waits for the kernels before this one. load_first(tile, places) starts loading; what it started last was right. False if
    // the block has no piece: the grid is made for the worst lengths.
    template <typename LoadFirst> DEVICE bool load(const Params& p, LoadFirst load_first) {
        const bool guessed = piece.cut.length > 0;
        if (guessed && p.prefetch_tiles > 0) prefetch_piece(p, piece, tiles);
        wait_for_dependencies(kv.k, kv.v, found[0].page[0]);
#pragma unroll 1
        for (bool known = !guessed;; known = true) {
            if (known) {
                const Cut cut = cut_of_piece(p, block_id());
                if (cut.batch == p.batch) return false;
                *this = Start(p, cut, 0, read_entry);
            }
            int length_now = 0;
            Places taken, now;
            if (!known) {
                length_now = own_length<Plainly>(p);
                find(now, read_entry);
#pragma unroll
                for (int i = 0; i <= NUM_STAGES; ++i) taken[i] = found[i];
            }
            load_first(first_tile(), found);
            if (known || !any_in_warp(length_now != length || !same_pages(taken, now))) return true;
            copy_async_wait<0>();
            sync_warp();
        }
    }
    DEVICE static bool same_pages(const Places& a, const Places& b) {
        bool same = true;
#pragma unroll
        for (int i = 0; i <= NUM_STAGES; ++i)
#pragma unroll
            for (int n = 0; n < KvRows::ENTRIES; ++n) same &= a[i].page[n] == b[i].page[n];
        return same;
    }
};
