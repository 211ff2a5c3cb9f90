// While the kernel before this one ends and HBM is idle, a block has L2 fetch the keys and values that its warps load first. Lengths,
// query_starts and numbers of pages may still be written by then, so that the piece is a guess: it lies in the cache whatever
// stands there, and nothing but L2 gets to know of it.
struct Guessing { DEVICE static int read(const int* place) { return load_guess(place); } };

// p.prefetch_tiles tiles of each warp of a piece, one key a thread.
DEVICE void prefetch_piece(const Params& p, const Piece& piece, const Tiles& tiles) {
    const Cut& cut = piece.cut;
    const KvElement *k = p.k + piece.rows.head_kv * p.k_head_stride, *v = p.v + piece.rows.head_kv * p.v_head_stride;
    const int tile_end = min_of(piece.tile_begin + p.prefetch_tiles * NUM_WARPS, piece.tile_end);
    const int begin = max_of(tiles.first_key(piece.tile_begin), tiles.key_begin);
    const int end = min_of(tiles.first_key(tile_end), tiles.key_end);
    constexpr int AT_ONCE = 4;  // so many places are asked for before the first is needed
#pragma unroll 1
    for (int key = begin + thread_id(); key < end; key += AT_ONCE * THREADS) {
        KeyPlace place[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) place[i] = guess_place(p, cut.batch, min_of(key + i * THREADS, end - 1));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (key + i * THREADS >= end) break;
#pragma unroll
            for (int h = 0; h < BLOCK_HEADS_KV; ++h) {
                if (h > 0 && piece.rows.head_kv + h >= p.heads_kv) break;
                prefetch_l2(k + place[i].batch * p.k_batch_stride + place[i].row * p.k_row_stride + h * p.k_head_stride,
                            HEAD_DIM * KV_BYTES);
                prefetch_l2(v + place[i].batch * p.v_batch_stride + place[i].row * p.v_row_stride + h * p.v_head_stride,
                            HEAD_DIM_V * KV_BYTES);
            }
        }
    }
}
