// The tiles of one split: all have equally many, but the first ones one more. Where there are fewer tiles than splits, the last
// ones have none.
DEVICE KvTiles<BLOCK_N> tiles_of_split(KvTiles<BLOCK_N> tiles, int split, int splits) {
    const int each = tiles.end / splits, longer = tiles.end - each * splits;
    const int begin = split * each + min_of(split, longer);
    tiles.end = each + int(split < longer);
    tiles.key_begin += begin * BLOCK_N;
    return tiles;
}
#include "attention/partial.cuh"
